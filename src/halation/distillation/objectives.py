"""What a student is trained to do: what its teacher says, where the teacher's way ends, or what the teacher draws on the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from halation.errors import InputError
from halation.models.denoiser import Denoiser
from halation.models.teacher import Teacher
from halation.training.loop import MODEL, Objective, Rows

FAKE = "fake"
PROJECTION = "projection"


def _squared(answer: Tensor, target: Tensor) -> Tensor:
    return (answer.float() - target.float()).square().flatten(1).mean(1)


def matching(student: Denoiser, weight: Callable[[Tensor], Tensor] | None = None) -> Objective:
    """The answers that were kept of the teacher: its own at a state, or those that lead to where its way ends.

    `weight` says by times how much a row counts.
    """

    def losses(module: nn.Module, rows: Rows) -> Tensor:
        answer = student.forward(module, rows.extra["state"], rows.t, rows.condition)
        result = _squared(answer, rows.extra["target"])
        return result if weight is None else result * weight(rows.t)

    return losses


def velocity(student: Denoiser, teacher: Teacher, features: FeatureMatching | None = None) -> Objective:
    """The teacher's guided answer, asked for now at noised pictures; where it was kept, the teacher only shows its features."""
    path = student.path

    def losses(module: nn.Module, rows: Rows) -> Tensor:
        state = rows.extra["state"] if "state" in rows.extra else path.noised(rows.x0, rows.noise, rows.t)
        target = rows.extra.get("target")
        if target is None:
            target = teacher.predict(state, rows.t, rows.condition)
        elif features is not None:
            teacher.look(state, rows.t, rows.condition)
        answer = student.forward(module, state, rows.t, rows.condition)
        result = _squared(answer, target)
        return result if features is None else result + features.losses()

    return losses


class Tap:
    """What a unit of a network last gave, one row of numbers a token."""

    def __init__(self, unit: nn.Module) -> None:
        self._value: Tensor | None = None
        unit.register_forward_hook(self._heard)

    def _heard(self, _unit: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._value = output[-1] if isinstance(output, tuple) else output  # pictures stand behind texts

    def take(self) -> Tensor:
        """Once: what is kept longer keeps a whole graph alive."""
        value, self._value = self._value, None
        assert value is not None, "its unit has not run"
        return value


class FeatureMatching:
    """The student's features in the middle of the network, projected, against the teacher's there."""

    def __init__(self, student: Denoiser, teacher: Teacher, weight: float) -> None:
        self.weight = weight
        self.projection = nn.Linear(student.hidden, teacher.denoiser.hidden)
        with torch.no_grad():  # of the two widths alone: the same on all ranks, whoever's generator stands where
            nn.init.orthogonal_(self.projection.weight, generator=torch.Generator().manual_seed(0))
            self.projection.bias.zero_()
        self.trained: nn.Module = self.projection
        self._student = Tap(_middle(student))
        self._teacher = Tap(_middle(teacher.denoiser))

    def losses(self) -> Tensor:
        """Of the forwards that were made last."""
        mine, wanted = self._student.take(), self._teacher.take()
        if mine.shape[:-1] != wanted.shape[:-1]:
            raise InputError(
                f"the student has {mine.shape[1]} tokens a picture, the teacher {wanted.shape[1]}",
                "as many tokens in both, to compare features",
                "give the student the teacher's patch size, or --feature_weight 0",
            )
        wanted = layer_norm(wanted.float(), wanted.shape[-1:]).to(mine.device)
        return self.weight * _squared(self.trained(mine), wanted)


def _middle(denoiser: Denoiser) -> nn.Module:
    units = denoiser.shard_units()
    return units[len(units) // 2]


class DistributionMatching:
    """DMD (Yin et al. 2024): the student's pictures move to where the teacher finds them likelier than a second network does that
    learns what the student draws. Both networks take turns.

    The student draws as it will be drawn from: by deterministic steps at its own times, of which one is trained at a time.
    """

    def __init__(
        self, student: Denoiser, teacher: Teacher, fake: Denoiser, *, times: Sequence[float], fake_updates: int
    ) -> None:
        self.student = student
        self.teacher = teacher
        self.fake = fake
        self.times = tuple(times)
        self.fake_updates = fake_updates
        self.rest_student: Callable[[], None] = lambda: None
        self.rest_fake: Callable[[], None] = lambda: None
        """Called when a network was asked without being trained: sharded ones would stay whole."""

    def turn(self, step: int) -> tuple[str, ...]:
        """The second network first, so that it knows the student when the student moves."""
        return (MODEL,) if step % (self.fake_updates + 1) == self.fake_updates else (FAKE,)

    def student_losses(self, module: nn.Module, rows: Rows) -> Tensor:
        picture = self._drawn(module, rows)
        with torch.no_grad():
            state = self.student.path.noised(picture, rows.extra["renoise"], rows.t)
            real = self._picture(state, self.teacher.predict(state, rows.t, rows.condition), rows.t)
            answer = self.fake.forward(self.fake.module, state, rows.t, rows.condition)
            fake = self._picture(state, answer.float(), rows.t)
            self.rest_fake()
            # Differences are as large as the teacher's own at this noise, whatever the noise.
            size = (picture - real).abs().flatten(1).mean(1).clamp_min(1e-6)
            wanted = picture - (fake - real) / size.reshape(-1, *[1] * (picture.ndim - 1))
        return 0.5 * _squared(picture, wanted)

    def fake_losses(self, module: nn.Module, rows: Rows) -> Tensor:
        with torch.no_grad():
            picture = self._drawn(self.student.module, rows)
            self.rest_student()
        path, noise = self.student.path, rows.extra["renoise"]
        state = path.noised(picture, noise, rows.t)
        answer = self.fake.forward(module, state, rows.t, rows.condition)
        return _squared(answer, path.target(picture, noise, rows.t))

    def _drawn(self, module: nn.Module, rows: Rows) -> Tensor:
        """The picture that the student sees at one of its times; which one follows from the step, since ranks make equal forwards."""
        cycle = rows.step // (self.fake_updates + 1)
        number = cycle if self.turn(rows.step) == (MODEL,) else rows.step - cycle  # of the turns of this network
        chosen = number % (len(self.times) - 1)
        x = rows.noise
        with torch.no_grad():
            for before in range(chosen):
                t, s = (torch.full_like(rows.t, time) for time in self.times[before : before + 2])
                answer = self.student.forward(self.student.module, x, t, rows.condition).float()
                x = self.student.path.step(x, answer, t, s)
        t = torch.full_like(rows.t, self.times[chosen])
        return self._picture(x, self.student.forward(module, x, t, rows.condition).float(), t)

    def _picture(self, x: Tensor, answer: Tensor, t: Tensor) -> Tensor:
        return self.student.path.split(x, answer, t)[0]
