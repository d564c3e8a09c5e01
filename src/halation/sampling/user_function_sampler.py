"""Sampling with a user function on all ranks: any model, one image per call."""

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
from halation.distributed.external_process_group import eval_mode, unwrap_model
from halation.distributed.launcher import is_lost_peer_message
from halation.distributed.world import HeartbeatMonitor, World
from halation.errors import InputError, RankFailure
from halation.fault_injection import fault_point
from halation.sample_specs import SampleBatch, SampleSpec
from halation.sampling.all_rank_sampler import ImageSink, RankGroup, make_row, run_phase
from halation.sampling.sample_folder import SampleRow

log = logging.getLogger(__name__)

Draw = Callable[[str, torch.Generator], Any]
"""(prompt, generator) -> image; see `as_pixels` for the accepted types."""


@dataclass(frozen=True, kw_only=True)
class FunctionSpec(SampleSpec):
    """Prompt, seed and user settings of an image; size and steps are decided inside `draw`."""

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


class FunctionSampler:
    """Samples with a user function, whose model may be distributed over the ranks in any way."""

    def __init__(
        self,
        world: World,
        draw: Draw,
        specs: Sequence[FunctionSpec],
        modules: Sequence[nn.Module],
        *,
        step: int,
        sharded: bool,
        timeout_s: float,
        num_forwards: int | None = None,
    ) -> None:
        """`num_forwards` is the number of forwards per image, if known from earlier sampling."""
        self.world = world
        self.sharded = sharded
        self.ranks = RankGroup(world=world, sharded=sharded, timeout_s=timeout_s, stop=lambda: 0)
        self.draw = draw
        self.filler_specs = (*specs, FunctionSpec(index=-1, id="", prompt="", seed=0, settings={}))
        self.modules = tuple(modules)
        self.step = step
        self.num_forwards = num_forwards
        self._heartbeat: Callable[[], None] = lambda: None
        self._num_started = self._forward_depth = 0

    def draw_batches(
        self, batches: Sequence[SampleBatch], todo: Sequence[int], sink: ImageSink, label: str
    ) -> list[SampleRow]:
        rows = self.ranks.draw_batches(self, batches, todo, sink, label)
        failure = next((row for row in rows if row["state"] == "ended"), None)
        if failure is not None:
            raise RankFailure(f"rank {failure['rank']} failed: {failure['reason']}")
        return rows

    @contextlib.contextmanager
    def preserve_training_state(self) -> Iterator[None]:
        """Disable gradients, autocast and its cache, and set evaluation mode; restore them after.

        If the caller is inside an autocast region, its cache may contain casts of weights that have changed since, and
        training could later use weights that were cast without gradients. Clearing the cache would also help, but then
        training would cast again and accumulate its gradients in another precision. `draw` may enable autocast itself.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for kind in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
                stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
            stack.enter_context(eval_mode(*self.modules))
            stack.enter_context(self._track_forwards())
            yield

    @contextlib.contextmanager
    def _track_forwards(self) -> Iterator[None]:
        """Track every forward, for heartbeats and to distinguish errors inside a sharded forward."""
        modules = {
            part
            for whole in self.modules
            for part in (whole.modules() if self.sharded else (whole, unwrap_model(whole)))
        }
        # prepend: run before the hooks that gather shards, in which a sharded forward fails.
        handles = [part.register_forward_pre_hook(self._on_forward_start, prepend=True) for part in modules]
        handles += [part.register_forward_hook(self._on_forward_end) for part in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_forward_start(self, module: nn.Module, _: Any) -> None:
        if isinstance(module, DistributedDataParallel) and self.world.size > 1 and not self.sharded:
            raise InputError(
                "draw calls the DistributedDataParallel wrapper, whose forward may wait for other ranks",
                "the module itself, because ranks sample independently",
                "call model.module inside draw",
            )
        self._num_started += not self._forward_depth  # nested forwards do not count
        self._forward_depth += 1
        self._heartbeat()

    def _on_forward_end(self, *_: Any) -> None:
        self._forward_depth -= 1

    def draw_batch(
        self, batch: SampleBatch | None, template: SampleBatch, sink: ImageSink, monitor: HeartbeatMonitor
    ) -> list[SampleRow]:
        began = time.perf_counter()
        self._heartbeat = monitor.heartbeat
        if batch is None:
            self._draw_filler(monitor)
            return []
        spec = batch.specs[0]
        rows = [make_row(spec, self.world.rank)]
        pixels = (
            self._draw_sharded(spec, rows, monitor)
            if self.sharded
            else run_phase(rows, lambda: self._draw_pixels(spec), self._mark_failed)
        )
        monitor.heartbeat()
        if pixels is not None:
            rows[0]["seconds"] = round(time.perf_counter() - began, 3)
            run_phase(rows, lambda: sink.put(batch, {0: pixels}, rows), self._mark_failed)
        return rows

    def _draw_pixels(self, spec: SampleSpec) -> np.ndarray:
        self._num_started = self._forward_depth = 0
        fault_point("sample.forward")
        rng.seed_for_image(spec.seed)
        for module in self.modules:
            module.eval()  # again: the previous call of draw may have ended with train()
        try:
            image = self.draw(spec.prompt, torch.Generator(device="cpu").manual_seed(spec.seed))
            self.num_forwards = self._num_started
            return as_pixels(image)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # training needs the memory next
            raise

    def _draw_sharded(self, spec: SampleSpec, rows: list[SampleRow], monitor: HeartbeatMonitor) -> np.ndarray | None:
        """Sample an image of a sharded model.

        Other ranks wait inside its forwards, so an error between them fails all ranks; an error before the first or
        after the last costs only this image.
        """
        try:
            return self._draw_pixels(spec)
        except Exception as error:  # noqa: BLE001 - draw may raise anything
            self._raise_if_forwards_owed(error, monitor)
            log.debug("while sampling:\n%s", traceback.format_exc())
            self._mark_failed(rows, f"{type(error).__name__}: {error}")
        if not self._num_started:
            self._draw_filler(monitor)
        return None

    def _draw_filler(self, monitor: HeartbeatMonitor) -> None:
        """Sample an image and discard it, so that the number of forwards matches the other ranks.

        It uses the first prompt that gets as far as a forward.
        """
        reason = ""
        for spec in self.filler_specs:
            try:
                self._draw_pixels(spec)
            except Exception as error:  # noqa: BLE001 - draw may raise anything
                self._raise_if_forwards_owed(error, monitor)
                reason = f"{type(error).__name__}: {error}"
            if self._num_started:
                return
        self._report_failure(reason, monitor)
        raise RankFailure(
            f"rank {self.world.rank} cannot run the forwards that the other ranks wait for: "
            f"no forward of `model` in draw ({reason})"
        )

    def _raise_if_forwards_owed(self, error: Exception, monitor: HeartbeatMonitor) -> None:
        """Raise if other ranks still wait for forwards of this rank.

        That is the case inside a forward, or if it may not have run all forwards of an image.
        """
        if not self._forward_depth and self._num_started in (0, self.num_forwards):
            return
        if isinstance(error, RuntimeError) and is_lost_peer_message(str(error)):
            raise RankFailure(
                f"a sharded forward of the samples could not be completed: {monitor.explain_failure()}"
            ) from error
        self._report_failure(f"{type(error).__name__}: {error}", monitor)
        where = (
            "inside a sharded forward"
            if self._forward_depth
            else f"after {self._num_started} of an image's sharded forwards"
        )
        raise RankFailure(
            f"rank {self.world.rank} failed {where} while sampling; no rank can continue:\n{traceback.format_exc()}"
        ) from error

    def _report_failure(self, reason: str, monitor: HeartbeatMonitor) -> None:
        """Report the failure to ranks that wait in a forward and to ranks that wait for its rows."""
        monitor.report_failure(reason)
        with contextlib.suppress(RuntimeError):
            monitor.publish_result([{"state": "ended", "rank": self.world.rank, "reason": reason}])

    def _mark_failed(self, rows: list[SampleRow], reason: str) -> None:
        for row in rows:
            what = f"prompt {row['index']} {row['prompt']!r} at step {self.step}"
            log.error("Error during sampling on rank %d: %s: %s", self.world.rank, what, reason)
            row |= {"state": "failed", "reason": reason}


def as_pixels(image: Any) -> np.ndarray:
    """Convert the result of `draw` to RGB bytes (height, width, 3).

    Accepted are a PIL image, an array (height, width) or (height, width, channels), or a tensor (channels, height,
    width) of one image, grey or RGB, as bytes or as floats from 0 to 1, which are clamped.
    """
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    is_tensor = isinstance(image, torch.Tensor)
    values = image.detach().float().cpu().numpy() if is_tensor and image.is_floating_point() else image
    values = np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values)
    if values.ndim == 4 and values.shape[0] == 1:
        values = values[0]
    if is_tensor and values.ndim == 3:
        values = np.moveaxis(values, 0, -1)
    if values.ndim == 2:
        values = values[..., None]
    if values.ndim != 3 or values.shape[-1] not in (1, 3) or 0 in values.shape or values.dtype.kind not in "uf":
        raise _not_an_image_error(image)
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            raise InputError("draw returned values that are not finite", "numbers from 0 to 1", "check the model")
        values = np.rint(np.clip(values, 0.0, 1.0) * 255.0)
    elif values.dtype != np.uint8:
        raise _not_an_image_error(image)
    return np.ascontiguousarray(np.broadcast_to(values, (*values.shape[:2], 3)).astype(np.uint8))


def _not_an_image_error(found: Any) -> InputError:
    shape = tuple(getattr(found, "shape", ()))
    what = f"{type(found).__name__} of {found.dtype}, {shape}" if hasattr(found, "dtype") else type(found).__name__
    return InputError(
        f"draw returned {what}",
        "one image: a PIL image, an array (height, width, 3) or a tensor (3, height, width) "
        "of bytes or of floats from 0 to 1",
        "return for example pipe(...).images[0]",
    )
