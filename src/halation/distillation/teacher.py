"""The teacher of a distillation: open it, place it on devices, predict and sample with it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halation.distillation.config import DistillConfig
from halation.distributed.engines.ddp_fsdp import FSDPEngine
from halation.distributed.launcher import is_lost_peer_message, num_gpus
from halation.distributed.stop_signals import StopSignals, exit_code
from halation.distributed.world import HeartbeatMonitor, World, run_on_rank_zero, run_with_heartbeat
from halation.errors import HalationError, InputError, Interrupted, RankFailure, os_error_message
from halation.models.checkpoint_loading import load_denoiser
from halation.models.denoiser import Denoiser, compile_blocks
from halation.models.dit.denoiser import DiTDenoiser
from halation.models.dtypes import DTYPES
from halation.progress import delayed_progress
from halation.runs.run_folder import write_json_with_digest
from halation.sampling.all_rank_sampler import DenoiserSampler, SampleSettings
from halation.sampling.sample_folder import SampleFolder, is_drawn

if TYPE_CHECKING:
    from halation.models.pipelines.training.denoiser import PipelineDenoiser
from torch import Tensor, nn

from halation.models.denoiser import Condition, null_condition


class Teacher:
    """Guided predictions of a frozen denoiser, without gradients."""

    def __init__(
        self,
        denoiser: Denoiser,
        *,
        guidance: float,
        device: torch.device,
        dtype: torch.dtype,
        batch_size: int = 0,
    ) -> None:
        """`device` is the teacher's, which may differ from that of its inputs.

        `batch_size` limits the rows of one forward; 0 does not.
        """
        self.denoiser = denoiser
        self.noise_path = denoiser.noise_path
        self.guidance = guidance
        self.device = device
        self.dtype = dtype
        self.batch_size = batch_size
        self.heartbeat: Callable[[], None] = lambda: None
        """Called after every forward: on a CPU, one prediction of a large model takes longer than the heartbeat
        timeout of the other ranks."""
        self._null: Condition = {}
        denoiser.module.requires_grad_(False).eval()
        denoiser.set_guidance(guidance)

    @torch.no_grad()
    def predict(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Return guided predictions at states `x` and times `t`, in float32 on the device of `x`."""
        size = self.batch_size or len(x)
        pieces = [
            self._predict_guided(
                x[start : start + size],
                t[start : start + size],
                {name: value[start : start + size] for name, value in condition.items()},
            )
            for start in range(0, len(x), size)
        ]
        return torch.cat(pieces).to(x.device)

    @torch.no_grad()
    def forward_for_features(self, x: Tensor, t: Tensor, condition: Condition) -> None:
        """Run one forward with the prompt, for hooks that read features; its output is not needed."""
        condition = {name: value.to(self.device) for name, value in condition.items()}
        with self._mixed_precision():
            self._forward(x.to(self.device), t.to(self.device), condition)

    def _mixed_precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def _predict_guided(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        x, t = x.to(self.device), t.to(self.device)
        condition = {name: value.to(self.device) for name, value in condition.items()}
        use_cfg = self.denoiser.guidance_kind == "pair" and self.guidance != 1.0
        with self._mixed_precision():
            # One after the other takes half the memory of a doubled batch. The prompt's forward comes last, for hooks
            # that read features.
            null_answer = self._forward(x, t, condition | self._null_condition(len(x))) if use_cfg else None
            answer = self._forward(x, t, condition)
        return answer if null_answer is None else null_answer + self.guidance * (answer - null_answer)

    def _forward(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        answer = self.denoiser.forward(self.denoiser.module, x, t, condition).float()
        self.heartbeat()
        return answer

    def _null_condition(self, num_rows: int) -> Condition:
        """Null texts for the unconditional forward; size conditions are not part of it."""
        if not self._null:
            self._null = {name: value.to(self.device) for name, value in null_condition(self.denoiser, 1).items()}
        return {name: value.repeat(num_rows, *(1,) * (value.ndim - 1)) for name, value in self._null.items()}


def split_across_devices(module: nn.Module, blocks: list[nn.Module], devices: list[torch.device]) -> None:
    """Split the blocks over the devices, in order and by number of parameters.

    Everything else stays on the first device. Hooks move the activations during a forward, so inputs and outputs of
    the module are on the first device.
    """
    sizes = [sum(parameter.numel() for parameter in unit.parameters()) for unit in blocks]
    total, before = sum(sizes), 0
    module.to(devices[0])
    for block, size in zip(blocks, sizes, strict=True):
        device = devices[min(before * len(devices) // max(1, total), len(devices) - 1)]
        before += size
        if device == devices[0]:
            continue
        block.to(device)
        block.register_forward_pre_hook(
            lambda _unit, args, kwargs, device=device: (_move_to(args, device), _move_to(kwargs, device)),
            with_kwargs=True,
        )
        # Move the output back, so that the code after the block need not know of its device.
        block.register_forward_hook(lambda _unit, _args, output: _move_to(output, devices[0]))


def _move_to(value: Any, device: torch.device) -> Any:
    """Move tensors inside tuples, lists and dicts to a device; return other values unchanged."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(_move_to(inner, device) for inner in value)
    if isinstance(value, dict):
        return {key: _move_to(inner, device) for key, inner in value.items()}
    return value


log = logging.getLogger(__name__)

DEFAULT_TEACHER_BATCH_SIZE = 8
"""Default number of items in a call of the teacher: exactly this on a CPU, at least this on a GPU."""


def open_dit(config: DistillConfig) -> DiTDenoiser:
    """Load a DiT as the teacher, on the CPU."""
    denoiser = load_denoiser(Path(config.teacher_path), raw=False)
    if not isinstance(denoiser, DiTDenoiser):
        raise InputError(
            f"--teacher_path {config.teacher_path} is a run that fine-tuned a pipeline",
            "a DiT of Halation, or a whole pipeline",
            "give its export",
        )
    return denoiser


def open_teacher(world: World, config: DistillConfig, student: Denoiser, guidance: float) -> Teacher:
    """Open and place the teacher on all ranks; an error on one rank is raised on all."""
    spare_gpus: list[torch.device] = []
    if config.teacher_placement == "layers" and world.device.type == "cuda":
        # This rank's share of the GPUs that no rank computes on.
        used = world.all_gather_object(world.device.index or 0)
        free = [number for number in range(num_gpus()) if number not in used]
        spare_gpus = [torch.device("cuda", number) for number in free[world.local_rank :: len(set(used))]]
    with HeartbeatMonitor(world, "opening the teacher", config.dist_timeout_s) as monitor:
        error, teacher = "", None
        try:
            denoiser: Denoiser = run_with_heartbeat(
                lambda: _open_pipeline(world, config, student) if config.model_path else open_dit(config),
                monitor.heartbeat,
            )
            # Not in that thread: the current CUDA device is thread-local.
            teacher = _place_teacher(world, config, denoiser, guidance, spare_gpus)
        except (torch.OutOfMemoryError, MemoryError):
            error = _out_of_memory_message(world)
        except InputError as problem:
            error = str(problem)
        _raise_first_error(monitor.gather_results(error))
    assert teacher is not None
    return teacher


def _out_of_memory_message(world: World) -> str:
    return (
        f"the teacher does not fit into the memory of {world.device}; "
        "use --teacher_dtype bf16, --teacher_batch_size 1, or --teacher_placement fsdp, layers or cpu"
    )


def _raise_first_error(errors: Sequence[str]) -> None:
    """Raise the first error on all ranks, with an exit code that does not trigger a restart."""
    for message in errors:
        if message:
            failure = HalationError(message)
            failure.exit_code = InputError.exit_code
            raise failure


def _place_teacher(
    world: World, config: DistillConfig, denoiser: Denoiser, guidance: float, spare_gpus: list[torch.device]
) -> Teacher:
    device = torch.device("cpu") if config.teacher_placement == "cpu" else world.device
    teacher = Teacher(
        denoiser,
        guidance=guidance,
        device=device,
        dtype=DTYPES[config.teacher_dtype],
        batch_size=config.teacher_batch_size,
    )
    if config.feature_weight and hasattr(denoiser.module, "always_run_both"):
        raise InputError(
            f"--feature_weight with a teacher of two experts ({config.teacher_path})",
            "a teacher with one transformer, which has middle features to compare with",
            "leave --feature_weight out",
        )
    _move_to_devices(world, config, denoiser, device, spare_gpus)
    if config.compile and device.type == "cuda":
        compile_blocks(denoiser.shard_units())
    return teacher


def _open_pipeline(world: World, config: DistillConfig, student: Denoiser) -> PipelineDenoiser:
    from halation.models.pipelines.training.denoiser import PipelineDenoiser

    assert isinstance(student, PipelineDenoiser)
    height, width = config.image_size
    denoiser = PipelineDenoiser.open(
        Path(config.model_path),
        dtype=config.teacher_dtype,
        weights_dtype=config.teacher_dtype,
        lora=None,
        height=height,
        width=width,
        stays_on_cpu=world.device.type == "cpu",
        allow_experts=True,
    )
    denoiser.share_text_store(student)
    return denoiser


def _move_to_devices(
    world: World, config: DistillConfig, denoiser: Denoiser, device: torch.device, spare_gpus: list[torch.device]
) -> None:
    module, units = denoiser.module, denoiser.shard_units()
    if config.teacher_placement == "fsdp":
        denoiser.to(device, module=False)
        if hasattr(module, "always_run_both"):  # experts: all ranks must gather the shards of both equally often
            module.always_run_both = True  # type: ignore[assignment]
        FSDPEngine(world, module, units)
    elif spare_gpus:
        denoiser.to(device, module=False)
        split_across_devices(module, units, [device, *spare_gpus])
    else:
        denoiser.to(device)


@dataclasses.dataclass
class TargetBuild:
    """Callbacks for computing teacher targets on all ranks: progress, stop, errors of others."""

    on_progress: Callable[[int, int], None]
    stop: Callable[[], bool]
    agree: Callable[[str], str] | None
    """Takes this rank's error (or "") and returns any rank's; None if ranks do not run in lockstep."""
    num_written: int = 0


@contextlib.contextmanager
def build_together(
    world: World, config: DistillConfig, teacher: Teacher, num_cached: int, num_items: int
) -> Iterator[TargetBuild]:
    """Context in which all ranks compute teacher targets; an error on one rank ends all.

    After a stop signal, Interrupted is raised once all computed targets are written.
    """
    sharded = config.teacher_placement == "fsdp"
    signals = StopSignals()

    def first_error(error: str) -> str:
        return next((word for word in world.all_gather_object(error) if word), "")

    with (
        contextlib.nullcontext() if sharded else signals,  # ranks in lockstep cannot stop at different predictions
        HeartbeatMonitor(world, "computing teacher targets", config.dist_timeout_s) as monitor,
        delayed_progress(
            config.progress, "teacher targets", "items", monitor.heartbeat, (world.rank, world.size)
        ) as update_progress,
    ):
        error, build = "", TargetBuild(update_progress, lambda: signals.number > 0, first_error if sharded else None)
        # On a CPU, one prediction of a large model takes longer than the heartbeat timeout of the other ranks.
        before, teacher.heartbeat = teacher.heartbeat, monitor.heartbeat
        try:
            yield build
        except (HalationError, OSError) as problem:
            error = os_error_message(problem) or str(problem)
        except (torch.OutOfMemoryError, MemoryError) as problem:
            error = _out_of_memory_message(world)
            if sharded:  # the other ranks wait inside a forward for this one and would not read a result
                monitor.report_failure(error)
                raise RankFailure(error) from problem
        except RuntimeError as problem:
            if sharded and is_lost_peer_message(str(problem)):
                raise RankFailure(
                    f"a sharded forward of the teacher could not be completed: {monitor.explain_failure()}"
                ) from problem
            raise
        finally:
            teacher.heartbeat = before
        results = monitor.gather_results((error, build.num_written))
        _raise_first_error([error for error, _ in results])
        # A rank that was done may have received the signal while it waited.
        stop = 0 if sharded else max(world.all_gather_object(signals.number))
    if stop:
        num_kept = num_cached + sum(num for _, num in results)
        message = f"asked to stop: {num_kept} of {num_items} items are saved; run the same command to resume"
        raise Interrupted(message, exit_code(stop))


def default_batch_size(teacher: torch.device, student: torch.device, batch_size: int) -> int:
    """Items in one call of the teacher; 1 if it is on the CPU because the GPU is too small."""
    if teacher.type != "cpu":
        return max(DEFAULT_TEACHER_BATCH_SIZE, batch_size)
    return 1 if student.type != "cpu" else DEFAULT_TEACHER_BATCH_SIZE


@dataclasses.dataclass(frozen=True)
class TeacherSamples:
    """The teacher's images for the sample prompts, sampled once per teacher."""

    world: World
    config: DistillConfig
    sample_folder: SampleFolder
    settings: SampleSettings
    teacher_fingerprint: str
    """Identity of the teacher."""

    @property
    def made_by(self) -> dict[str, Any]:
        """Everything that decides the images, as parsed JSON; the list of prompts does not count."""
        settings = self.settings.as_json() | {"prompts": None}
        words: dict[str, Any] = json.loads(json.dumps({"teacher": self.teacher_fingerprint, "settings": settings}))
        return words

    def remove_outdated_and_find_missing(self) -> bool:
        """Remove images of another teacher; return True if an image is missing."""

        def find_missing(heartbeat: Callable[[], None]) -> bool:
            if self.sample_folder.read_index().get("made_by") != self.made_by:
                self.sample_folder.clear()
            return not run_with_heartbeat(
                lambda: all(is_drawn(self.sample_folder, spec) for spec in self.settings.specs()), heartbeat
            )

        return bool(
            run_on_rank_zero(self.world, "looking for the teacher's images", find_missing, self.config.dist_timeout_s)
        )

    def draw(self, teacher: Teacher) -> None:
        if self.world.is_rank_zero:
            with contextlib.suppress(OSError):  # an unwritable disk costs the samples, not the training
                self.sample_folder.create()
                write_json_with_digest(self.sample_folder.index_path, {"made_by": self.made_by})
        sampler = DenoiserSampler(
            dataclasses.replace(self.world, device=teacher.device),  # may differ from the student's device
            teacher.denoiser,
            self.settings,
            sharded=self.config.teacher_placement == "fsdp",
            timeout_s=self.config.sample_timeout_s or self.config.dist_timeout_s,
            stop=lambda: 0,
        )
        rows = sampler.run(self.sample_folder, "teacher")
        failed = sum(row["state"] == "failed" for row in rows)
        log.info("samples of the teacher: %d done, %d failed", len(rows) - failed, failed)
