"""The teacher of a run: opened, placed, asked for its pictures, and let go."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halation.distillation import targets
from halation.distillation.batches import Items
from halation.distillation.config import DistillConfig
from halation.distributed.engines.ddp_fsdp import Fsdp
from halation.distributed.launcher import about_peers, num_gpus
from halation.distributed.signals import StopSignals, exit_code
from halation.distributed.world import Vigil, World, alive, on_first
from halation.errors import HalationError, InputError, Interrupted, RankFailure, refused_by_system
from halation.models.blocks import compile_units
from halation.models.checkpoints import load_denoiser
from halation.models.denoiser import AUTOCAST, Denoiser
from halation.models.dit.denoiser import DiTDenoiser
from halation.models.teacher import Teacher, spread_by_layers
from halation.runs.folder import publish_json
from halation.sampling.denoiser_sampler import Drawing, SampleSettings
from halation.sampling.files import Place, is_drawn
from halation.training.setup import bar

if TYPE_CHECKING:
    from halation.models.pipelines.training.denoiser import PipelineDenoiser


log = logging.getLogger(__name__)

ENCODE_SIZE = 8
"""Items that the teacher takes at once on a CPU, and at least on a GPU, where no batch size was asked for."""
SEEN_OFTEN = 50
"""Times a lesson is learned from, above which more of them would be better than more steps."""


def open_dit(config: DistillConfig) -> DiTDenoiser:
    """The DiT that is learned from, on the CPU."""
    denoiser = load_denoiser(Path(config.teacher_path), raw=False)
    if not isinstance(denoiser, DiTDenoiser):
        raise InputError(
            f"--teacher_path {config.teacher_path} is a run that fine-tuned a pipeline",
            "a DiT of Halation, or a whole pipeline",
            "give its export",
        )
    return denoiser


def open_teacher(world: World, config: DistillConfig, student: Denoiser, guidance: float) -> Teacher:
    """The teacher in its place on all ranks, or what keeps it from there on one of them."""
    by_layers = config.teacher_placement == "layers" and world.device.type == "cuda"
    spare = _spare_gpus(world) if by_layers else []
    with Vigil(world, "opening the teacher", config.dist_timeout_s) as vigil:
        error, teacher = "", None
        try:
            denoiser: Denoiser = alive(
                lambda: _pipeline(world, config, student) if config.model_path else open_dit(config), vigil.beat
            )
            # Here and not in that thread: which GPU is meant is a matter of the thread.
            teacher = _placed(world, config, denoiser, guidance, spare)
        except (torch.OutOfMemoryError, MemoryError):
            error = _too_large(world)
        except InputError as problem:
            error = str(problem)
        _refuse(vigil.finish(error))
    assert teacher is not None
    return teacher


def _too_large(world: World) -> str:
    return (
        f"the teacher does not fit into the memory of {world.device}; use --teacher_dtype bf16, --teacher_batch_size 1, "
        "or --teacher_placement fsdp, layers or cpu"
    )


def _refuse(words: Sequence[str]) -> None:
    """Any rank's problem is everybody's, and no reason to start all of them again."""
    for word in words:
        if word:
            failure = HalationError(word)
            failure.exit_code = InputError.exit_code
            raise failure


def _placed(
    world: World, config: DistillConfig, denoiser: Denoiser, guidance: float, spare: list[torch.device]
) -> Teacher:
    device = torch.device("cpu") if config.teacher_placement == "cpu" else world.device
    teacher = Teacher(
        denoiser,
        guidance=guidance,
        device=device,
        dtype=AUTOCAST[config.teacher_dtype] or torch.float32,
        batch_size=config.teacher_batch_size,
    )
    if config.feature_weight and hasattr(denoiser.module, "in_step"):
        raise InputError(
            f"--feature_weight with a teacher of two experts ({config.teacher_path})",
            "a teacher with one transformer, whose middle can be compared with",
            "leave --feature_weight out",
        )
    _place(world, config, denoiser, device, spare)
    if config.compile and device.type == "cuda":
        compile_units(denoiser.shard_units())
    return teacher


def _pipeline(world: World, config: DistillConfig, student: Denoiser) -> PipelineDenoiser:
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
        experts=True,
    )
    denoiser.read_texts_of(student)
    return denoiser


def _place(
    world: World, config: DistillConfig, denoiser: Denoiser, device: torch.device, spare: list[torch.device]
) -> None:
    module, units = denoiser.module, denoiser.shard_units()
    if config.teacher_placement == "fsdp":
        denoiser.to(device, module=False)
        if hasattr(module, "in_step"):  # experts: ranks must ask for the shards of both equally often
            module.in_step = True  # type: ignore[assignment]
        Fsdp(world, module, units)
    elif spare:
        denoiser.to(device, module=False)
        spread_by_layers(module, units, [device, *spare])
    else:
        denoiser.to(device)


def _spare_gpus(world: World) -> list[torch.device]:
    """This rank's share of the GPUs that no rank computes on."""
    used = world.exchange(world.device.index or 0)
    free = [number for number in range(num_gpus()) if number not in used]
    return [torch.device("cuda", number) for number in free[world.local_rank :: len(set(used))]]


def write_lessons(
    world: World,
    config: DistillConfig,
    teacher: Teacher,
    known: Items,
    plan: targets.Plan,
    folder: Path,
    fingerprint: dict[str, Any],
    items: list[int],
) -> None:
    """Ask the teacher about these items, all ranks together. Asked to stop, they write what they have, and say so."""
    sharded = config.teacher_placement == "fsdp"
    signals = StopSignals()

    def agree(problem: str) -> str:
        return next((word for word in world.exchange(problem) if word), "")

    with (
        contextlib.nullcontext() if sharded else signals,  # ranks that go in step would not stop at one answer
        Vigil(world, "asking the teacher", config.dist_timeout_s) as vigil,
        bar(world, config, "asking the teacher", vigil.beat, "items") as tell,
        _beating(teacher, vigil.beat),
    ):
        build = functools.partial(
            targets.build,
            plan,
            folder,
            items,
            path=teacher.path,
            predict=teacher.predict,
            condition=known.condition,
            x0=known.x0 if plan.pictures else None,
            prompt=known.prompt,
            fingerprint=fingerprint,
            device=world.device,
            part=(world.rank, world.size),
            encode_size=config.teacher_batch_size or items_at_once(teacher.device, world.device, config.batch_size),
            agree=agree if sharded else None,
            on_progress=tell,
            stop=lambda: signals.number > 0,
        )
        words = vigil.finish(_outcome(build, world, vigil, sharded=sharded))
        _refuse([error for error, _ in words])
        stop = (
            0 if sharded else max(world.exchange(signals.number))
        )  # one that was done may have heard it while it waited
    if stop:
        kept = len(known) - len(items) + sum(num for _, num in words)
        message = f"asked to stop: {kept} of {len(known)} items are kept; the same command goes on"
        raise Interrupted(message, exit_code(stop))


def items_at_once(teacher: torch.device, student: torch.device, batch_size: int) -> int:
    """How many items the teacher takes where nobody said: on a GPU a batch, which is what keeps it busy; of a teacher that is on a CPU
    for want of room an answer takes minutes."""
    if teacher.type != "cpu":
        return max(ENCODE_SIZE, batch_size)
    return 1 if student.type != "cpu" else ENCODE_SIZE


@contextlib.contextmanager
def _beating(teacher: Teacher, beat: Callable[[], None]) -> Iterator[None]:
    """While entered, the teacher gives a sign of life after every forward."""
    before, teacher.beat = teacher.beat, beat
    try:
        yield
    finally:
        teacher.beat = before


def _outcome(build: Callable[[], int], world: World, vigil: Vigil, *, sharded: bool) -> tuple[str, int]:
    """What went wrong, and how many items were kept."""
    try:
        return "", build()
    except (HalationError, OSError) as problem:
        return refused_by_system(problem) or str(problem), 0
    except (torch.OutOfMemoryError, MemoryError) as problem:
        error = _too_large(world)
        if sharded:  # the others wait inside a forward for this rank, and would not hear a word
            vigil.fail(error)
            raise RankFailure(error) from problem
        return error, 0
    except RuntimeError as problem:
        if sharded and about_peers(str(problem)):
            raise RankFailure(f"a sharded forward of the teacher could not be completed: {vigil.blame()}") from problem
        raise


def warn_of_few(num_lessons: int, num_rows: int) -> None:
    """A student that sees the same few ways again and again learns them by heart."""
    if num_rows > SEEN_OFTEN * num_lessons:
        log.warning(
            "each of the %d lessons that are kept will be learned from %d times: more --trajectories are more to learn",
            num_lessons,
            num_rows // num_lessons,
        )


@dataclasses.dataclass(frozen=True)
class Portfolio:
    """The teacher's own pictures for the prompts of the samples: drawn once, and drawn again for another teacher."""

    world: World
    config: DistillConfig
    place: Place
    settings: SampleSettings
    teacher: str
    """Its identity."""

    @property
    def made_by(self) -> dict[str, Any]:
        """What decides the pictures, as JSON gives it back; which of them are wanted does not."""
        settings = dataclasses.asdict(self.settings) | {"prompts": None}
        words: dict[str, Any] = json.loads(json.dumps({"teacher": self.teacher, "settings": settings}))
        return words

    def is_open(self) -> bool:
        """Whether a picture is missing; what somebody else drew is removed."""

        def look(beat: Callable[[], None]) -> bool:
            if self.place.recorded().get("made_by") != self.made_by:
                self.place.clear()
            return not alive(lambda: all(is_drawn(self.place, spec) for spec in self.settings.specs()), beat)

        return bool(on_first(self.world, "looking for the teacher's pictures", look, self.config.dist_timeout_s))

    def draw(self, teacher: Teacher) -> None:
        if self.world.first:
            with contextlib.suppress(OSError):  # a disk that cannot be written costs the samples, not the training
                self.place.folder.mkdir(parents=True, exist_ok=True)
                publish_json(self.place.index, {"made_by": self.made_by})
        drawing = Drawing(
            dataclasses.replace(self.world, device=teacher.device),  # which need not be where the student computes
            teacher.denoiser,
            self.settings,
            sharded=self.config.teacher_placement == "fsdp",
            timeout_s=self.config.sample_timeout_s or self.config.dist_timeout_s,
            stop=lambda: 0,
        )
        rows = drawing.run(self.place, "teacher")
        failed = sum(row["state"] == "failed" for row in rows)
        log.info("samples of the teacher: %d done, %d failed", len(rows) - failed, failed)


def forget(device: torch.device) -> None:
    """Give back what a teacher held, once nobody holds the teacher."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
