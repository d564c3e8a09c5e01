"""Turns of the two networks of DMD: both see every one of the student's steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from halation.distillation.objectives import FAKE, DistributionMatching, FeatureMatching, velocity_objective
from halation.distillation.teacher import Teacher
from halation.flow.paths import RectifiedFlowPath
from halation.models.denoiser import null_condition
from halation.models.dit.denoiser import DiTDenoiser, create_dit
from halation.training.loop import MODEL, MicroBatch

SIDE = 8


class Heard(nn.Module):
    """A DiT's place is taken by something that writes down when it is asked, with a gradient and without."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.asked: list[tuple[float, bool]] = []

    def forward(self, x: Tensor, t: Tensor, condition: dict[str, Tensor]) -> Tensor:
        self.asked.append((float(t[0]), torch.is_grad_enabled()))
        return x * self.weight


def dit() -> DiTDenoiser:
    return create_dit("tiny", height=SIDE, width=SIDE, captions=["a car"], patch_size=4).init_weights(0)


_DIT = dit()


def heard() -> DiTDenoiser:
    denoiser = dit()
    denoiser.module = Heard()
    return denoiser


def rows(denoiser: DiTDenoiser, step: int, num: int = 2) -> MicroBatch:
    generator = torch.Generator().manual_seed(step)
    noise = torch.randn(num, 3, SIDE, SIDE, generator=generator)
    return MicroBatch(
        x0=torch.empty(num, 0),
        noise=noise,
        t=torch.full((num,), 0.5),
        condition=denoiser.encode_prompts(["a car"] * num),
        weight=torch.ones(num),
        step=step,
        extra={"renoise": noise.flip(0)},
    )


def matching(num_steps: int, fake_updates: int) -> tuple[DistributionMatching, Heard]:
    student = heard()
    teacher = Teacher(heard(), guidance=1.0, device=torch.device("cpu"), dtype=torch.float32)
    times = torch.linspace(1, 0, num_steps + 1).tolist()
    dmd = DistributionMatching(student, teacher, heard(), times=times, fake_updates=fake_updates)
    assert isinstance(student.module, Heard)
    return dmd, student.module


@pytest.mark.parametrize(("num_steps", "fake_updates"), [*itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 5, 6))])
def test_both_networks_learn_from_each_of_the_students_steps_equally_often(num_steps: int, fake_updates: int) -> None:
    dmd, student = matching(num_steps, fake_updates)
    seen: dict[str, Counter[float]] = {MODEL: Counter(), FAKE: Counter()}
    for step in range(2 * num_steps * (fake_updates + 1)):
        (name,) = dmd.active_networks(step)
        student.asked.clear()
        losses, module = (dmd.student_losses, student) if name == MODEL else (dmd.fake_losses, dmd.fake.module)
        losses(module, rows(_DIT, step))
        seen[name][student.asked[-1][0]] += 1
    for counts in seen.values():
        assert sorted(counts) == pytest.approx(sorted(dmd.times[:-1]))
        assert max(counts.values()) - min(counts.values()) <= 1


def test_only_the_network_and_the_step_being_trained_get_a_gradient() -> None:
    """Only the network whose turn it is gets a gradient, and only through the trained step."""
    dmd, student = matching(4, 1)
    fake = dmd.fake.module
    step = 7  # the student's fourth turn: its last step
    assert dmd.active_networks(step) == (MODEL,)
    dmd.student_losses(student, rows(_DIT, step)).sum().backward()
    assert [with_gradient for _, with_gradient in student.asked] == [False, False, False, True]
    assert student.weight.grad is not None
    assert fake.weight.grad is None
    student.weight.grad = None
    dmd.fake_losses(fake, rows(_DIT, 6)).sum().backward()
    assert student.weight.grad is None
    assert fake.weight.grad is not None


def test_a_student_whose_second_network_agrees_with_the_teacher_stands_still() -> None:
    """The gradient is the difference of the two networks: 0 if they agree, else towards the teacher's images."""
    student, teacher, fake = dit(), dit(), dit()
    for denoiser in (student, teacher, fake):
        with torch.no_grad():
            for parameter in denoiser.module.parameters():
                parameter.add_(0.02)
    wise = Teacher(teacher, guidance=1.0, device=torch.device("cpu"), dtype=torch.float32)
    dmd = DistributionMatching(student, wise, fake, times=(1.0, 0.5, 0.0), fake_updates=1)
    assert dmd.student_losses(student.module, rows(_DIT, 1)).tolist() == pytest.approx([0.0, 0.0], abs=1e-10)
    with torch.no_grad():
        for parameter in fake.module.parameters():
            parameter.add_(0.02)
    assert min(dmd.student_losses(student.module, rows(_DIT, 1)).tolist()) > 1e-6


def test_a_teacher_is_guided_by_its_null_branch_as_its_samples_are() -> None:
    denoiser = dit()
    with torch.no_grad():
        for parameter in denoiser.module.parameters():
            parameter.add_(0.02)
    batch = rows(denoiser, 0)
    with torch.no_grad():
        answer = denoiser.predict(batch.noise, batch.t, batch.condition)
        without = denoiser.predict(batch.noise, batch.t, null_condition(denoiser, 2))
    for scale in (1.0, 3.0):
        teacher = Teacher(denoiser, guidance=scale, device=torch.device("cpu"), dtype=torch.float32, batch_size=1)
        said = teacher.predict(batch.noise, batch.t, batch.condition)
        torch.testing.assert_close(said, without + scale * (answer - without), rtol=1e-4, atol=1e-5)


def test_features_are_those_of_the_prompts_branch_and_reach_student_and_projection() -> None:
    student, teacher = dit(), Teacher(dit(), guidance=2.0, device=torch.device("cpu"), dtype=torch.float32)
    features = FeatureMatching(student, teacher, 1.0)
    batch = rows(student, 0)
    plain = velocity_objective(student, teacher)(student.module, with_state(batch))
    features._student_hook.pop()
    features._teacher_hook.pop()
    both = velocity_objective(student, teacher, features)(student.module, with_state(batch))
    assert (both > plain).all()
    both.sum().backward()
    assert features.projection.weight.grad is not None
    assert features.projection.weight.grad.abs().sum() > 0
    blocks = [parameter for name, parameter in student.module.named_parameters() if name.startswith("blocks.0")]
    assert any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in blocks)


def test_cached_targets_of_a_guided_teacher_need_no_forward_and_features_one() -> None:
    """Cached targets of a guided teacher are not computed again; features take one forward."""
    student, teacher = dit(), Teacher(dit(), guidance=2.0, device=torch.device("cpu"), dtype=torch.float32)
    features = FeatureMatching(student, teacher, 1.0)
    asked = with_state(rows(student, 0))
    kept = dataclasses.replace(
        asked, extra=asked.extra | {"target": teacher.predict(asked.extra["state"], asked.t, asked.condition)}
    )
    num_forwards = []
    teacher.denoiser.module.register_forward_hook(lambda *_: num_forwards.append(1))
    live = velocity_objective(student, teacher, features)(student.module, asked)
    assert len(num_forwards) == 2
    torch.testing.assert_close(velocity_objective(student, teacher, features)(student.module, kept), live)
    assert len(num_forwards) == 3
    velocity_objective(student, teacher)(student.module, kept)
    assert len(num_forwards) == 3


def test_a_teacher_gives_a_sign_of_life_after_every_branch_of_every_piece() -> None:
    teacher = Teacher(dit(), guidance=2.0, device=torch.device("cpu"), dtype=torch.float32, batch_size=2)
    happened: list[str] = []
    teacher.denoiser.module.register_forward_hook(lambda *_: happened.append("forward"))
    teacher.heartbeat = lambda: happened.append("beat")
    batch = rows(_DIT, 0, num=3)
    teacher.predict(batch.noise, batch.t, batch.condition)
    assert happened == ["forward", "beat"] * 4


def with_state(batch: MicroBatch) -> MicroBatch:
    return MicroBatch(
        x0=batch.x0,
        noise=batch.noise,
        t=batch.t,
        condition=batch.condition,
        weight=batch.weight,
        extra={"state": RectifiedFlowPath().add_noise(batch.noise.flip(0), batch.noise, batch.t)},
    )
