"""`RankSampler`: samples from every rank of a training loop that is not Halation's."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, SupportsFloat, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn

from halation import work_division
from halation.distributed.external_process_group import external_world, is_sharded, reshard, unwrap_model
from halation.distributed.world import World, run_on_rank_zero
from halation.errors import InputError, RankFailure
from halation.input_files import read_json
from halation.runs.lock import hold_folder
from halation.runs.run_folder import EXTERNAL_TRAINER, MetricsFile, RunFolder, write_json_with_digest
from halation.sampling.all_rank_sampler import complete_rows, find_missing_batches, make_row
from halation.sampling.sample_folder import SampleFolder, SampleRow, SampleWriter, publish_index, remove_samples_after
from halation.sampling.user_function_sampler import Draw, FunctionSampler, FunctionSpec

log = logging.getLogger(__name__)

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What became of one image."""

    index: int
    prompt: str
    seed: int
    state: Literal["done", "failed"]
    file: Path | None
    """Where the image is; None where it failed."""
    reason: str
    """Why it failed; empty where it is done."""
    rank: int
    """Who drew it; -1 where it was there already and that is not known."""
    seconds: float

    @classmethod
    def from_row(cls, row: SampleRow, sample_folder: SampleFolder) -> Sample:
        names = ("index", "prompt", "seed", "state", "reason", "rank", "seconds")
        file = sample_folder.folder / row["file"] if row["state"] == "done" else None
        return cls(file=file, **{name: row[name] for name in names})


@dataclass(kw_only=True)
class _SamplerSettings:
    """Everything that decides the images besides weights and `draw`, as plain JSON."""

    prompts: list[str]
    seed: int
    same_seed: bool
    user_settings: dict[str, Any] = field(default_factory=dict)

    def specs(self) -> list[FunctionSpec]:
        return [
            FunctionSpec(
                index=index,
                id=f"sample_{index:02d}",
                prompt=prompt,
                seed=self.seed if self.same_seed else self.seed + index,
                settings=self.user_settings,
            )
            for index, prompt in enumerate(self.prompts)
        ]

    def as_json(self) -> dict[str, Any]:
        own = {"trainer": EXTERNAL_TRAINER, "prompts": self.prompts, "seed": self.seed, "same_seed": self.same_seed}
        return self.user_settings | own


class RankSampler:
    """Draws a list of prompts on all ranks of any training loop, and leaves the training as it was.

        sampler = RankSampler(lambda prompt, generator: pipe(prompt, generator=generator).images[0],
                              ["a red car", "a blue car"], "runs/mine", seed=0, model=model, every=100)
        for step, batch in enumerate(batches, start=1):
            ...
            sampler(step)  # on every rank

    Prompts are divided round the ranks. Each image is published whole under `out/samples/step_0000100/`, with its
    prompt beside it and its spec inside; `grid.png` and `samples.json` come last. `halation gallery` shows `out` as a
    run. An image that cannot be drawn is reported, and training goes on. No group of the trainer's has a collective
    open meanwhile, unless the model is sharded.

    draw: `draw(prompt, generator)` returns one image: a PIL image, an array (height, width, 3) or a tensor (3, height,
        width), of bytes or of floats from 0 to 1. The generator is a CPU generator made of the image's seed: with noise
        from it, and nothing else that depends on the rank, an image is the same on any number of ranks. It is called
        without gradients and without autocast. With DistributedDataParallel it must use the model inside of the
        wrapper.
    prompts: what to draw, one image each.
    out: a folder of the sampler's own, which becomes a run.
    seed: image k has seed + k, or all have `seed` with `same_seed`.
    model: the module or modules that `draw` uses: in evaluation mode while it draws, every part in its own mode again
        afterwards.
    every: draw at steps that are multiples of this; other calls return at once.
    weights: called to make a context in which the weights to draw with are in place, for example an average of them.
    sharded: whether every forward is a collective (FSDP2, ZeRO-3), so that all ranks must make equally many. Seen on
        the weights of `model` where it is not told. Ranks without a prompt then draw one that is thrown away.
    settings: whatever else decides the images (plain JSON): written into every image. Images with other settings are
        drawn again.
    again: draw also what is there already. Otherwise the step that a process calls first is not drawn again where it is
        complete; later steps are, with everything after them forgotten, because their weights were trained again. So
        `out` belongs to one training: a second one is refused while the process of the first lives and refers to its
        sampler.
    timeout_s: a rank that has made no progress for so long, no forward of `model` and no image, is named and the call
        raises. A rank that ended, was killed or left `draw` by `sys.exit` or Ctrl+C is named within seconds.
    """

    def __init__(
        self,
        draw: Draw,
        prompts: Sequence[str],
        out: str | os.PathLike[str],
        seed: int = 0,
        *,
        model: nn.Module | Sequence[nn.Module] | None = None,
        every: int = 1,
        same_seed: bool = False,
        weights: Callable[[], AbstractContextManager[Any]] | None = None,
        sharded: bool | None = None,
        settings: Mapping[str, Any] | None = None,
        again: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        self.draw = draw
        self.run = RunFolder(Path(out))
        self.modules: tuple[nn.Module, ...] = (model,) if isinstance(model, nn.Module) else tuple(model or ())
        self.every = every
        self.weights = weights or contextlib.nullcontext
        self.sharded = sharded
        self.again = again
        self.timeout_s = timeout_s
        self._settings = _make_settings(prompts, seed, same_seed, settings)
        if every < 1:
            raise InputError(f"every={every}", "a number of steps, at least 1", "leave sampler(step) out to draw never")
        _check_folder(self.run)
        self._folder_lock: Any = None
        self._last_step: int | None = None
        self._num_forwards: int | None = None
        _check_not_fsdp1(self.modules)

    def use(self, model: nn.Module) -> None:
        """Take this module for the one that draws, where none was named."""
        self.modules = self.modules or (model,)
        _check_not_fsdp1(self.modules)

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def __call__(self, step: SupportsIndex, *, loss: SupportsFloat | None = None) -> tuple[Sample, ...]:
        """Draw the samples of this step, if any are due. Called on every rank, which all return the same; `loss` is
        shown beside them."""
        step = _check_step(step)
        is_later_step = self._last_step is not None and step > self._last_step
        self._last_step = step if self._last_step is None else max(step, self._last_step)
        if not self.is_due(step):
            return ()
        metrics = {} if loss is None else {"loss": _finite_loss(loss)}
        _check_not_fsdp1(self.modules)  # again: a trainer may have wrapped what it was given
        self._reshard_modules()  # or FSDP2's weights would pass for whole ones after a forward without a backward
        size = _world_size()
        rank = dist.get_rank() if size > 1 or dist.is_initialized() else 0
        with external_world(rank, size, torch.device("cpu"), self.timeout_s) as world:
            steps = world.all_gather_object(step)
            other = next((rank for rank, theirs in enumerate(steps) if theirs != steps[0]), None)
            if other is not None:
                raise RankFailure(
                    f"rank {other} samples step {steps[other]} where rank 0 samples step {steps[0]}: "
                    "sampler(step) needs the same step on every rank"
                )
            sample_folder = SampleFolder(folder=self.run.samples_at(step))
            run_on_rank_zero(
                world,
                f"begin of step {step}",
                lambda _: self._prepare_step(sample_folder, step, is_later_step),
                self.timeout_s,
            )
            rows = self._draw_missing(world, sample_folder, step, metrics)
        return tuple(Sample.from_row(row, sample_folder) for row in rows)

    def _draw_missing(
        self, world: World, sample_folder: SampleFolder, step: int, metrics: Mapping[str, float | None]
    ) -> list[SampleRow]:
        specs = self._settings.specs()
        sharded = any(map(is_sharded, self.modules)) if self.sharded is None else self.sharded
        if sharded and not self.modules:
            raise InputError("sharded=True without a model", "the sharded modules that draw uses", "pass model=")
        sampler = FunctionSampler(
            world,
            self.draw,
            specs,
            self.modules,
            step=step,
            sharded=sharded,
            timeout_s=self.timeout_s,
            num_forwards=self._num_forwards,
        )
        batches = work_division.make_batches(specs, 1)
        todo = find_missing_batches(world, sample_folder, batches)
        existing_rows: list[SampleRow] | None = world.broadcast_from_rank_zero(
            _read_complete_rows(sample_folder, specs) if world.is_rank_zero and not todo else None
        )
        if existing_rows is not None:
            log.info("samples of step %d are there already", step)
            return existing_rows
        metadata = {"step": step, "settings": self._settings.as_json()}
        if world.is_rank_zero:
            with self._log_errors(f"samples of step {step} are not shown as coming"):
                write_json_with_digest(sample_folder.index_path, {**metadata, "samples": []})
        log.info("Generating samples: %d of %d images on %d ranks (step %d)", len(todo), len(specs), world.size, step)
        with self._swap_weights() if todo else contextlib.nullcontext():
            rows = sampler.draw_batches(batches, todo, SampleWriter(sample_folder, ""), f"sampling step {step}")
        self._num_forwards = sampler.num_forwards
        rows = complete_rows(specs, rows, sample_folder)
        run_on_rank_zero(
            world,
            f"index of step {step}",
            lambda _: self._publish_step(sample_folder, rows, metadata, metrics),
            self.timeout_s,
        )
        return rows

    @contextlib.contextmanager
    def _swap_weights(self) -> Iterator[None]:
        """The weights to draw with; shards are given back on both sides, or who swaps weights would meet whole ones."""
        self._reshard_modules()
        with self.weights():
            try:
                yield
            finally:
                self._reshard_modules()

    def _reshard_modules(self) -> None:
        for module in self.modules:
            reshard(module)

    def _prepare_step(self, sample_folder: SampleFolder, step: int, is_later_step: bool) -> None:
        """What makes the folder a run for the gallery; and what another past of this training left is forgotten.

        A process that came to this step from an earlier one has trained its weights again. The step it was started at
        may be complete.
        """
        if self._folder_lock is None:
            self._open_run()
        if is_later_step:
            with self._log_errors("samples of later steps stay"):
                remove_samples_after(self.run.samples, step - 1)
                if self.run.metrics.exists():
                    MetricsFile(self.run.metrics).truncate_after(step - 1)
        elif self.again:
            sample_folder.clear()

    def _open_run(self) -> None:
        """Hold the folder against another training; a disk that cannot be used is none of that."""
        try:
            self.run.folder.mkdir(parents=True, exist_ok=True)
            self._folder_lock = hold_folder(self.run.folder)
        except OSError as error:
            reason = error.strerror or error
            log.error("cannot write to directory %s: %s; it is not shown as a run", self.run.folder, reason)
            return
        models = {"model": type(unwrap_model(self.modules[0])).__name__} if self.modules else {}
        record = {"job": "train", "settings": models | self._settings.as_json() | {"every": self.every}}
        with self._log_errors(f"{self.run.folder} is not shown as a run"):
            write_json_with_digest(self.run.config, record | {"fixed": {}, "changes": []})

    def _publish_step(
        self,
        sample_folder: SampleFolder,
        rows: Sequence[SampleRow],
        metadata: Mapping[str, Any],
        metrics: Mapping[str, float | None],
    ) -> None:
        with self._log_errors(f"the samples of step {metadata['step']} are not listed"):
            publish_index(sample_folder, rows, {**metadata, **metrics})
        with self._log_errors(f"step {metadata['step']} has no line in {self.run.metrics.name}"):
            # One line a step, in order; lines of later steps stay where only what was missing of an earlier one was
            # drawn.
            file, step = MetricsFile(self.run.metrics), metadata["step"]
            later_rows = [line for line in file.read_rows() if line.get("step", 0) >= step]
            if later_rows:
                file.truncate_after(step - 1)
            for line in [{"step": step, **metrics}, *(line for line in later_rows if line["step"] != step)]:
                file.append(line)

    @contextlib.contextmanager
    def _log_errors(self, what: str) -> Iterator[None]:
        """A disk, a damaged file, an image that was removed meanwhile: none of these may end a training."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            log.error("cannot write to directory %s: %s; %s, training goes on", self.run.folder, reason, what)
        except Exception as error:  # noqa: BLE001 - see above
            log.error("%s, training goes on: %s: %s", what, type(error).__name__, error)


def _check_step(step: SupportsIndex) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise InputError(f"step {step!r}", "a whole number from 0", "call sampler(step) with the number of updates")
    return number


def _finite_loss(loss: SupportsFloat) -> float | None:
    """What JSON can hold; a loss that is not finite is shown as none."""
    try:
        number = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"a loss that is not a number ({error})", "one number", "pass loss=loss.item()") from None
    return number if math.isfinite(number) else None


def _check_not_fsdp1(modules: Sequence[nn.Module]) -> None:
    # By the name, because importing the class takes long and few programs have it.
    names = {base.__name__ for module in modules for part in module.modules() for base in type(part).__mro__}
    if "FullyShardedDataParallel" in names:
        raise InputError(
            "the model is wrapped by FullyShardedDataParallel (FSDP1)",
            "FSDP2 (fully_shard), ZeRO-3, DistributedDataParallel or a plain module",
            "shard with fully_shard: fsdp_version 2 in accelerate and transformers, ModelParallelStrategy in Lightning",
        )


def _make_settings(
    prompts: Sequence[str], seed: int, same_seed: bool, settings: Mapping[str, Any] | None
) -> _SamplerSettings:
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    wrong = next((prompt for prompt in texts if not isinstance(prompt, str)), None)
    if wrong is not None:
        raise InputError(f"a prompt of the type {type(wrong).__name__}", "texts", "pass prompts=['a red car', ...]")
    for prompt in texts:  # an argument of a command may have been bytes of another encoding
        try:
            prompt.encode()
        except UnicodeEncodeError:
            action = "correct the characters that are no text"
            raise InputError(f"the prompt {prompt!r}", "text that UTF-8 can hold", action) from None
    if not 0 <= seed <= MAX_SEED - len(texts):
        raise InputError(
            f"seed={seed}", "a whole number from 0 that leaves room for the prompts below 2**63", "pass seed=0"
        )
    try:
        user_settings = json.loads(json.dumps(dict(settings or {}), allow_nan=False, ensure_ascii=False).encode())
    except (TypeError, ValueError) as error:
        raise InputError(
            f"settings that are not JSON ({error})", "numbers, texts, lists", "pass plain values"
        ) from None
    return _SamplerSettings(prompts=texts, seed=seed, same_seed=same_seed, user_settings=user_settings)


def _check_folder(run: RunFolder) -> None:
    """A record of another program (a run of ours, the config.json of a saved model) is not written over."""
    try:
        record = read_json(run.config)
    except OSError:
        return  # nothing is there; or a disk that cannot be used, which the first drawing tells
    except ValueError:
        record = None
    settings = record.get("settings") if isinstance(record, dict) else None
    if not isinstance(settings, dict) or settings.get("trainer") != EXTERNAL_TRAINER:
        raise InputError(
            f"{run.config} belongs to something else",
            "a folder of the sampler's own",
            f"pass out={str(run.folder / 'halation')!r}",
        )


def _world_size() -> int:
    """Of the group that the trainer has made. Ranks without one would each draw everything, into the same files."""
    if dist.is_initialized():
        return dist.get_world_size()
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1:
        raise InputError(
            f"WORLD_SIZE is {size}, but torch.distributed is not initialised",
            "ranks that know each other",
            "call torch.distributed.init_process_group before the first sampler(step)",
        )
    return 1


def _read_complete_rows(sample_folder: SampleFolder, specs: Sequence[FunctionSpec]) -> list[SampleRow] | None:
    """The rows of a step that is complete, which its images alone do not make it."""
    rows = sample_folder.read_index().get("samples")
    if not isinstance(rows, list) or len(rows) != len(specs):
        return None
    known = make_row(specs[0], 0).keys() | {"file"} if specs else set()
    return (
        rows
        if all(isinstance(row, dict) and row.get("state") == "done" and row.keys() >= known for row in rows)
        else None
    )
