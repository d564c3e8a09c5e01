"""`RankSampler`: samples on every rank of a training loop outside Halation."""

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
from halation.errors import InputError, RankFailure, format_count
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
    """The result of one image."""

    index: int
    prompt: str
    seed: int
    state: Literal["done", "failed"]
    file: Path | None
    """The image file; None if it failed."""
    reason: str
    """Why it failed; empty if it is done."""
    rank: int
    """The rank that sampled it; -1 if the image already existed and the rank is unknown."""
    seconds: float

    @classmethod
    def from_row(cls, row: SampleRow, sample_folder: SampleFolder) -> Sample:
        names = ("index", "prompt", "seed", "state", "reason", "rank", "seconds")
        file = sample_folder.folder / row["file"] if row["state"] == "done" else None
        return cls(file=file, **{name: row[name] for name in names})


@dataclass(kw_only=True)
class _SamplerSettings:
    """Everything besides weights and `draw` that decides the images, as plain JSON."""

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
    """Samples prompts on all ranks of any training loop, without changing the training.

        sampler = RankSampler(lambda prompt, generator: pipe(prompt, generator=generator).images[0],
                              ["a red car", "a blue car"], "runs/mine", seed=0, model=model, every=100)
        for step, batch in enumerate(batches, start=1):
            ...
            sampler(step)  # on every rank

    Prompts are assigned to ranks in turn. Each image is published atomically under `out/samples/step_0000100/`, with
    its prompt in a file beside it and its spec in its metadata; `grid.png` and `samples.json` are written last.
    `halation gallery` shows `out` as a run. An image that fails is logged, and training continues. While ranks sample,
    no process group of the trainer has a collective in progress, unless the model is sharded.

    draw: `draw(prompt, generator)` returns one image: a PIL image, an array (height, width, 3) or a tensor (3, height,
        width), of bytes or of floats from 0 to 1. The generator is a CPU generator seeded with the image's seed. If all
        noise comes from it and nothing else depends on the rank, an image is the same on any number of ranks. `draw` is
        called without gradients and without autocast. With DistributedDataParallel it must use the module inside the
        wrapper.
    prompts: the prompts, one image each.
    out: a folder for the sampler alone, which becomes a run.
    seed: image k uses seed + k, or all images use `seed` with `same_seed`.
    model: the module or modules that `draw` uses. They are in evaluation mode while sampling; afterwards every
        submodule is back in its own mode.
    every: sample at steps that are multiples of this; other calls return immediately.
    weights: returns a context in which the weights for sampling are in place, for example the EMA.
    sharded: True if every forward is a collective (FSDP2, ZeRO-3), so that all ranks must run equally many. By default
        it is detected from the weights of `model`. Ranks without a prompt then sample one and discard the image.
    settings: anything else that decides the images (plain JSON), written into every image. Images with other settings
        are sampled again.
    again: also sample images that exist. Otherwise the first step that a process samples is skipped if it is complete.
        Later steps are always sampled, and samples of steps after them are removed, because their weights were trained
        again. Therefore `out` belongs to one training: a second one is rejected while the process of the first is alive
        and holds a reference to its sampler.
    timeout_s: a rank without progress for this time (no forward of `model`, no image) is reported, and the call raises.
        A rank that exited, was killed or left `draw` by `sys.exit` or Ctrl+C is reported within seconds.
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
            raise InputError(
                f"every={every}", "a number of steps, at least 1", "to sample never, do not call sampler(step)"
            )
        _check_folder(self.run)
        self._folder_lock: Any = None
        self._last_step: int | None = None
        self._num_forwards: int | None = None
        _check_not_fsdp1(self.modules)

    def use(self, model: nn.Module) -> None:
        """Set the module that `draw` uses, if none was given."""
        self.modules = self.modules or (model,)
        _check_not_fsdp1(self.modules)

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def __call__(self, step: SupportsIndex, *, loss: SupportsFloat | None = None) -> tuple[Sample, ...]:
        """Sample this step if it is due; call this on every rank.

        All ranks return the same samples. The gallery shows `loss` beside them.
        """
        step = _check_step(step)
        is_later_step = self._last_step is not None and step > self._last_step
        self._last_step = step if self._last_step is None else max(step, self._last_step)
        if not self.is_due(step):
            return ()
        metrics = {} if loss is None else {"loss": _finite_loss(loss)}
        _check_not_fsdp1(self.modules)  # again: a trainer may have wrapped the modules meanwhile
        self._reshard_modules()  # after a forward without a backward, FSDP2 weights are unsharded
        size = _world_size()
        rank = dist.get_rank() if size > 1 or dist.is_initialized() else 0
        with external_world(rank, size, torch.device("cpu"), self.timeout_s) as world:
            steps = world.all_gather_object(step)
            other = next((rank for rank, theirs in enumerate(steps) if theirs != steps[0]), None)
            if other is not None:
                raise RankFailure(
                    f"rank {other} samples step {steps[other]}, but rank 0 samples step {steps[0]}: "
                    "sampler(step) needs the same step on every rank"
                )
            sample_folder = SampleFolder(folder=self.run.samples_at(step))
            run_on_rank_zero(
                world,
                f"start of step {step}",
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
            log.info("samples of step %d already exist", step)
            return existing_rows
        metadata = {"step": step, "settings": self._settings.as_json()}
        if world.is_rank_zero:
            with self._log_errors(f"the gallery does not show that samples of step {step} are in progress"):
                write_json_with_digest(sample_folder.index_path, {**metadata, "samples": []})
        log.info(
            "Generating samples: %d of %s on %s (step %d)",
            len(todo),
            format_count(len(specs), "image"),
            format_count(world.size, "rank"),
            step,
        )
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
        """Put the weights for sampling in place.

        Modules are resharded before and after, so that the context swaps shards and not whole weights.
        """
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
        """Make the folder a run for the gallery, and remove samples that are out of date.

        If this process has sampled or skipped an earlier step, the weights of this step were trained again. The step
        at which it started may be complete.
        """
        if self._folder_lock is None:
            self._open_run()
        if is_later_step:
            with self._log_errors("samples of later steps are not removed"):
                remove_samples_after(self.run.samples, step - 1)
                if self.run.metrics.exists():
                    MetricsFile(self.run.metrics).truncate_after(step - 1)
        elif self.again:
            sample_folder.clear()

    def _open_run(self) -> None:
        """Lock the folder against another training; a disk error is only logged."""
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
            # One line per step, in order. Lines of later steps stay if only missing images of an earlier step were
            # sampled.
            file, step = MetricsFile(self.run.metrics), metadata["step"]
            later_rows = [line for line in file.read_rows() if line.get("step", 0) >= step]
            if later_rows:
                file.truncate_after(step - 1)
            for line in [{"step": step, **metrics}, *(line for line in later_rows if line["step"] != step)]:
                file.append(line)

    @contextlib.contextmanager
    def _log_errors(self, what: str) -> Iterator[None]:
        """Log errors (disk, damaged file, removed image) instead of ending the training."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            log.error("cannot write to directory %s: %s; %s, training continues", self.run.folder, reason, what)
        except Exception as error:  # noqa: BLE001 - see above
            log.error("%s, training continues: %s: %s", what, type(error).__name__, error)


def _check_step(step: SupportsIndex) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise InputError(
            f"step {step!r}", "an integer of at least 0", "call sampler(step) with the number of optimizer steps"
        )
    return number


def _finite_loss(loss: SupportsFloat) -> float | None:
    """Return the loss as a float for JSON, or None if it is not finite."""
    try:
        number = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"a loss that is not a number ({error})", "one number", "pass loss=loss.item()") from None
    return number if math.isfinite(number) else None


def _check_not_fsdp1(modules: Sequence[nn.Module]) -> None:
    # Compare names, because importing the class is slow and few programs use it.
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
        raise InputError(f"a prompt of the type {type(wrong).__name__}", "strings", "pass prompts=['a red car', ...]")
    for prompt in texts:  # a command-line argument may contain bytes of another encoding
        try:
            prompt.encode()
        except UnicodeEncodeError:
            action = "correct the invalid characters"
            raise InputError(f"the prompt {prompt!r}", "text that can be encoded as UTF-8", action) from None
    if not 0 <= seed <= MAX_SEED - len(texts):
        raise InputError(
            f"seed={seed}", "an integer of at least 0, with seed + number of prompts below 2**63", "pass seed=0"
        )
    try:
        user_settings = json.loads(json.dumps(dict(settings or {}), allow_nan=False, ensure_ascii=False).encode())
    except (TypeError, ValueError) as error:
        raise InputError(
            f"settings that are not JSON ({error})", "numbers, strings, lists", "pass plain values"
        ) from None
    return _SamplerSettings(prompts=texts, seed=seed, same_seed=same_seed, user_settings=user_settings)


def _check_folder(run: RunFolder) -> None:
    """Reject a folder with a config.json of something else, such as a run or a saved model."""
    try:
        record = read_json(run.config)
    except OSError:
        return  # no such file, or a disk error, which the first sampling reports
    except ValueError:
        record = None
    settings = record.get("settings") if isinstance(record, dict) else None
    if not isinstance(settings, dict) or settings.get("trainer") != EXTERNAL_TRAINER:
        raise InputError(
            f"{run.config} belongs to something else",
            "a folder for the sampler alone",
            f"pass out={str(run.folder / 'halation')!r}",
        )


def _world_size() -> int:
    """Return the size of the trainer's process group, or raise if the ranks have none.

    Ranks without a group would each sample everything into the same files.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1:
        raise InputError(
            f"WORLD_SIZE is {size}, but torch.distributed is not initialised",
            "an initialised process group",
            "call torch.distributed.init_process_group before the first sampler(step)",
        )
    return 1


def _read_complete_rows(sample_folder: SampleFolder, specs: Sequence[FunctionSpec]) -> list[SampleRow] | None:
    """Return the rows of a complete step, or None; existing images alone are not enough."""
    rows = sample_folder.read_index().get("samples")
    if not isinstance(rows, list) or len(rows) != len(specs):
        return None
    known = make_row(specs[0], 0).keys() | {"file"} if specs else set()
    return (
        rows
        if all(isinstance(row, dict) and row.get("state") == "done" and row.keys() >= known for row in rows)
        else None
    )
