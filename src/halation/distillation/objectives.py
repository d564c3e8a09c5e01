"""The objectives of a student, and the batches that they take."""

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
    """Squared error against cached teacher targets.

    These are the teacher's predictions at a state, or those that lead to the end of its trajectory. `weight` maps
    times to loss weights.
    """

    def losses(module: nn.Module, rows: MicroBatch) -> Tensor:
        prediction = student.forward(module, rows.extra["state"], rows.t, rows.condition)
        result = _squared_error(prediction, rows.extra["target"])
        return result if weight is None else result * weight(rows.t)

    return losses


def velocity_objective(student: TrainedModule, teacher: Teacher, features: FeatureMatching | None = None) -> Objective:
    """Squared error against the teacher's guided prediction at noised images.

    If the rows have cached targets, the teacher only runs for its features.
    """
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
    """Stores the last output of a unit, one row per token."""

    def __init__(self, unit: nn.Module) -> None:
        self._value: Tensor | None = None
        unit.register_forward_hook(self._save_output)

    def _save_output(self, _unit: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._value = output[-1] if isinstance(output, tuple) else output  # image tokens come after text tokens

    def pop(self) -> Tensor:
        """Return the output and drop it: a stored output would keep its whole graph alive."""
        value, self._value = self._value, None
        assert value is not None, "its unit has not run"
        return value


class FeatureMatching:
    """Feature matching: the student's middle features, projected, against the teacher's."""

    def __init__(self, student: TrainedModule, teacher: Teacher, weight: float) -> None:
        self.weight = weight
        self.projection = nn.Linear(student.hidden_size, teacher.denoiser.hidden_size)
        with torch.no_grad():  # depends on the two widths only: the same on all ranks, whatever their random states
            nn.init.orthogonal_(self.projection.weight, generator=torch.Generator().manual_seed(0))
            self.projection.bias.zero_()
        self.wrapped_projection: nn.Module = self.projection
        self._student_hook = FeatureHook(_middle_unit(student))
        self._teacher_hook = FeatureHook(_middle_unit(teacher.denoiser))

    def losses(self) -> Tensor:
        """Loss of the last forwards."""
        student_features, teacher_features = self._student_hook.pop(), self._teacher_hook.pop()
        if student_features.shape[:-1] != teacher_features.shape[:-1]:
            raise InputError(
                f"the student has {student_features.shape[1]} tokens per image, the teacher "
                f"{teacher_features.shape[1]}",
                "the same number of tokens in both, to compare features",
                "give the student the teacher's patch size, or --feature_weight 0",
            )
        teacher_features = layer_norm(teacher_features.float(), teacher_features.shape[-1:]).to(student_features.device)
        return self.weight * _squared_error(self.wrapped_projection(student_features), teacher_features)


def _middle_unit(denoiser: TrainedModule) -> nn.Module:
    units = denoiser.shard_units()
    return units[len(units) // 2]


class DistributionMatching:
    """Distribution matching distillation, DMD (Yin et al. 2024).

    A second network learns the distribution of the student's images. The student's images move to where they are more
    likely under the teacher than under the second network. Both networks are trained in turns.

    The student generates as it will be sampled from: by deterministic steps at its own times, of which one is trained
    at a time.
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
        """Called after a forward without a backward, which would leave a sharded network unsharded."""

    def active_networks(self, step: int) -> tuple[str, ...]:
        """Second network first, so that it has learned the student before the student's update."""
        return (MODEL,) if step % (self.fake_updates + 1) == self.fake_updates else (FAKE,)

    def student_losses(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        image = self._generate(module, rows)
        with torch.no_grad():
            state = self.student.noise_path.add_noise(image, rows.extra["renoise"], rows.t)
            real = self._predict_x0(state, self.teacher.predict(state, rows.t, rows.condition), rows.t)
            fake_prediction = self.fake.forward(self.fake.module, state, rows.t, rows.condition)
            fake = self._predict_x0(state, fake_prediction.float(), rows.t)
            self.reshard_fake()
            # Normalise by the teacher's own error, so that the differences have the same scale at every noise level.
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
        """The student's prediction of the image at one of its times.

        The step decides which time, so that all ranks run the same number of forwards.
        """
        cycle = rows.step // (self.fake_updates + 1)
        number = (
            cycle if self.active_networks(rows.step) == (MODEL,) else rows.step - cycle
        )  # counts the updates of this network
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
"""Range of times for renoised images of a student; at both ends they carry no information."""
_RENOISE_STREAM = 1


@dataclass(frozen=True)
class TeacherTargetTransform:
    """Turn a host batch into cached teacher targets, one per item, chosen by its position."""

    denoiser: Denoiser
    targets: TeacherTargets
    plan: TargetPlan
    _: KW_ONLY
    size: tuple[int, int]
    """Image size in pixels."""
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
    """Turn a host batch into inputs for DMD, which needs captions only.

    These are the initial noise, and times and noise for renoising the student's images.
    """

    denoiser: Denoiser
    _: KW_ONLY
    seed: int
    dropout: float
    time_shift: float
    """Shifts the renoise times towards noise, as in the family: an image's structure is decided at high noise."""
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
    """The teacher's inputs for items of a source: conditions and images on a device."""

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
        """These images in the space of the model."""
        return to_model_space(self._denoiser.space, torch.from_numpy(self._read(items).pixels).to(self._device))

    def prompt(self, item: int) -> str:
        """Name of an item in messages."""
        image = self._source.train(item)
        return image.caption or f"image {item}"

    def _read(self, items: Sequence[int]) -> ImageBatch:
        """Read items and keep the last ones, because an image may be slow to decode."""
        wanted = [int(item) for item in items]
        if self._last_read is None or self._last_read[0] != wanted:
            read: Callable[[Sequence[int]], ImageBatch] | None = getattr(self._source, "read", None)
            self._last_read = wanted, load_images(self._source, "train", wanted) if read is None else read(wanted)
        return self._last_read[1]
