"""Laws of cached teacher targets, with a tiny DiT as teacher, on any number of ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halation.data.dataset_protocol import ImageDataset
from halation.data.prompt_dataset import PromptDataset
from halation.data.streets import Streets
from halation.distillation import teacher_targets
from halation.distillation.objectives import TeacherInputs
from halation.distillation.teacher import Teacher
from halation.distillation.teacher_targets import TargetPlan, compute_targets
from halation.errors import HalationError, InputError
from halation.flow.paths import PREDICTION_TYPES, DDPMPath, RectifiedFlowPath
from halation.flow.paths import NoisePath as NoisePath
from halation.flow.samplers import schedule
from halation.models.denoiser import Condition, null_condition
from halation.models.dit.denoiser import DiTDenoiser, create_dit

CPU = torch.device("cpu")
TEXTS = ("a red car", "a blue bus", "a tram at night", "snow")
SHAPE = (3, 32, 32)
KINDS = [("velocity", False), ("velocity", True), ("trajectory", False), ("trajectory", True)]
every_kind = pytest.mark.parametrize(("objective", "images"), KINDS)


@pytest.fixture(scope="module")
def denoiser() -> DiTDenoiser:
    shape = create_dit("tiny", height=32, width=32, captions=TEXTS, patch_size=16)
    config = dataclasses.replace(shape.config, depth=1, hidden=32, heads=2, text_hidden=16)
    denoiser = DiTDenoiser(config=config, space=shape.space, tokenizer=shape.tokenizer).init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # a fresh DiT answers zero to everything
        for parameter in denoiser.module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return denoiser


@pytest.fixture(scope="module")
def teacher(denoiser: DiTDenoiser) -> Teacher:
    return Teacher(denoiser, guidance=2.0, device=CPU, dtype=torch.float32)


def plan(objective: str = "trajectory", images: bool = False, **changes: Any) -> TargetPlan:
    way = {
        "velocity": {"times": tuple(schedule(6).tolist()), "teacher_steps": 6, "num_states": 3},
        "trajectory": {"times": (1.0, 0.7, 0.3, 0.0), "teacher_steps": 7, "num_states": 5},
    }
    settings = {"sample_shape": SHAPE, "seed": 3, "exact": True, **way[objective], **changes}
    return TargetPlan(objective=objective, has_images=images, **settings)


def source(folder: Path, wanted: TargetPlan, num_items: int) -> ImageDataset:
    if wanted.has_images:
        return Streets(32, 32, num_train=num_items)
    (folder / "prompts.txt").write_text("\n".join(TEXTS))
    return PromptDataset(folder / "prompts.txt", 32, 32, num_items=num_items)


class School:
    """A teacher, a plan and some items: builds teacher targets, and counts what the teacher is asked."""

    def __init__(self, folder: Path, teacher: Teacher, wanted: TargetPlan, num_items: int = 7) -> None:
        self.folder = folder / "lessons"
        self.plan = wanted
        self.teacher = teacher
        self.num_items = num_items
        self.items = TeacherInputs(teacher.denoiser, source(folder, wanted, num_items), CPU, wanted.dropout_mask)
        self.fingerprint: dict[str, Any] = {"teacher": "tiny", "plan": wanted.as_json()}
        self.num_asked = 0
        self.fails_at = -1

    def predict(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        self.num_asked += 1
        if self.num_asked == self.fails_at:
            raise KeyboardInterrupt
        return self.teacher.predict(x, t, condition)

    def missing(self) -> list[int]:
        return teacher_targets.find_missing(self.num_items, self.folder, self.fingerprint)

    def build(self, items: Sequence[int] | None = None, **changes: Any) -> int:
        return teacher_targets.build(
            self.plan,
            self.folder,
            self.missing() if items is None else items,
            **{
                "path": self.teacher.noise_path,
                "predict": self.predict,
                "condition": self.items.condition,
                "x0": self.items.x0 if self.plan.has_images else None,
                "prompt": self.items.prompt,
                "fingerprint": self.fingerprint,
                "device": CPU,
                "encode_size": 2,
                "shard_size": 4,
                **changes,
            },
        )

    def everything(self) -> tuple[Tensor, Tensor, Tensor]:
        """States, times and targets, (items, teacher targets, ...)."""
        book = teacher_targets.open_targets(self.folder, self.fingerprint)
        numbers = range(self.num_items)
        read = [book.read(numbers, [which] * self.num_items) for which in range(book.num_states)]
        state, t, target = (torch.stack(parts, dim=1) for parts in zip(*read, strict=True))
        return state, t, target


@every_kind
def test_lessons_do_not_depend_on_the_number_of_ranks(
    tmp_path: Path, teacher: Teacher, objective: str, images: bool
) -> None:
    made = []
    for size in (1, 3):
        (tmp_path / str(size)).mkdir()
        school = School(tmp_path / str(size), teacher, plan(objective, images))
        left = school.missing()
        for rank in range(size):
            school.build(left, part=(rank, size))
        assert school.missing() == []
        made.append(school.everything())
    for one, three in zip(*made, strict=True):
        assert torch.allclose(one, three, atol=1e-5)
    assert made[0][0].shape == (7, school.plan.num_states, *SHAPE)
    assert torch.equal(made[0][1], made[1][1])


@every_kind
def test_a_velocity_target_is_the_teachers_output_and_a_trajectory_target_is_not(
    tmp_path: Path, teacher: Teacher, objective: str, images: bool
) -> None:
    """A velocity target is the teacher's output at that state; a trajectory target differs."""
    school = School(tmp_path, teacher, plan(objective, images), num_items=5)
    school.build()
    state, t, target = school.everything()
    condition = school.items.condition(range(5))
    for which in range(state.shape[1]):
        said = teacher.predict(state[:, which], t[:, which], condition)
        assert torch.allclose(said, target[:, which], atol=1e-5) == (objective == "velocity")


@pytest.mark.parametrize("name", ["straight", *PREDICTION_TYPES])
def test_the_starts_of_a_trajectory_lead_one_to_the_other_and_to_the_teacher_s_image(name: str) -> None:
    path: NoisePath = RectifiedFlowPath()
    if name != "straight":
        path = DDPMPath(torch.cos(torch.linspace(0.01, 0.98, 1000) * torch.pi / 2) ** 2, name)

    def predict(x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        return torch.sin(2 * x + condition["word"]) * (0.5 + t.reshape(-1, 1, 1, 1))

    wanted = plan(teacher_steps=30, num_states=8, times=(1.0, 0.7, 0.3, 0.0))
    items = [4, 0, 9]
    condition = {"word": torch.tensor([0.1, 0.2, 0.3]).reshape(-1, 1, 1, 1)}
    *_, made = compute_targets(wanted, path, predict, items, condition, device=CPU)
    x = torch.stack([torch.from_numpy(wanted.draw(item, 0).noise) for item in items])
    for piece in wanted.segments:
        for now, after in itertools.pairwise(piece):
            t, s = torch.full((3,), now), torch.full((3,), after)
            x = path.step(x, predict(x, t, condition), t, s)
    for row in range(3):
        starts = [int((made["t"][row] - time).abs().argmin()) for time in wanted.times[:-1]]
        assert made["t"][row, starts].tolist() == pytest.approx(wanted.times[:-1])
        state = made["state"][row : row + 1, starts[0]]
        for start, now, after in zip(starts, wanted.times[:-1], wanted.times[1:], strict=True):
            assert torch.allclose(state, made["state"][row : row + 1, start], atol=2e-4)
            t, s = torch.tensor([now]), torch.tensor([after])
            state = path.step(state, made["target"][row : row + 1, start], t, s)
        assert torch.allclose(state[0], x[row], atol=2e-4)


def test_every_kept_state_of_a_trajectory_leads_to_its_segment_s_end(tmp_path: Path, teacher: Teacher) -> None:
    wanted = plan(num_states=7)  # all of them
    *_, made = compute_targets(
        wanted, RectifiedFlowPath(), teacher.predict, [2], _condition(tmp_path, teacher, wanted, 2), device=CPU
    )
    state, t, target = made["state"][0], made["t"][0], made["target"][0]
    assert sorted(t.tolist(), reverse=True) == t.tolist()
    ends = [next(time for time in wanted.times if time < now - 1e-6) for now in t.tolist()]
    landed = RectifiedFlowPath().step(state, target, t, torch.tensor(ends))
    groups = {end: [row for row in range(7) if ends[row] == end] for end in ends}
    assert sorted(map(len, groups.values())) == [2, 2, 3]
    for rows in groups.values():
        assert torch.allclose(landed[rows], landed[rows[:1]].expand(len(rows), *SHAPE), atol=1e-4)


def _condition(folder: Path, teacher: Teacher, wanted: TargetPlan, item: int) -> Condition:
    return TeacherInputs(teacher.denoiser, source(folder, wanted, 7), CPU, wanted.dropout_mask).condition([item])


def test_noised_images_are_seen_from_little_to_much_noise(tmp_path: Path, teacher: Teacher) -> None:
    wanted = plan("velocity", True, num_states=4, time_sampling="logit_normal", time_shift=3.0)
    school = School(tmp_path, teacher, wanted, num_items=6)
    school.build()
    state, t, _ = school.everything()
    x0 = school.items.x0(range(6))
    assert (t.diff(dim=1) > 0).all()
    assert len(set(t.flatten().tolist())) == 24
    for item in range(6):
        for which in range(4):
            noise = torch.from_numpy(wanted.draw(item, which).noise)
            expected = RectifiedFlowPath().add_noise(x0[item : item + 1], noise[None], t[item, which : which + 1])
            assert torch.equal(expected[0], state[item, which])


def test_every_segment_of_a_image_s_trajectory_begins_at_the_noised_image(tmp_path: Path, teacher: Teacher) -> None:
    wanted = plan("trajectory", True, num_states=3)
    school = School(tmp_path, teacher, wanted, num_items=3)
    school.build()
    state, t, _ = school.everything()
    x0 = school.items.x0(range(3))
    assert torch.allclose(t, torch.tensor(wanted.times[:-1]).expand(3, 3))
    for item in range(3):
        for place in range(3):
            noise = torch.from_numpy(wanted.draw(item, place).noise)
            expected = RectifiedFlowPath().add_noise(x0[item : item + 1], noise[None], t[item, place : place + 1])
            assert torch.allclose(expected[0], state[item, place])


def test_the_first_segment_begins_with_pure_noise_as_sampling_does() -> None:
    """The first segment begins with pure noise, also if the table leaves some image at t = 1."""
    path = DDPMPath(torch.linspace(0.99, 0.1, 100), "epsilon")
    wanted = plan("trajectory", True)
    *_, made = compute_targets(
        wanted, path, lambda x, t, _: torch.zeros_like(x), [5], {}, device=CPU, x0=torch.ones(1, *SHAPE)
    )
    assert torch.equal(made["state"][0, 0], torch.from_numpy(wanted.draw(5, 0).noise))


def test_a_build_that_dies_is_finished_by_asking_for_what_is_missing(tmp_path: Path, teacher: Teacher) -> None:
    school = School(tmp_path, teacher, plan())
    school.fails_at = 2 * school.plan.num_teacher_calls + 2  # two batches of two, which are a shard, and a bit
    with pytest.raises(KeyboardInterrupt):
        school.build()
    assert school.missing() == [4, 5, 6]
    school.num_asked, school.fails_at = 0, -1
    school.build()
    assert school.num_asked == 2 * school.plan.num_teacher_calls
    assert school.missing() == []
    resumed = school.everything()
    (tmp_path / "other").mkdir()
    whole = School(tmp_path / "other", teacher, plan())
    whole.build()
    for one, other in zip(resumed, whole.everything(), strict=True):
        assert torch.equal(one, other)


def test_items_of_a_damaged_shard_are_missing_again(
    tmp_path: Path, teacher: Teacher, caplog: pytest.LogCaptureFixture
) -> None:
    school = School(tmp_path, teacher, plan("velocity", num_states=1))
    school.build()
    hurt = max(school.folder.glob("*.safetensors"))
    content = bytearray(hurt.read_bytes())
    content[-1] ^= 1
    hurt.write_bytes(content)
    gone = school.missing()
    assert len(gone) in (3, 4)
    assert "was damaged and is removed" in caplog.text
    school.build(gone)
    assert school.missing() == []
    school.everything()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_in_step_ask_the_teacher_equally_often(tmp_path: Path, teacher: Teacher, size: int) -> None:
    school = School(tmp_path, teacher, plan("velocity", num_states=2), num_items=5)
    left, asked = school.missing(), []
    for rank in range(size):
        school.num_asked = 0
        school.build(left, part=(rank, size), agree=lambda word: word)
        asked.append(school.num_asked)
    assert len(set(asked)) == 1
    assert asked[0] > 0
    assert school.missing() == []


def test_a_rank_in_step_says_what_went_wrong_before_others_ask_the_teacher_again(
    tmp_path: Path, teacher: Teacher
) -> None:
    school = School(tmp_path, teacher, plan("velocity"))
    told: list[str] = []

    def agree(word: str) -> str:
        told.append(word)
        return word or ("" if len(told) < 3 else "rank 1: its disk is full")

    with pytest.raises(HalationError, match="its disk is full"):
        school.build(agree=agree)
    assert school.num_asked == 2 * school.plan.num_teacher_calls
    assert told == ["", "", ""]

    def unreadable(items: Sequence[int]) -> Condition:
        raise OSError("no such image")

    told.clear()
    with pytest.raises(OSError, match="no such image"):
        school.build(agree=agree, condition=unreadable)
    assert told == ["no such image"]


def test_progress_beats_with_every_forward(tmp_path: Path, teacher: Teacher) -> None:
    school = School(tmp_path, teacher, plan("velocity"), num_items=3)
    told: list[tuple[int, int]] = []
    school.build(on_progress=lambda *now: told.append(now))
    assert told == [(0, 3), *[(0, 3)] * 6, (2, 3), *[(2, 3)] * 6, (3, 3)]


@pytest.mark.parametrize("value", [float("nan"), 1e6])
def test_answers_that_are_not_finite_are_refused_with_their_prompt(
    tmp_path: Path, teacher: Teacher, value: float
) -> None:
    school = School(tmp_path, teacher, plan("velocity", exact=False), num_items=4)

    def predict(x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        answer = school.teacher.predict(x, t, condition)
        answer[1] = value
        return answer

    with pytest.raises(InputError, match="the teacher's targets for 'a blue bus' are not finite") as caught:
        school.build(predict=predict)
    assert "--teacher_dtype" in caught.value.action
    assert not list(school.folder.glob("*.safetensors"))


@pytest.mark.parametrize("images", [False, True])
def test_lessons_that_do_not_fit_on_the_disk_are_refused_before_the_first_is_written(
    tmp_path: Path, teacher: Teacher, images: bool
) -> None:
    school = School(tmp_path, teacher, plan("velocity", images, num_states=1))
    with pytest.raises(InputError, match=r"the teacher targets of 1000000000000 items take .* GiB are free") as caught:
        school.build(range(10**12), part=(0, 10**12))
    assert "--teacher_states" in caught.value.action
    assert ("--no_teacher_cache" in caught.value.action) == images
    assert not list(school.folder.glob("*.safetensors"))


def test_half_precision_takes_half_the_room_and_little_of_the_lesson(tmp_path: Path, teacher: Teacher) -> None:
    made, sizes = [], []
    for exact in (True, False):
        (tmp_path / str(exact)).mkdir()
        school = School(tmp_path / str(exact), teacher, plan("velocity", exact=exact), num_items=4)
        school.build()
        made.append(school.everything())
        sizes.append(sum(path.stat().st_size for path in school.folder.glob("*.safetensors")))
    assert made[0][0].dtype == torch.float32
    assert made[1][0].dtype == made[1][2].dtype == torch.float16
    assert 1.9 < sizes[0] / sizes[1] < 2.1
    for one, other in zip(*made, strict=True):
        assert torch.allclose(one, other.float(), atol=4e-3)


def test_items_without_a_caption_are_taught_without_one(tmp_path: Path, teacher: Teacher) -> None:
    wanted = plan("velocity", caption_dropout=0.5, num_states=1)
    dropped = wanted.dropout_mask(range(200))
    assert 70 < int(dropped.sum()) < 130
    assert not plan("velocity").dropout_mask(range(200)).any()
    school = School(tmp_path, teacher, wanted, num_items=6)
    school.build()
    state, t, target = school.everything()
    null = null_condition(teacher.denoiser, 6)
    without = teacher.denoiser.forward(teacher.denoiser.module, state[:, 0], t[:, 0], null)
    same = [torch.allclose(target[row, 0], without[row], atol=1e-5) for row in range(6)]
    assert same == dropped[:6].tolist()
    assert 0 < sum(same) < 6


def test_the_fingerprint_follows_what_decides_a_lesson_and_nothing_else(tmp_path: Path, teacher: Teacher) -> None:
    def same(first: TargetPlan, second: TargetPlan) -> bool:
        return first.as_json() == second.as_json()

    for change in ({"seed": 4}, {"num_states": 6}, {"teacher_steps": 8}, {"caption_dropout": 0.1}, {"exact": False}):
        assert not same(plan(), plan(**change))
    assert same(plan(), plan(time_shift=2.0))
    looked = {"images": True, "objective": "velocity"}
    assert same(plan(**looked), plan(**looked, teacher_steps=9))
    assert not same(plan(**looked), plan(**looked, time_shift=2.0))
    school = School(tmp_path, teacher, plan("velocity"), num_items=2)
    with pytest.raises(ValueError, match="must hold the plan"):
        school.build(fingerprint={"teacher": "tiny"})
    school.build()
    school.fingerprint["teacher"] = "another"
    for call in (school.missing, school.everything, lambda: school.build([0])):
        with pytest.raises(InputError, match="was made for something else"):
            call()


def _way(objective: str = "trajectory", **changes: Any) -> Callable[[], TargetPlan]:
    return lambda: plan(objective, **changes)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (_way(num_states=2), InputError, "--teacher_states 2 with --student_steps 3"),
        (_way(num_states=0), ValueError, "0 states"),
        (lambda: plan("velocity", teacher_steps=0), ValueError, "of 0 steps"),
        (lambda: TargetPlan(
            objective="dmd", has_images=False, times=(), teacher_steps=1, num_states=1, sample_shape=(), seed=0),
         ValueError, "not 'dmd'"),
    ],
)  # fmt: skip
def test_plans_that_cannot_be_taught_are_refused(
    make: Callable[[], TargetPlan], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make()


def test_more_steps_than_a_table_has_are_refused(tmp_path: Path, teacher: Teacher) -> None:
    school = School(tmp_path, teacher, plan(teacher_steps=30))
    with pytest.raises(InputError, match="--teacher_steps 30"):
        school.build(path=DDPMPath(torch.linspace(0.99, 0.01, 20), "epsilon"))


def test_a_trajectory_keeps_at_most_its_states_and_no_targets_are_refused(tmp_path: Path, teacher: Teacher) -> None:
    """A trajectory keeps no more states than it has, and a folder without targets is refused."""
    school = School(tmp_path, teacher, plan("velocity", num_states=40), num_items=2)
    with pytest.raises(InputError, match="no cache in"):
        school.everything()
    school.build([])
    with pytest.raises(InputError, match="no teacher targets in"):
        school.everything()
    school.build()
    assert teacher_targets.open_targets(school.folder, school.fingerprint).num_states == 6


def test_a_build_that_is_asked_to_stop_writes_what_it_has_and_says_how_much(tmp_path: Path, teacher: Teacher) -> None:
    school = School(tmp_path, teacher, plan("velocity"))
    stops_at = 2 * school.plan.num_teacher_calls + 1
    assert school.build(stop=lambda: school.num_asked >= stops_at) == 4
    assert (school.num_asked, school.missing()) == (stops_at, [4, 5, 6])
    assert school.build() == 3
    assert school.missing() == []


def known_way() -> tuple[NoisePath, Callable[..., Tensor]]:
    """A teacher of numbers that are normal with mean 1 and deviation 0.3, whose answers, the noise, are known."""
    path: NoisePath = DDPMPath((1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0), "epsilon")

    def answer(x: Tensor, t: Tensor, _condition: object = None) -> Tensor:
        one, nothing = torch.ones(len(t), 1), torch.zeros(len(t), 1)
        signal, spread = path.add_noise(one, nothing, t), path.add_noise(nothing, one, t)
        share = (x - signal) / ((0.3 * signal) ** 2 + spread**2)
        return path.target(1 + 0.09 * signal * share, spread * share, t)

    return path, answer


def test_targets_weighted_by_their_effect_make_a_small_student_better() -> None:
    """The student is linear in the state and in the time, so that what it learns is a least-squares problem."""
    times = (1.0, 0.7495, 0.4995, 0.2495, 0.0)
    wanted = plan(times=times, teacher_steps=40, num_states=8, sample_shape=(1,))
    path, answer = known_way()
    *_, made = compute_targets(wanted, path, answer, range(64), {}, device=CPU)
    x, t, target = (made[key].flatten(0, 1).double() for key in ("state", "t", "target"))
    noise = torch.linspace(-2, 2, 41).reshape(-1, 1)
    wanted_end = drawn(path, answer, noise, [time for piece in wanted.segments for time in piece[:-1]] + [0.0])
    weigh = teacher_targets.loss_weights(wanted, path)
    assert weigh is not None
    weight = weigh(t.float()).double()
    assert float(weight.mean()) == pytest.approx(1.0, abs=0.03), "a loss is as large as it would be"
    errors = []
    for counts in (torch.ones_like(t), weight):
        root = counts.sqrt()[:, None]
        learned = torch.linalg.lstsq(features(x, t) * root, target * root, driver="gelsd").solution.float()
        end = drawn(path, lambda x, t, learned=learned: features(x, t) @ learned, noise, wanted.times)
        errors.append(float((end - wanted_end).square().mean().sqrt()))
    assert errors[1] < 0.75 * errors[0]


def features(x: Tensor, t: Tensor) -> Tensor:
    time = t.reshape(-1, 1)
    return torch.cat([x, torch.ones_like(x), time * x, time.expand_as(x)], dim=1)


def drawn(path: NoisePath, answer: Callable[..., Tensor], x: Tensor, times: Sequence[float]) -> Tensor:
    for now, after in itertools.pairwise(times):
        t, s = torch.full((len(x),), now), torch.full((len(x),), after)
        x = path.step(x, answer(x, t), t, s)
    return x


def test_only_lessons_of_a_trajectory_of_predicted_noise_are_weighed() -> None:
    assert teacher_targets.loss_weights(plan("velocity"), known_way()[0]) is None
    assert teacher_targets.loss_weights(plan(), RectifiedFlowPath()) is None
