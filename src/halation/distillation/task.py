"""The task of learning from a teacher: student and prompts, what the teacher said once for all, and what it is asked at every step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from halation.data.dataset import Pictures
from halation.data.prompt_dataset import Prompts, has_pictures
from halation.distillation import objectives, targets, teacher_setup
from halation.distillation.batches import Items, LessonPreparer, NoisePreparer
from halation.distillation.config import DistillConfig
from halation.distillation.objectives import FAKE, PROJECTION, DistributionMatching, FeatureMatching
from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import alive, on_first
from halation.errors import InputError
from halation.flow.ema import Ema
from halation.flow.samplers import schedule
from halation.models.blocks import compile_units
from halation.models.denoiser import OWN, Denoiser
from halation.models.dit.denoiser import DiTDenoiser
from halation.models.pipelines.training.lora import Lora
from halation.models.students.build import open_student
from halation.models.students.config import StudentConfig
from halation.models.teacher import Teacher
from halation.runs import folder as runs
from halation.sampling.denoiser_sampler import SampleSettings
from halation.sampling.files import Place
from halation.training import setup
from halation.training.loop import MODEL, Objective, Part, Rows
from halation.training.task import Spread, Task

log = logging.getLogger(__name__)


class Distillation(Task):
    """A student and its teacher; everything the teacher need say only once is kept, and then it may go."""

    config: DistillConfig
    teacher: Teacher | None = None
    kept: targets.Lessons | None = None
    _turn: tuple[str, ...] = (MODEL,)
    _dmd: DistributionMatching | None = None
    _num_rows: int = 0
    """That the student will have learned from in the end."""

    @property
    def title(self) -> str:
        path = Path(self.config.teacher_path)
        name = path.parent.parent.name if path.parent.name == "checkpoints" else path.name  # a run goes by its own name
        return f"distilling {name} ({self.config.objective})"

    @property
    def item(self) -> str:  # type: ignore[override]
        if isinstance(self.source, Prompts):
            return "prompt" if self.source.num_train == len(self.source.texts) else "way"
        return "picture"

    # -- opening

    def _opened(self) -> tuple[Denoiser, Pictures]:
        config, world = self.config, self.world
        student = self._student(StudentConfig.read(config.student_config), config.student_init)
        student.tell_guidance(1.0)
        self.guidance = self._guidance(student)
        self.has_pictures = has_pictures(config.data_path)
        setup.confirm_device(world, config, self.run, student.space)  # type: ignore[attr-defined]
        source = (
            setup.open_source(world, config, self.run, student.space)  # type: ignore[attr-defined]
            if self.has_pictures
            else self._prompts()
        )
        self._refuse_other_classes(student, source)
        return student, source

    def _refuse_other_classes(self, student: Denoiser, source: Pictures) -> None:
        """A teacher that knows classes is told of pictures by the numbers of theirs."""
        known = getattr(student, "class_names", ())
        if known and self.has_pictures and known != source.class_names:
            raise InputError(
                f"the teacher knows {len(known)} classes, --data_path {self.config.data_path} has {len(source.class_names)} others",
                "pictures in the classes the teacher was trained on",
                "choose other data, or a text file of class names",
            )
        if known and not self.has_pictures:
            student.encode_prompts(list(source.every_caption()))  # an unknown class is refused now

    def _student(self, shape: StudentConfig, init: str, *, lora: bool = True) -> Denoiser:
        config = self.config
        height, width = config.image_size
        adapters = None
        if config.lora_rank and lora:
            adapters = Lora(rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets)
        return open_student(
            Path(config.model_path) if config.model_path else teacher_setup.open_dit(config),
            shape,
            init=init,  # type: ignore[arg-type]
            seed=config.seed,
            dtype=config.dtype,
            weights_dtype=config.weights_dtype,
            lora=adapters,
            height=height,
            width=width,
            few_steps=self.num_steps,
            stays_on_cpu=self.world.device.type == "cpu",
        )

    def _prompts(self) -> Prompts:
        config = self.config
        height, width = config.image_size

        def opened() -> Prompts:
            return Prompts(
                config.data_path, height, width, num_items=config.trajectories, max_prompts=config.max_pictures
            )

        def look(_beat: Callable[[], None]) -> None:
            runs.confirm(self.run, {"data fingerprint": opened().fingerprint}, config.accept_changes)

        on_first(self.world, "reading the prompts", look, config.dist_timeout_s)
        return opened()

    def _guidance(self, student: Denoiser) -> float:
        asked = self.config.teacher_guidance
        if student.guides == "none":
            if asked not in (None, 1.0):
                raise InputError(
                    f"--teacher_guidance {asked:g} with {student.name}, which knows no guidance",
                    "1, or nothing",
                    "leave it out",
                )
            return 1.0
        return student.habits.guidance_scale if asked is None else asked

    # -- what follows from the settings

    @property
    def few_steps(self) -> bool:
        return self.config.objective != "velocity"

    @property
    def num_steps(self) -> int:
        """Steps the student learns to draw in; 0 where it learns to be drawn like its teacher."""
        return self.config.student_steps or 0

    @property
    def _keeps(self) -> bool:
        """Whether lessons are kept."""
        return self.config.objective != "dmd" and self.config.teacher_cache

    @property
    def _asks(self) -> bool:
        """Whether the teacher is needed at every step."""
        config = self.config
        return config.objective == "dmd" or config.feature_weight > 0 or not config.teacher_cache

    @property
    def times(self) -> tuple[float, ...]:
        """What a student of few steps goes through, from noise to the picture."""
        config = self.config
        height, width = config.image_size
        shift = config.time_shift or self.denoiser.habits.time_shift
        return self.denoiser.times(self.num_steps, height, width, shift)

    def sampling(self, prompts: tuple[str, ...]) -> SampleSettings:
        """As the objective was trained: guidance is in the student where it was in the teacher's answers."""
        config, settings = self.config, super().sampling(prompts)
        # The family's own scale is for a student that has learned both branches, with no guidance in either.
        guided = self.denoiser.guides == "pair" and self.guidance == 1.0 and config.caption_dropout > 0
        if config.guidance_scale is None and (self.few_steps or not guided):
            settings = dataclasses.replace(settings, guidance_scale=1.0)
        steps = self.num_steps or settings.steps
        if self.few_steps and isinstance(self.denoiser, DiTDenoiser):
            settings = dataclasses.replace(settings, sampler="euler")
        distilled = {"objective": config.objective, **({"steps": steps} if self.few_steps else {})}
        return dataclasses.replace(settings, steps=steps, distilled=distilled)

    def dated(self, global_batch: int) -> DistillConfig:
        config = self.config
        if config.num_epochs:
            steps = -(-self.source.num_train // global_batch)  # an epoch has one at least, and ends with a step
            self.config = dataclasses.replace(config, n_steps=config.num_epochs * steps)
        self._num_rows = self.config.n_steps * global_batch
        return self.config

    @property
    def epochs_every(self) -> int:  # type: ignore[override]
        by_epoch = self.config.num_epochs or self.config.sample_names == "rank"  # which has an epoch in every name
        return self.config.sample_interval if by_epoch else 0

    # -- before the first step

    def prepare(self, settings: SampleSettings) -> None:
        """Ask the teacher what it need say only once; it stays only where it will be asked again."""
        missing = self._missing()
        portfolio = self._portfolio(settings)
        undrawn = portfolio is not None and portfolio.is_open()
        if missing or undrawn or self._asks:
            self.teacher = teacher_setup.open_teacher(self.world, self.config, self.denoiser, self.guidance)
        if missing:
            self._write_lessons(missing)
        if portfolio is not None:
            self.beside = portfolio.place
            if undrawn and self.teacher is not None:
                portfolio.draw(self.teacher)
        if self._keeps:
            self.kept = targets.open(self._book, self._fingerprint, verify=False)  # read through while looking
            if not self.has_pictures:
                teacher_setup.warn_of_few(len(self.kept) * self.kept.num_states, self._num_rows)
        if not self._asks:
            self.teacher = None
            teacher_setup.forget(self.world.device)

    @cached_property
    def _plan(self) -> targets.Plan:
        config, habits = self.config, self.denoiser.habits
        shift = config.time_shift or habits.time_shift
        return targets.Plan(
            objective=config.objective,
            pictures=self.has_pictures,
            times=self.times if self.few_steps else tuple(schedule(config.teacher_steps, shift).tolist()),
            teacher_steps=config.teacher_steps,
            num_states=config.teacher_states,
            sample_shape=self.denoiser.sample_shape(*config.image_size),
            seed=config.seed,
            time_sampling=config.time_sampling or habits.time_sampling,
            time_shift=shift,
            caption_dropout=config.caption_dropout,
            exact=config.dtype == "fp32" or (self.few_steps and targets.is_steep(self.denoiser.path)),
        )

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        fixed = runs.read_record(self.run)["fixed"]
        return {
            "plan": self._plan.as_json(),
            "teacher": fixed["teacher"],
            "guidance": self.guidance,
            "dtype": self.config.teacher_dtype,
            "data": self.source.fingerprint,
            "space": self.denoiser.space.fingerprint(),  # type: ignore[attr-defined]
        }

    @property
    def _book(self) -> Path:
        config = self.config
        folder = Path(config.cache_dir) if config.cache_dir else self.run.folder / "cache"
        words = json.dumps(self._fingerprint, sort_keys=True)
        return folder / f"lessons_{hashlib.sha256(words.encode()).hexdigest()[:12]}"

    def _missing(self) -> list[int]:
        """The items that the teacher has said nothing to yet."""
        if not self._keeps:
            return []

        def look(beat: Callable[[], None]) -> list[int]:
            return alive(lambda: targets.missing(self.source.num_train, self._book, self._fingerprint), beat)

        return list(on_first(self.world, "looking for lessons", look, self.config.dist_timeout_s))

    def _write_lessons(self, items: list[int]) -> None:
        assert self.teacher is not None
        log.warning(
            "asking the teacher once about %d %ss, which takes %d answers, into %s",
            len(items),
            "picture" if self.has_pictures else "way",
            len(items) * self._plan.num_steps,
            self._book,
        )
        self.denoiser.to(self.world.device, module=False)  # pictures become latents there
        known = Items(self.denoiser, self.source, self.world.device, self._plan.dropped)
        teacher_setup.write_lessons(
            self.world, self.config, self.teacher, known, self._plan, self._book, self._fingerprint, items
        )

    # -- the teacher's own pictures

    def _portfolio(self, settings: SampleSettings) -> teacher_setup.Portfolio | None:
        """Where the teacher's pictures go, and what they are made by; none where none are wanted."""
        if not (self.config.teacher_samples and self.config.sample and settings.prompts):
            return None
        return teacher_setup.Portfolio(
            self.world,
            self.config,
            Place(folder=self.run.samples / "teacher", label="teacher"),
            self._teachers(settings),
            runs.read_record(self.run)["fixed"]["teacher"],
        )

    def _teachers(self, settings: SampleSettings) -> SampleSettings:
        """The same prompts and seeds, drawn as the teacher is."""
        pipeline = not isinstance(self.denoiser, DiTDenoiser)
        return dataclasses.replace(
            settings,
            steps=self.config.teacher_steps,
            guidance_scale=self.guidance,
            sampler=OWN if pipeline else self.config.sampler,
            dtype=self.config.teacher_dtype,
            distilled=None,
        )

    # -- what learns

    def parts(self, engine: Engine, ema: Ema, spread: Spread) -> dict[str, Part]:
        config, teacher = self.config, self.teacher
        if config.objective == "dmd":
            return self._two_networks(engine, ema, spread)
        objective: Objective
        beside: dict[str, Part] = {}
        if teacher is None:
            objective = objectives.matching(self.denoiser, targets.weights(self._plan, self.denoiser.path))
        else:
            features = FeatureMatching(self.denoiser, teacher, config.feature_weight) if config.feature_weight else None
            if features is not None:
                projecting = spread(features.projection.to(self.world.device), [])
                features.trained = projecting.trained
                beside[PROJECTION] = Part(engine=projecting)
            objective = objectives.velocity(self.denoiser, teacher, features)
        self._turn = (MODEL, *beside)
        return {MODEL: Part(engine=engine, ema=ema, objective=objective), **beside}

    def _two_networks(self, engine: Engine, ema: Ema, spread: Spread) -> dict[str, Part]:
        """The second network begins as the teacher; of two experts as the one for little noise."""
        config = self.config
        assert self.teacher is not None
        fake = self._student(StudentConfig(), "teacher", lora=False)
        fake.tell_guidance(1.0)
        fake.to(self.world.device, module=config.engine != "fsdp")
        fake.module.train()
        if config.activation_checkpointing:
            fake.keep_no_activations()
        if config.compile:
            compile_units(fake.shard_units())
        second = spread(fake.module, fake.shard_units())
        dmd = DistributionMatching(
            self.denoiser, self.teacher, fake, times=self.times, fake_updates=config.fake_updates
        )
        dmd.rest_student, dmd.rest_fake = engine.at_rest, second.at_rest
        self._dmd = dmd
        return {
            MODEL: Part(engine=engine, ema=ema, objective=dmd.student_losses),
            FAKE: Part(engine=second, objective=dmd.fake_losses, lr=config.fake_lr or config.lr),
        }

    def turn(self, step: int) -> tuple[str, ...]:
        return self._turn if self._dmd is None else self._dmd.turn(step)

    def preparer(self, num_real: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
        config = self.config
        height, width = config.image_size
        common: dict[str, Any] = {
            "size": (height, width),
            "num_real": num_real,
            "pin": self.world.device.type == "cuda",
        }
        if self.kept is not None:
            return LessonPreparer(self.denoiser, self.kept, self._plan, **common)
        if config.objective == "dmd":
            return NoisePreparer(
                self.denoiser,
                seed=config.seed,
                dropout=config.caption_dropout,
                time_shift=config.time_shift or self.denoiser.habits.time_shift,
                drawn=not self.has_pictures,
                **common,
            )
        return super().preparer(num_real)

    def idle(self, rows: int) -> Rows:
        """Rows of the kind that the objective takes."""
        common = super().idle(rows)
        extra = {"state": common.noise, "target": common.x0} if self.kept is not None else {"renoise": common.noise}
        return dataclasses.replace(common, extra=extra)
