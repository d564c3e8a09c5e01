"""What a student is trained on: its objectives, and the batches that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from halation.data.dataset_protocol import ImageBatch, ImageDataset, load_images
from halation.data.prompt_dataset import PromptDataset
from halation.distillation.teacher import Teacher
from halation.distillation.teacher_targets import TargetPlan, TeacherTargets
from halation.errors import InputError
from halation.flow.paths import times_from_uniform
from halation.flow.seeded_noise import training_draw
from halation.models.denoiser import Condition, Denoiser, TrainedModule
from halation.training.loop import MODEL, MicroBatch, Objective
from halation.training.training_task import encode_conditions, pack_batch, to_model_space

FAKE = "fake"
PROJECTION = "projection"


def _squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction.float() - target.float()).square().flatten(1).mean(1)


def cached_target_objective(student: TrainedModule, weight: Callable[[Tensor], Tensor] | None = None) -> Objective:
    """The answers that were kept of the teacher: its own at a state, or those that lead to where its trajectory ends.

    `weight` says by times how much a row counts.
    """

    def losses(module: nn.Module, rows: MicroBatch) -> Tensor:
        prediction = student.forward(module, rows.extra["state"], rows.t, rows.condition)
        result = _squared_error(prediction, rows.extra["target"])
        return result if weight is None else result * weight(rows.t)

    return losses


def velocity_objective(student: TrainedModule, teacher: Teacher, features: FeatureMatching | None = None) -> Objective:
    """The teacher's guided answer, asked for now at noised images; where it was kept, the teacher only shows its
    features."""
    path = student.noise_path

    def losses(module: nn.Module, rows: MicroBatch) -> Tensor:
        state = rows.extra["state"] if "state" in rows.extra else path.add_noise(rows.x0, rows.noise, rows.t)
        target = rows.extra.get("target")
        if target is None:
            target = teacher.predict(state, rows.t, rows.condition)
        elif features is not None:
            teacher.forward_for_features(state, rows.t, rows.condition)
        prediction = student.forward(module, state, rows.t, rows.condition)
        result = _squared_error(prediction, target)
        return result if features is None else result + features.losses()

    return losses


class FeatureHook:
    """What a unit of a network last gave, one row of numbers a token."""

    def __init__(self, unit: nn.Module) -> None:
        self._value: Tensor | None = None
        unit.register_forward_hook(self._save_output)

    def _save_output(self, _unit: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._value = output[-1] if isinstance(output, tuple) else output  # images stand behind texts

    def pop(self) -> Tensor:
        """Once: what is kept longer keeps a whole graph alive."""
        value, self._value = self._value, None
        assert value is not None, "its unit has not run"
        return value


class FeatureMatching:
    """The student's features in the middle of the network, projected, against the teacher's there."""

    def __init__(self, student: TrainedModule, teacher: Teacher, weight: float) -> None:
        self.weight = weight
        self.projection = nn.Linear(student.hidden_size, teacher.denoiser.hidden_size)
        with torch.no_grad():  # of the two widths alone: the same on all ranks, wherever their generators stand
            nn.init.orthogonal_(self.projection.weight, generator=torch.Generator().manual_seed(0))
            self.projection.bias.zero_()
        self.wrapped_projection: nn.Module = self.projection
        self._student_hook = FeatureHook(_middle_unit(student))
        self._teacher_hook = FeatureHook(_middle_unit(teacher.denoiser))

    def losses(self) -> Tensor:
        """Of the forwards that were made last."""
        student_features, teacher_features = self._student_hook.pop(), self._teacher_hook.pop()
        if student_features.shape[:-1] != teacher_features.shape[:-1]:
            raise InputError(
                f"the student has {student_features.shape[1]} tokens an image, the teacher {teacher_features.shape[1]}",
                "as many tokens in both, to compare features",
                "give the student the teacher's patch size, or --feature_weight 0",
            )
        teacher_features = layer_norm(teacher_features.float(), teacher_features.shape[-1:]).to(student_features.device)
        return self.weight * _squared_error(self.wrapped_projection(student_features), teacher_features)


def _middle_unit(denoiser: TrainedModule) -> nn.Module:
    units = denoiser.shard_units()
    return units[len(units) // 2]


class DistributionMatching:
    """DMD (Yin et al. 2024): the student's images move to where the teacher finds them likelier than a second network
    does that learns what the student draws. Both networks take turns.

    The student draws as it will be drawn from: by deterministic steps at its own times, of which one is trained at a
    time.
    """

    def __init__(
        self,
        student: TrainedModule,
        teacher: Teacher,
        fake: TrainedModule,
        *,
        times: Sequence[float],
        fake_updates: int,
    ) -> None:
        self.student = student
        self.teacher = teacher
        self.fake = fake
        self.times = tuple(times)
        self.fake_updates = fake_updates
        self.reshard_student: Callable[[], None] = lambda: None
        self.reshard_fake: Callable[[], None] = lambda: None
        """Called when a network was asked without being trained: sharded ones would stay whole."""

    def active_networks(self, step: int) -> tuple[str, ...]:
        """The second network first, so that it knows the student when the student moves."""
        return (MODEL,) if step % (self.fake_updates + 1) == self.fake_updates else (FAKE,)

    def student_losses(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        image = self._generate(module, rows)
        with torch.no_grad():
            state = self.student.noise_path.add_noise(image, rows.extra["renoise"], rows.t)
            real = self._predict_x0(state, self.teacher.predict(state, rows.t, rows.condition), rows.t)
            fake_prediction = self.fake.forward(self.fake.module, state, rows.t, rows.condition)
            fake = self._predict_x0(state, fake_prediction.float(), rows.t)
            self.reshard_fake()
            # Differences are as large as the teacher's own at this noise, whatever the noise.
            scale = (image - real).abs().flatten(1).mean(1).clamp_min(1e-6)
            target = image - (fake - real) / scale.reshape(-1, *[1] * (image.ndim - 1))
        return 0.5 * _squared_error(image, target)

    def fake_losses(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        with torch.no_grad():
            image = self._generate(self.student.module, rows)
            self.reshard_student()
        path, noise = self.student.noise_path, rows.extra["renoise"]
        state = path.add_noise(image, noise, rows.t)
        prediction = self.fake.forward(module, state, rows.t, rows.condition)
        return _squared_error(prediction, path.target(image, noise, rows.t))

    def _generate(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        """The image that the student sees at one of its times; which one follows from the step, since ranks make equal
        forwards."""
        cycle = rows.step // (self.fake_updates + 1)
        number = (
            cycle if self.active_networks(rows.step) == (MODEL,) else rows.step - cycle
        )  # of the turns of this network
        step_index = number % (len(self.times) - 1)
        x = rows.noise
        with torch.no_grad():
            for earlier in range(step_index):
                t, s = (torch.full_like(rows.t, time) for time in self.times[earlier : earlier + 2])
                prediction = self.student.forward(self.student.module, x, t, rows.condition).float()
                x = self.student.noise_path.step(x, prediction, t, s)
        t = torch.full_like(rows.t, self.times[step_index])
        return self._predict_x0(x, self.student.forward(module, x, t, rows.condition).float(), t)

    def _predict_x0(self, x: Tensor, prediction: Tensor, t: Tensor) -> Tensor:
        return self.student.noise_path.predict_x0_and_noise(x, prediction, t)[0]


MIN_RENOISE_TIME, MAX_RENOISE_TIME = 0.02, 0.98
"""Times at which images of a student are looked at: at the very ends nothing is to be told there."""
_RENOISE_STREAM = 1


@dataclass(frozen=True)
class TeacherTargetTransform:
    """Turns a host batch into teacher targets that a teacher gave on its items: of each item one, chosen by its
    position."""

    denoiser: Denoiser
    targets: TeacherTargets
    plan: TargetPlan
    _: KW_ONLY
    size: tuple[int, int]
    """Of the images, in pixels."""
    num_real: int
    pin: bool

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        uniforms = [training_draw(self.plan.seed, int(position), ()).u_time for position in batch["positions"]]
        state_indices = [int(u * self.targets.num_states) for u in uniforms]
        state, t, target = self.targets.read(batch["indices"], state_indices)
        dropped = self.plan.dropout_mask(batch["indices"])
        condition = encode_conditions(self.denoiser, batch, dropped, self.size, from_prompts=not self.plan.has_images)
        tensors = {"t": t, "extra/state": state, "extra/target": target}
        return pack_batch(batch["step"], tensors, condition, self.num_real, self.pin)


@dataclass(frozen=True)
class NoiseTransform:
    """Turns a host batch into what a student draws from, where nothing but captions is learned from: noise to begin
    with, and times with noise to look at its images."""

    denoiser: Denoiser
    _: KW_ONLY
    seed: int
    dropout: float
    time_shift: float
    """That of the family: what is decided at much noise is looked at there."""
    size: tuple[int, int]
    from_prompts: bool
    """As in `encode_conditions`."""
    num_real: int
    pin: bool

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        shape = self.denoiser.sample_shape(*self.size)
        positions = [int(position) for position in batch["positions"]]
        draws = [training_draw(self.seed, place, shape) for place in positions]
        renoise_draws = [training_draw(self.seed, place, shape, _RENOISE_STREAM) for place in positions]
        u_time = torch.tensor([d.u_time for d in draws], dtype=torch.float64)
        dropped = torch.tensor([d.u_drop < self.dropout for d in draws])
        tensors = {
            "noise": torch.from_numpy(np.stack([d.noise for d in draws])),
            "t": times_from_uniform(u_time, "uniform", self.time_shift)
            .clamp(MIN_RENOISE_TIME, MAX_RENOISE_TIME)
            .float(),
            "extra/renoise": torch.from_numpy(np.stack([d.noise for d in renoise_draws])),
        }
        condition = encode_conditions(self.denoiser, batch, dropped, self.size, from_prompts=self.from_prompts)
        return pack_batch(batch["step"], tensors, condition, self.num_real, self.pin)


class TeacherInputs:
    """The items of a source as a teacher is told of them: conditions and images on a device, by number."""

    def __init__(
        self,
        denoiser: Denoiser,
        source: ImageDataset,
        device: torch.device,
        dropout_mask: Callable[[Sequence[int]], Tensor],
    ) -> None:
        self._denoiser = denoiser
        self._source = source
        self._device = device
        self._dropout_mask = dropout_mask
        self._last_read: tuple[list[int], ImageBatch] | None = None

    def __len__(self) -> int:
        return self._source.num_train

    def condition(self, items: Sequence[int]) -> Condition:
        size = (self._source.height, self._source.width)
        from_prompts = isinstance(self._source, PromptDataset)
        batch = self._read(items)._asdict()
        condition = encode_conditions(self._denoiser, batch, self._dropout_mask(items), size, from_prompts=from_prompts)
        return {name: value.to(self._device) for name, value in condition.items()}

    @torch.no_grad()
    def x0(self, items: Sequence[int]) -> Tensor:
        """What the model learns of these images."""
        return to_model_space(self._denoiser.space, torch.from_numpy(self._read(items).pixels).to(self._device))

    def prompt(self, item: int) -> str:
        """For messages."""
        image = self._source.train(item)
        return image.caption or f"image {item}"

    def _read(self, items: Sequence[int]) -> ImageBatch:
        """Kept until other items are asked for: an image may take long to make."""
        wanted = [int(item) for item in items]
        if self._last_read is None or self._last_read[0] != wanted:
            read: Callable[[Sequence[int]], ImageBatch] | None = getattr(self._source, "read", None)
            self._last_read = wanted, load_images(self._source, "train", wanted) if read is None else read(wanted)
        return self._last_read[1]
