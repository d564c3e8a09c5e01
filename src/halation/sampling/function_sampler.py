"""Pictures by somebody else's function: any model, any sampler, one picture a call; what ranks owe each other is `Rounds`."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halation.distributed import rng
from halation.distributed.external_group import bare, undisturbed
from halation.distributed.launcher import about_peers
from halation.distributed.world import Vigil, World
from halation.errors import InputError, RankFailure
from halation.faults import fault_point
from halation.sampling.distributed import Rounds, Sink, row_of
from halation.sampling.files import Row
from halation.specs import Sheet, Spec

log = logging.getLogger(__name__)

Draw = Callable[[str, torch.Generator], Any]
"""(prompt, generator) -> picture; see `as_pixels` for what a picture may be."""


@dataclass(frozen=True, kw_only=True)
class OwnSpec(Spec):
    """What decides a picture besides the weights, as far as its owner tells: size and steps are the business of `draw`."""

    settings: Mapping[str, Any]
    height: int = 0
    width: int = 0
    steps: int = 0
    guidance_scale: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "id": self.id,
            "prompt": self.prompt,
            "seed": self.seed,
            "settings": dict(self.settings),
        }


class OwnDrawing(Rounds):
    """A drawing by a function of the caller's, whose model may be spread over the ranks in whatever way."""

    def __init__(
        self,
        world: World,
        draw: Draw,
        specs: Sequence[OwnSpec],
        modules: Sequence[nn.Module],
        *,
        step: int,
        sharded: bool,
        timeout_s: float,
        num_forwards: int | None = None,
    ) -> None:
        """`num_forwards`: how many a whole picture takes, where an earlier drawing has told."""
        super().__init__(world, sharded=sharded, timeout_s=timeout_s, stop=lambda: 0)
        self.draw = draw
        self.company = (*specs, OwnSpec(index=-1, id="", prompt="", seed=0, settings={}))
        self.modules = tuple(modules)
        self.step = step
        self.num_forwards = num_forwards
        self._beat: Callable[[], None] = lambda: None
        self._begun = self._inside = 0

    def draw_sheets(self, sheets: Sequence[Sheet], todo: Sequence[int], sink: Sink, label: str) -> list[Row]:
        rows = super().draw_sheets(sheets, todo, sink, label)
        ended = next((row for row in rows if row["state"] == "ended"), None)
        if ended is not None:
            raise RankFailure(f"rank {ended['rank']} failed: {ended['reason']}")
        return rows

    @contextlib.contextmanager
    def _invisible(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(rng.kept())
            stack.enter_context(torch.no_grad())
            stack.enter_context(_full_precision())
            stack.enter_context(undisturbed(*self.modules))
            stack.enter_context(self._listening())
            yield

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Hear of every forward: it is progress, and an error inside a sharded one is another matter than one outside."""
        parts = {part for whole in self.modules for part in (whole.modules() if self.sharded else (whole, bare(whole)))}
        # Before the hooks that gather shards, which is where a sharded forward fails.
        handles = [part.register_forward_pre_hook(self._before, prepend=True) for part in parts]
        handles += [part.register_forward_hook(self._after) for part in parts]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, _: Any) -> None:
        if isinstance(module, DistributedDataParallel) and self.world.size > 1 and not self.sharded:
            raise InputError(
                "draw calls the DistributedDataParallel wrapper, whose forward may wait for other ranks",
                "the model itself, because ranks draw apart",
                "call model.module inside of draw",
            )
        self._begun += not self._inside  # parts of a forward are not forwards
        self._inside += 1
        self._beat()

    def _after(self, *_: Any) -> None:
        self._inside -= 1

    def _draw(self, sheet: Sheet | None, shape: Sheet, sink: Sink, vigil: Vigil) -> list[Row]:
        began = time.perf_counter()
        self._beat = vigil.beat
        if sheet is None:
            self._keep_company(vigil)
            return []
        spec = sheet.specs[0]
        rows = [row_of(spec, self.world.rank)]
        pixels = self._together(spec, rows, vigil) if self.sharded else self._phase(rows, lambda: self._pixels(spec))
        vigil.beat()
        if pixels is not None:
            rows[0]["seconds"] = round(time.perf_counter() - began, 3)
            self._phase(rows, lambda: sink.put(sheet, {0: pixels}, rows))
        return rows

    def _pixels(self, spec: Spec) -> np.ndarray:
        self._begun = self._inside = 0
        fault_point("sample.forward")
        rng.begin_picture(spec.seed)
        for module in self.modules:
            module.eval()  # again: the draw before may have ended with train()
        try:
            picture = self.draw(spec.prompt, torch.Generator(device="cpu").manual_seed(spec.seed))
            self.num_forwards = self._begun
            return as_pixels(picture)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # training needs it next
            raise

    def _together(self, spec: Spec, rows: list[Row], vigil: Vigil) -> np.ndarray | None:
        """A sharded model's picture. Peers wait inside its forwards, so an error amid them is everybody's; one before or after is not."""
        try:
            return self._pixels(spec)
        except Exception as error:  # noqa: BLE001 - whatever a picture dies of
            self._refuse_amid(error, vigil)
            log.debug("while sampling:\n%s", traceback.format_exc())
            self._failed(rows, f"{type(error).__name__}: {error}")
        if not self._begun:
            self._keep_company(vigil)
        return None

    def _keep_company(self, vigil: Vigil) -> None:
        """A picture that nobody will see, so that its forwards meet those of the others: of the first prompt that gets as far as one."""
        reason = ""
        for spec in self.company:
            try:
                self._pixels(spec)
            except Exception as error:  # noqa: BLE001 - see _together
                self._refuse_amid(error, vigil)
                reason = f"{type(error).__name__}: {error}"
            if self._begun:
                return
        self._end(reason, vigil)
        raise RankFailure(
            f"rank {self.world.rank} cannot make the forwards that the others wait for: no forward of `model` in draw ({reason})"
        )

    def _refuse_amid(self, error: Exception, vigil: Vigil) -> None:
        """Raise where this rank owes the others forwards: inside of one, or not known to have made all of a picture's."""
        if not self._inside and self._begun in (0, self.num_forwards):
            return
        if isinstance(error, RuntimeError) and about_peers(str(error)):
            raise RankFailure(f"a sharded forward of the samples could not be completed: {vigil.blame()}") from error
        self._end(f"{type(error).__name__}: {error}", vigil)
        where = "inside a sharded forward" if self._inside else f"after {self._begun} of a picture's sharded forwards"
        raise RankFailure(
            f"rank {self.world.rank} failed {where} while sampling, which no rank can survive:\n{traceback.format_exc()}"
        ) from error

    def _end(self, reason: str, vigil: Vigil) -> None:
        """Leave word for those who miss this rank in a forward, and for those who only wait for its rows."""
        vigil.fail(reason)
        with contextlib.suppress(RuntimeError):
            vigil.leave([{"state": "ended", "rank": self.world.rank, "reason": reason}])

    def _failed(self, rows: list[Row], reason: str) -> None:
        for row in rows:
            what = f"prompt {row['index']} {row['prompt']!r} at step {self.step}"
            log.error("Error during sampling on rank %d: %s: %s", self.world.rank, what, reason)
            row |= {"state": "failed", "reason": reason}

    def _pass_on(self, rows: Sequence[Row]) -> None:
        """Ranks of one trainer write to one place as a rule: the rank that failed has said it."""


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """No autocast but draw's own, and that without the cache of casts, also where the caller is inside of an autocast region.

    There draw would find the weights of before they changed, and training perhaps weights that were cast without gradients. Clearing
    the cache would do as much, but training would cast again and add its gradients up in another precision.
    """
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
            stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        yield


def as_pixels(picture: Any) -> np.ndarray:
    """RGB bytes, height by width by 3, of what `draw` returned.

    A PIL image; or an array, height by width (by channels); or a tensor, channels by height by width; of one picture, grey or RGB, as
    bytes or as floats from 0 to 1, which are clamped.
    """
    if isinstance(picture, Image.Image):
        return np.asarray(picture.convert("RGB"))
    is_tensor = isinstance(picture, torch.Tensor)
    values = picture.detach().float().cpu().numpy() if is_tensor and picture.is_floating_point() else picture
    values = np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values)
    if values.ndim == 4 and values.shape[0] == 1:
        values = values[0]
    if is_tensor and values.ndim == 3:
        values = np.moveaxis(values, 0, -1)
    if values.ndim == 2:
        values = values[..., None]
    if values.ndim != 3 or values.shape[-1] not in (1, 3) or 0 in values.shape or values.dtype.kind not in "uf":
        raise _not_a_picture(picture)
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            raise InputError("draw returned values that are not finite", "numbers from 0 to 1", "look at the model")
        values = np.rint(np.clip(values, 0.0, 1.0) * 255.0)
    elif values.dtype != np.uint8:
        raise _not_a_picture(picture)
    return np.ascontiguousarray(np.broadcast_to(values, (*values.shape[:2], 3)).astype(np.uint8))


def _not_a_picture(found: Any) -> InputError:
    shape = tuple(getattr(found, "shape", ()))
    what = f"{type(found).__name__} of {found.dtype}, {shape}" if hasattr(found, "dtype") else type(found).__name__
    return InputError(
        f"draw returned {what}",
        "one picture: a PIL image, an array (height, width, 3) or a tensor (3, height, width) of bytes or of floats from 0 to 1",
        "return for example pipe(...).images[0]",
    )
