"""The task of a distillation: student, data, teacher targets, objectives."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from halation.data.dataset_protocol import ImageDataset
from halation.data.prompt_dataset import PromptDataset
from halation.distillation import objectives
from halation.distillation import teacher as teachers
from halation.distillation import teacher_targets as targets
from halation.distillation.config import DistillConfig
from halation.distillation.teacher import Teacher
from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import World, run_on_rank_zero, run_with_heartbeat
from halation.errors import InputError, format_count
from halation.flow.ema import Ema
from halation.flow.samplers import schedule
from halation.logging_setup import ON_CONSOLE, log_duration
from halation.models.denoiser import PIPELINE_SCHEDULER, Denoiser, compile_blocks
from halation.models.dit.denoiser import DiTDenoiser
from halation.models.pipelines.training.lora import LoraSettings
from halation.models.students.build import open_student
from halation.models.students.config import StudentConfig
from halation.runs import run_folder as runs
from halation.sampling.all_rank_sampler import SampleSettings
from halation.sampling.sample_folder import SampleFolder
from halation.training import build_components
from halation.training.loop import MODEL, MicroBatch, Objective, TrainedNetwork
from halation.training.training_task import EngineFactory, TrainingTask

log = logging.getLogger(__name__)

MAX_TARGET_REPEATS = 50
"""Times a trajectory's target is used; a student that sees the same few targets more often memorises them."""


class DistillationTask(TrainingTask):
    """Distillation of a teacher into a student.

    Targets that do not change are computed once and cached; then the teacher is freed if no step needs it.
    """

    config: DistillConfig
    teacher: Teacher | None = None
    teacher_targets: targets.TeacherTargets | None = None
    _active_networks: tuple[str, ...] = (MODEL,)
    _dmd: objectives.DistributionMatching | None = None
    _num_training_rows: int = 0
    """Total number of rows in the whole training."""

    def __init__(self, world: World, config: DistillConfig, run: runs.RunFolder, *, has_images: bool) -> None:
        super().__init__(world, config, run)
        self.has_images = has_images  # otherwise the data are prompts

    @property
    def title(self) -> str:
        path = Path(self.config.teacher_path)
        name = path.parent.parent.name if path.parent.name == "checkpoints" else path.name  # the name of its run
        return f"distilling {name} ({self.config.objective})"

    @property
    def item_name(self) -> str:  # type: ignore[override]
        if isinstance(self.source, PromptDataset):
            return "prompt" if self.source.num_train == len(self.source.texts) else "trajectory"
        return "image"

    # -- opening

    def open(self) -> None:
        config, world = self.config, self.world
        with log_duration("opening the student"):
            student = self._open_student(StudentConfig.read(config.student_config), config.student_init)
        student.set_guidance(1.0)
        self.guidance = self._resolve_guidance(student)
        build_components.record_device_and_space(world, config, self.run, student.space)
        with log_duration(f"reading {config.data_path}"):
            source = (
                build_components.open_source(world, config, self.run, student.space)
                if self.has_images
                else self._open_prompts()
            )
        self._check_classes(student, source)
        self.denoiser, self.source = student, source

    def _check_classes(self, student: Denoiser, source: ImageDataset) -> None:
        """Raise if the classes of the data differ from the teacher's, which are passed by number."""
        known = getattr(student, "class_names", ())
        if known and self.has_images and known != source.class_names:
            raise InputError(
                f"the teacher has {len(known)} classes, "
                f"--data_path {self.config.data_path} has {format_count(len(source.class_names), 'other')}",
                "images in the classes that the teacher was trained on",
                "choose other data, or a text file of class names",
            )
        if known and not self.has_images:
            student.encode_prompts(list(source.all_captions()))  # raise for an unknown class now

    def _open_student(self, shape: StudentConfig, init: str, *, lora: bool = True) -> Denoiser:
        config = self.config
        height, width = config.image_size
        adapters = None
        if config.lora_rank and lora:
            adapters = LoraSettings(rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets)
        return open_student(
            Path(config.model_path) if config.model_path else teachers.open_dit(config),
            shape,
            init=init,  # type: ignore[arg-type]
            seed=config.seed,
            dtype=config.dtype,
            weights_dtype=config.weights_dtype,
            lora=adapters,
            height=height,
            width=width,
            few_steps=self.num_student_steps,
            stays_on_cpu=self.world.device.type == "cpu",
        )

    def _open_prompts(self) -> PromptDataset:
        config = self.config
        height, width = config.image_size

        def open_prompts() -> PromptDataset:
            return PromptDataset(
                config.data_path, height, width, num_items=config.trajectories, max_prompts=config.max_images
            )

        def record_fingerprint(_heartbeat: Callable[[], None]) -> None:
            runs.record_facts(self.run, {"data fingerprint": open_prompts().fingerprint}, config.accept_changes)

        run_on_rank_zero(self.world, "reading the prompts", record_fingerprint, config.dist_timeout_s)
        return open_prompts()

    def _resolve_guidance(self, student: Denoiser) -> float:
        asked = self.config.teacher_guidance
        if student.guidance_kind == "none":
            if asked not in (None, 1.0):
                raise InputError(
                    f"--teacher_guidance {asked:g} with {student.name}, which has no guidance",
                    "1, or no value",
                    "leave it out",
                )
            return 1.0
        return student.defaults.guidance_scale if asked is None else asked

    # -- values derived from the settings

    @property
    def is_few_step(self) -> bool:
        return self.config.objective != "velocity"

    @property
    def num_student_steps(self) -> int:
        """Sampling steps that the student is trained for; 0 if it is sampled like its teacher."""
        return self.config.student_steps or 0

    @property
    def _caches_targets(self) -> bool:
        """True if teacher targets are cached."""
        return self.config.objective != "dmd" and self.config.teacher_cache

    @property
    def _needs_teacher(self) -> bool:
        """True if every step needs the teacher."""
        config = self.config
        return config.objective == "dmd" or config.feature_weight > 0 or not config.teacher_cache

    @property
    def student_times(self) -> tuple[float, ...]:
        """Times of a few-step student, from noise to the image."""
        config = self.config
        height, width = config.image_size
        shift = config.time_shift or self.denoiser.defaults.time_shift
        return self.denoiser.times(self.num_student_steps, height, width, shift)

    def sample_settings(self) -> SampleSettings:
        """Sample as trained: without guidance if the teacher's guidance was distilled."""
        config, settings = self.config, super().sample_settings()
        if unused := {name for row in settings.rows for name in row} - {"seed"}:
            raise InputError(
                f"{', '.join(sorted(unused))} in --sample_prompts_file",
                "prompts and seeds: teacher and student are sampled with the settings of the distillation",
                "remove these columns",
            )
        # The family's default scale is for a student that has learned both branches, without distilled guidance.
        guided = self.denoiser.guidance_kind == "pair" and self.guidance == 1.0 and config.caption_dropout > 0
        if config.guidance_scale is None and (self.is_few_step or not guided):
            settings = dataclasses.replace(settings, guidance_scale=1.0)
        steps = self.num_student_steps or settings.steps
        if self.is_few_step and isinstance(self.denoiser, DiTDenoiser):
            settings = dataclasses.replace(settings, sampler="euler")
        distilled = {"objective": config.objective, **({"steps": steps} if self.is_few_step else {})}
        return dataclasses.replace(settings, steps=steps, distilled=distilled)

    def has_initial_samples(self) -> bool:
        """The teacher's samples are shown instead."""
        return False

    def resolve_num_steps(self, global_batch: int) -> DistillConfig:
        config = self.config
        if config.num_epochs:
            steps = -(-self.source.num_train // global_batch)  # an epoch has whole steps, at least one
            self.config = dataclasses.replace(config, n_steps=config.num_epochs * steps)

            def record_num_steps(_heartbeat: Callable[[], None]) -> None:
                record = runs.read_record(self.run)
                record["settings"]["n_steps"] = self.config.n_steps
                runs.write_json_with_digest(self.run.config, record)

            run_on_rank_zero(self.world, "recording the number of steps", record_num_steps, config.dist_timeout_s)
        self._num_training_rows = self.config.n_steps * global_batch
        return self.config

    @property
    def epoch_interval(self) -> int:  # type: ignore[override]
        by_epoch = self.config.num_epochs or self.config.sample_names == "rank"  # its file names have the epoch
        return self.config.sample_interval if by_epoch else 0

    # -- before the first step

    def prepare(self, settings: SampleSettings) -> None:
        """Compute the cached targets and the teacher's samples; keep the teacher if steps need it."""
        world, config = self.world, self.config
        missing = self._find_missing()
        teacher_samples = self._make_teacher_samples(settings)
        has_missing_samples = teacher_samples is not None and teacher_samples.remove_outdated_and_find_missing()
        if missing or has_missing_samples or self._needs_teacher:
            with log_duration("opening the teacher"):
                self.teacher = teachers.open_teacher(world, config, self.denoiser, self.guidance)
        if missing and self.teacher is not None:
            plan, folder = self._target_plan, self._target_folder
            log.info(
                "computing teacher targets of %s once, with %s, into %s",
                format_count(len(missing), "image" if self.has_images else "trajectory"),
                format_count(len(missing) * plan.num_teacher_calls, "teacher prediction"),
                folder,
                extra=ON_CONSOLE,
            )
            self.denoiser.to(world.device, module=False)  # images are encoded there
            inputs = objectives.TeacherInputs(self.denoiser, self.source, world.device, plan.dropout_mask)
            with (
                log_duration("computing teacher targets"),
                teachers.build_together(world, config, self.teacher, len(inputs) - len(missing), len(inputs)) as build,
            ):
                build.num_written = targets.build(
                    plan,
                    folder,
                    missing,
                    path=self.teacher.noise_path,
                    predict=self.teacher.predict,
                    condition=inputs.condition,
                    x0=inputs.x0 if plan.has_images else None,
                    prompt=inputs.prompt,
                    fingerprint=self._fingerprint,
                    device=world.device,
                    part=(world.rank, world.size),
                    encode_size=config.teacher_batch_size
                    or teachers.default_batch_size(self.teacher.device, world.device, config.batch_size),
                    agree=build.agree,
                    on_progress=build.on_progress,
                    stop=build.stop,
                )
        if teacher_samples is not None:
            self.comparison_folder = teacher_samples.sample_folder
            if has_missing_samples and self.teacher is not None:
                with log_duration("sampling the teacher"):
                    teacher_samples.draw(self.teacher)
        if self._caches_targets:
            # `find_missing` has already verified them.
            self.teacher_targets = targets.open_targets(self._target_folder, self._fingerprint, verify=False)
            num_targets = len(self.teacher_targets) * self.teacher_targets.num_states
            if not self.has_images and self._num_training_rows > MAX_TARGET_REPEATS * num_targets:
                log.warning(
                    "%s will be used %s each; increase --trajectories for more variety",
                    format_count(num_targets, "cached teacher target"),
                    format_count(self._num_training_rows // num_targets, "time"),
                )
        if not self._needs_teacher:
            self.teacher = None
            world.free_memory()

    @cached_property
    def _target_plan(self) -> targets.TargetPlan:
        config, habits = self.config, self.denoiser.defaults
        shift = config.time_shift or habits.time_shift
        return targets.TargetPlan(
            objective=config.objective,
            has_images=self.has_images,
            times=self.student_times if self.is_few_step else tuple(schedule(config.teacher_steps, shift).tolist()),
            teacher_steps=config.teacher_steps,
            num_states=config.teacher_states,
            sample_shape=self.denoiser.sample_shape(*config.image_size),
            seed=config.seed,
            time_sampling=config.time_sampling or habits.time_sampling,
            time_shift=shift,
            caption_dropout=config.caption_dropout,
            exact=config.dtype == "fp32" or (self.is_few_step and targets.amplifies_errors(self.denoiser.noise_path)),
        )

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        fixed = runs.read_record(self.run)["fixed"]
        return {
            "plan": self._target_plan.as_json(),
            "teacher": fixed["teacher"],
            "guidance": self.guidance,
            "dtype": self.config.teacher_dtype,
            "data": self.source.fingerprint,
            "space": self.denoiser.space.fingerprint(),
        }

    @property
    def _target_folder(self) -> Path:
        config = self.config
        folder = Path(config.cache_dir) if config.cache_dir else self.run.folder / "cache"
        words = json.dumps(self._fingerprint, sort_keys=True)
        return folder / f"lessons_{hashlib.sha256(words.encode()).hexdigest()[:12]}"

    def _find_missing(self) -> list[int]:
        """Items without teacher targets."""
        if not self._caches_targets:
            return []

        def find_missing(heartbeat: Callable[[], None]) -> list[int]:
            return run_with_heartbeat(
                lambda: targets.find_missing(self.source.num_train, self._target_folder, self._fingerprint), heartbeat
            )

        return list(
            run_on_rank_zero(self.world, "looking for teacher targets", find_missing, self.config.dist_timeout_s)
        )

    # -- samples of the teacher

    def _make_teacher_samples(self, settings: SampleSettings) -> teachers.TeacherSamples | None:
        """Return the folder and settings of the teacher's samples, or None if they are disabled."""
        if not (self.config.teacher_samples and self.config.sample and settings.prompts):
            return None
        return teachers.TeacherSamples(
            self.world,
            self.config,
            SampleFolder(folder=self.run.samples / "teacher", label="teacher"),
            self._teacher_sample_settings(settings),
            runs.read_record(self.run)["fixed"]["teacher"],
        )

    def _teacher_sample_settings(self, settings: SampleSettings) -> SampleSettings:
        """The same prompts and seeds, with the teacher's steps, guidance and sampler."""
        pipeline = not isinstance(self.denoiser, DiTDenoiser)
        return dataclasses.replace(
            settings,
            steps=self.config.teacher_steps,
            guidance_scale=self.guidance,
            sampler=PIPELINE_SCHEDULER if pipeline else self.config.sampler,
            dtype=self.config.teacher_dtype,
            distilled=None,
        )

    # -- trained networks

    def build_networks(self, engine: Engine, ema: Ema | None, build_engine: EngineFactory) -> dict[str, TrainedNetwork]:
        config, teacher = self.config, self.teacher
        if config.objective == "dmd":
            return self._build_dmd_networks(engine, ema, build_engine)
        objective: Objective
        auxiliary: dict[str, TrainedNetwork] = {}
        if teacher is None:
            objective = objectives.cached_target_objective(
                self.denoiser, targets.loss_weights(self._target_plan, self.denoiser.noise_path)
            )
        else:
            features = (
                objectives.FeatureMatching(self.denoiser, teacher, config.feature_weight)
                if config.feature_weight
                else None
            )
            if features is not None:
                projection_engine = build_engine(features.projection.to(self.world.device), [])
                features.wrapped_projection = projection_engine.wrapped_module
                auxiliary[objectives.PROJECTION] = TrainedNetwork(engine=projection_engine)
            objective = objectives.velocity_objective(self.denoiser, teacher, features)
        self._active_networks = (MODEL, *auxiliary)
        return {MODEL: TrainedNetwork(engine=engine, ema=ema, objective=objective), **auxiliary}

    def _build_dmd_networks(
        self, engine: Engine, ema: Ema | None, build_engine: EngineFactory
    ) -> dict[str, TrainedNetwork]:
        """Initialise the second network from the teacher, or from its low-noise expert."""
        config = self.config
        assert self.teacher is not None
        fake = self._open_student(StudentConfig(), "teacher", lora=False)
        fake.set_guidance(1.0)
        fake.to(self.world.device, module=config.engine != "fsdp")
        fake.module.train()
        if config.gradient_checkpointing:
            fake.enable_gradient_checkpointing()
        if config.compile:
            compile_blocks(fake.shard_units())
        fake_engine = build_engine(fake.module, fake.shard_units())
        dmd = objectives.DistributionMatching(
            self.denoiser, self.teacher, fake, times=self.student_times, fake_updates=config.fake_updates
        )
        dmd.reshard_student, dmd.reshard_fake = engine.reshard, fake_engine.reshard
        self._dmd = dmd
        return {
            MODEL: TrainedNetwork(engine=engine, ema=ema, objective=dmd.student_losses),
            objectives.FAKE: TrainedNetwork(
                engine=fake_engine, objective=dmd.fake_losses, lr=config.fake_lr or config.lr
            ),
        }

    def active_networks(self, step: int) -> tuple[str, ...]:
        return self._active_networks if self._dmd is None else self._dmd.active_networks(step)

    def batch_transform(self, num_real: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
        config = self.config
        height, width = config.image_size
        common: dict[str, Any] = {
            "size": (height, width),
            "num_real": num_real,
            "pin": self.world.device.type == "cuda",
        }
        if self.teacher_targets is not None:
            return objectives.TeacherTargetTransform(self.denoiser, self.teacher_targets, self._target_plan, **common)
        if config.objective == "dmd":
            return objectives.NoiseTransform(
                self.denoiser,
                seed=config.seed,
                dropout=config.caption_dropout,
                time_shift=config.time_shift or self.denoiser.defaults.time_shift,
                from_prompts=not self.has_images,
                **common,
            )
        return super().batch_transform(num_real)

    def dummy_batch(self, rows: int) -> MicroBatch:
        """A batch of placeholder rows in the form that the objective takes."""
        common = super().dummy_batch(rows)
        extra = (
            {"state": common.noise, "target": common.x0}
            if self.teacher_targets is not None
            else {"renoise": common.noise}
        )
        return dataclasses.replace(common, extra=extra)
