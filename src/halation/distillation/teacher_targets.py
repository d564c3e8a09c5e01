"""Teacher targets, computed once on all ranks and cached: states, times, predictions.

An item is an image, or for a list of prompts a number that has one of them. Each has a few teacher targets; training
then needs no teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halation.data.dataset_protocol import JSON
from halation.data.row_cache import CachedRows, PlannedRows, RowCacheWriter, RowFolder
from halation.errors import HalationError, InputError
from halation.fault_injection import fault_point
from halation.flow.paths import DDPMPath, NoisePath, TimeDistribution, times_from_uniform
from halation.flow.samplers import segments, select_steps, solve, stratified_indices
from halation.flow.seeded_noise import TrainingDraw, training_draw
from halation.work_division import rank_range

FIRST_STREAM = 2
"""The first stream of an item's draws: those before are training's, at positions."""

Condition = dict[str, Tensor]
Predict = Callable[[Tensor, Tensor, Condition], Tensor]
"""The teacher: states, times (one a row) and conditions to answers, guided, in float32."""
__all__ = [
    "TargetPlan",
    "TeacherTargets",
    "amplifies_errors",
    "build",
    "compute_targets",
    "find_missing",
    "loss_weights",
    "open_targets",
]
FORMAT_VERSION = 1
_FLUSH_INTERVAL_S = 60.0
"""What a killed build loses at most, besides the batch it was at: a large teacher takes minutes for a batch."""
OptionalError = HalationError | OSError | None


@dataclass(frozen=True, kw_only=True)
class TargetPlan:
    """Which teacher targets an item has."""

    objective: str
    """`velocity`: what the teacher answers at a state. `trajectory`: the answer that leads from it to where the
    teacher's trajectory is at the end of the segment."""
    has_images: bool
    """Whether items are images with noise in them, or prompts that the teacher draws from noise."""
    times: tuple[float, ...]
    """From 1 to 0: the ends of the segments for `trajectory`, what the teacher goes through for `velocity`."""
    teacher_steps: int
    """Steps of the teacher from 1 to 0."""
    num_states: int
    """Teacher targets of an item, at most: a trajectory has no more states than steps."""
    sample_shape: tuple[int, ...]
    seed: int
    time_sampling: TimeDistribution = "uniform"
    time_shift: float = 1.0
    """Times of `velocity` on images."""
    caption_dropout: float = 0.0
    """Share of items that both teacher and student see without their caption."""
    exact: bool = False
    """Kept in float32 and not in half precision."""

    def __post_init__(self) -> None:
        if self.objective not in ("velocity", "trajectory"):
            raise ValueError(f"teacher targets are for velocity or trajectory, not {self.objective!r}")
        if self.num_states < 1 or self.teacher_steps < 1:
            raise ValueError(f"{self.num_states} states of {self.teacher_steps} steps; expected one at least")
        num_segments = len(self.times) - 1
        if self.objective == "trajectory" and self.num_states < num_segments:
            raise InputError(
                f"--teacher_states {self.num_states} with --student_steps {num_segments}",
                "at least one state for each of the student's steps",
                f"use --teacher_states {2 * num_segments}",
            )

    @property
    def follows_trajectory(self) -> bool:
        """Whether the teacher goes step by step; noised images it only looks at."""
        return self.objective == "trajectory" or not self.has_images

    @cached_property
    def segments(self) -> list[list[float]]:
        return segments(self.times, self.teacher_steps)

    @property
    def num_teacher_calls(self) -> int:
        """How often the teacher is asked for a batch of items."""
        return sum(len(piece) - 1 for piece in self.segments) if self.follows_trajectory else self.num_states

    def kept_steps(self, item: int) -> list[int]:
        """Which steps of an item's trajectory are teacher targets, by number."""
        u = self.draw(item, 0, ()).u_time
        if self.objective == "trajectory":
            return select_steps(self.segments, self.num_states, u)
        return stratified_indices(self.num_teacher_calls, self.num_states, u)

    def draw(self, item: int, number: int, shape: Sequence[int] | None = None) -> TrainingDraw:
        """What chance decides about an item, by number, apart from what it decides about positions in training."""
        return training_draw(self.seed, item, self.sample_shape if shape is None else shape, FIRST_STREAM + number)

    def dropout_mask(self, items: Sequence[int]) -> Tensor:
        """Which items have no caption: decided here and not in training, because the teacher has answered to one or to
        none."""
        return torch.tensor([self.draw(int(item), 0, ()).u_drop < self.caption_dropout for item in items])

    def as_json(self) -> dict[str, JSON]:
        """Everything that decides a teacher target besides teacher, path and items, for a fingerprint."""
        trajectory_settings: dict[str, Any] = {"times": list(self.times), "teacher_steps": self.teacher_steps}
        noising_settings: dict[str, Any] = {"time_sampling": self.time_sampling, "time_shift": self.time_shift}
        return {
            "objective": self.objective,
            "pictures": self.has_images,
            "num_states": self.num_states,
            "sample_shape": list(self.sample_shape),
            "seed": self.seed,
            "caption_dropout": self.caption_dropout,
            "dtype": "float32" if self.exact else "float16",
            **(trajectory_settings if self.follows_trajectory else noising_settings),
        }


def amplifies_errors(path: NoisePath) -> bool:
    """Whether a small error of an answer is a large one of what is drawn: from much noise, where the noise is
    predicted."""
    return isinstance(path, DDPMPath) and path.prediction_type == "epsilon"


def loss_weights(plan: TargetPlan, path: NoisePath) -> Callable[[Tensor], Tensor] | None:
    """How much teacher targets of a trajectory count, by their times, 1 on the average; None where all count the same.

    Where noise is predicted, a teacher target counts by how far its error moves the end of the student's step: from
    pure noise many times as far as from little. Not by the square, which is the error of the states that steps end at:
    later steps make good some of what early ones miss, and would be learned badly. Of velocities no step moves an end
    much farther than another, and all count the same.
    """
    if plan.objective != "trajectory" or not amplifies_errors(path):
        return None
    ends = torch.tensor(sorted(plan.times))

    def leverage(t: Tensor) -> Tensor:
        following = torch.searchsorted(ends.to(t.device), t - 1e-6) - 1  # the end of the segment that `t` is in
        return path.step_sensitivity(t, ends.to(t.device)[following])

    starts = torch.tensor([piece[0] for piece in plan.segments])
    others = torch.tensor([time for piece in plan.segments for time in piece[1:-1]])
    share = min(1.0, (plan.num_states - len(starts)) / max(1, len(others)))  # of the others that are teacher targets
    total = leverage(starts).sum() + share * leverage(others).sum()
    mean = float(total) / (len(starts) + share * len(others))
    return lambda t: leverage(t) / mean


def compute_targets(
    plan: TargetPlan,
    path: NoisePath,
    predict: Predict,
    items: Sequence[int],
    condition: Condition,
    *,
    device: torch.device,
    x0: Tensor | None = None,
) -> Iterator[dict[str, Tensor]]:
    """The teacher targets of these items in float32, once after each call of the teacher and complete after the last
    one.

    They are `state` and `target` (items, targets, ...), and `t` (items, targets). `predict` is called
    `plan.num_teacher_calls` times with a row for each item, whatever the items are.
    """
    if (x0 is not None) != plan.has_images:
        raise ValueError("images are given exactly where the plan has them")
    num_targets = len(plan.kept_steps(int(items[0]))) if plan.follows_trajectory else plan.num_states
    targets = {
        "state": torch.zeros(len(items), num_targets, *plan.sample_shape, device=device),
        "t": torch.zeros(len(items), num_targets, device=device),
        "target": torch.zeros(len(items), num_targets, *plan.sample_shape, device=device),
    }
    if plan.follows_trajectory:
        return _trajectory_targets(plan, path, predict, items, condition, x0, targets)
    assert x0 is not None
    return _noised_image_targets(plan, path, predict, items, condition, x0, targets)


def _stack_noise(draws: Sequence[TrainingDraw], device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack([draw.noise for draw in draws])).to(device)


@torch.no_grad()
def _noised_image_targets(
    plan: TargetPlan,
    path: NoisePath,
    predict: Predict,
    items: Sequence[int],
    condition: Condition,
    x0: Tensor,
    targets: dict[str, Tensor],
) -> Iterator[dict[str, Tensor]]:
    for number in range(plan.num_states):
        draws = [plan.draw(int(item), number) for item in items]
        # One from each of as many stretches as there are states, so that every image is seen at little and at much
        # noise.
        u = torch.tensor([(number + draw.u_time) / plan.num_states for draw in draws], dtype=torch.float64)
        t = times_from_uniform(u, plan.time_sampling, plan.time_shift).float().to(x0.device)
        state = path.add_noise(x0, _stack_noise(draws, x0.device), t)
        targets["state"][:, number], targets["t"][:, number] = state, t
        targets["target"][:, number] = predict(state, t, condition)
        yield targets


@torch.no_grad()
def _trajectory_targets(
    plan: TargetPlan,
    path: NoisePath,
    predict: Predict,
    items: Sequence[int],
    condition: Condition,
    x0: Tensor | None,
    targets: dict[str, Tensor],
) -> Iterator[dict[str, Tensor]]:
    """From noise the teacher goes on and on; from an image every segment begins anew, with that much noise in the
    image."""
    device = targets["t"].device
    kept_steps = np.array([plan.kept_steps(int(item)) for item in items])
    x, number = _stack_noise([plan.draw(int(item), 0) for item in items], device), 0
    for segment_index, times in enumerate(plan.segments):
        if x0 is not None and segment_index > 0:
            noise = _stack_noise([plan.draw(int(item), segment_index) for item in items], device)
            x = path.add_noise(x0, noise, torch.full((len(items),), times[0], device=device))
        visited: list[tuple[Tensor, Tensor]] = []
        for step in solve(path, predict, x, times, condition):
            rows, slots = (torch.from_numpy(places).to(device) for places in np.nonzero(kept_steps == number))
            targets["state"][rows, slots] = step.x[rows]
            targets["t"][rows, slots] = step.t[rows]
            targets["target"][rows, slots] = step.model_output[rows].float()
            visited.append((rows, slots))
            x, number = step.end, number + 1
            if plan.objective == "trajectory" and len(visited) == len(times) - 1:
                rows, slots = (torch.cat(places) for places in zip(*visited, strict=True))
                t = targets["t"][rows, slots]
                end = torch.full_like(t, times[-1])
                targets["target"][rows, slots] = path.output_leading_to(targets["state"][rows, slots], t, x[rows], end)
            yield targets


def _target_folder(path: str | FilePath) -> RowFolder:
    return RowFolder(path, "lessons", FORMAT_VERSION)


def find_missing(num_items: int, folder: str | FilePath, fingerprint: Mapping[str, JSON]) -> list[int]:
    """The items below `num_items` that have no teacher targets yet; for one rank to find out, and to tell the others.

    What is there is read through. Damaged shards are removed, so that their items are among the missing.
    """
    row_folder = _target_folder(folder)
    missing, damaged = row_folder.find_missing(map(str, range(num_items)), fingerprint)
    row_folder.remove_damaged(damaged)
    return [int(item) for item in missing]


def build(
    plan: TargetPlan,
    folder: str | FilePath,
    items: Sequence[int],
    *,
    path: NoisePath,
    predict: Predict,
    condition: Callable[[Sequence[int]], Condition],
    x0: Callable[[Sequence[int]], Tensor] | None = None,
    prompt: Callable[[int], str],
    fingerprint: Mapping[str, JSON],
    device: torch.device,
    part: tuple[int, int] = (0, 1),
    encode_size: int = 8,
    shard_size: int = 64,
    agree: Callable[[str], str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Make the teacher targets of this rank's share of `items`: what `find_missing` found, the same list on all ranks.

    `condition` and `x0` give what the teacher sees of items, on `device`; `prompt` names one in a message. The teacher
    always gets `encode_size` items, the last ones repeated. `fingerprint` holds `plan.as_json()` under "plan".

    With `agree` ranks go in step, each as often to the teacher as the others, as a sharded one needs: it is given this
    rank's problem (or nothing) and returns any rank's. `on_progress(done, total)` counts this rank's items and is
    called after every forward. `stop` is asked after every answer, where ranks do not go in step; how many items were
    kept until then is returned.
    """
    if fingerprint.get("plan") != plan.as_json():
        raise ValueError('a fingerprint holds the plan it was made for, under "plan"')
    if encode_size < 1 or shard_size < 1:
        raise ValueError(f"shards of {shard_size} and batches of {encode_size} items; expected at least 1")
    if isinstance(path, DDPMPath) and plan.follows_trajectory and plan.num_teacher_calls > path.num_timesteps:
        raise InputError(
            f"--teacher_steps {plan.teacher_steps}", f"at most the {path.num_timesteps} of its table", "use fewer"
        )
    rank_items = [items[number] for number in rank_range(len(items), part[1], part[0])]
    # The largest share, where all make as many forwards.
    num_rows = -(-len(items) // part[1]) if agree else len(rank_items)
    row_folder = _target_folder(folder)
    row_folder.ensure_manifest(fingerprint)
    # Trajectories are always kept: following one again at every step would cost too much.
    alternative = "" if plan.follows_trajectory else ", or keep none (--no_teacher_cache)"
    planned = PlannedRows(
        num_rows=len(items),
        name=f"the teacher targets of {len(items)} items",
        action=f"keep fewer (--teacher_states, --trajectories, --max_images){alternative}",
        log_size=part[0] == 0,
    )
    writer = RowCacheWriter(row_folder, shard_size, planned, _FLUSH_INTERVAL_S)
    report_progress = on_progress or (lambda done, total: None)
    done = 0
    report_progress(0, len(rank_items))
    problem: OptionalError = None
    for start in range(0, num_rows, encode_size):
        batch = rank_items[start : start + encode_size]
        first = batch or items[:1]
        padded = [*first, *[first[-1]] * (encode_size - len(first))]
        inputs: list[tuple[Condition, Tensor | None]] = []
        problem = problem or _catch_error(
            lambda: inputs.append((condition(padded), x0(padded) if x0 else None))  # noqa: B023
        )
        _raise_any_error(problem, agree)
        is_stopped = False
        seen, images = inputs[0]
        for rows in compute_targets(plan, path, predict, padded, seen, device=device, x0=images):  # noqa: B007
            fault_point("lessons.answer")
            report_progress(done, len(rank_items))
            if is_stopped := stop():
                break
        if is_stopped:  # what was computed before this batch is written
            break
        problem = _catch_error(lambda: _add_rows(writer, plan, batch, rows, prompt))  # noqa: B023
        done += len(batch)
        report_progress(done, len(rank_items))
    _raise_any_error(problem or _catch_error(writer.flush), agree)
    return done


def _catch_error(action: Callable[[], None]) -> OptionalError:
    """What went wrong, to be told when all are listening."""
    try:
        action()
    except (HalationError, OSError) as error:
        return error
    return None


def _raise_any_error(problem: OptionalError, agree: Callable[[str], str] | None) -> None:
    """Raise this rank's problem, or where ranks go in step any rank's: one that went on alone would wait for ever."""
    message = agree("" if problem is None else str(problem) or type(problem).__name__) if agree is not None else ""
    if problem is not None:
        raise problem
    if message:
        raise HalationError(message)


def _add_rows(
    writer: RowCacheWriter,
    plan: TargetPlan,
    items: Sequence[int],
    rows: Mapping[str, Tensor],
    prompt: Callable[[int], str],
) -> None:
    """Write the first rows, one for each of `items`, where all numbers are finite; the rows after them only filled a
    batch up."""
    if not items:
        return
    dtype = torch.float32 if plan.exact else torch.float16
    narrow = {
        "state": rows["state"][: len(items)].to(dtype),
        "t": rows["t"][: len(items)],
        "target": rows["target"][: len(items)].to(dtype),
    }
    is_finite = torch.stack([value.flatten(1).isfinite().all(1) for value in narrow.values()]).all(0)
    for item, good in zip(items, is_finite.tolist(), strict=True):
        if not good:
            raise InputError(
                f"the teacher answers {prompt(item)[:80]!r} with numbers that are not finite, or too large for {dtype}",
                "finite states and answers",
                "use --teacher_dtype bf16 or fp32, or a lower --teacher_guidance",
            )
    writer.add([str(item) for item in items], narrow)


def open_targets(folder: str | FilePath, fingerprint: Mapping[str, JSON], verify: bool = True) -> TeacherTargets:
    """Map what was built; refused if it was made for something else or a shard is damaged.

    `verify` reads everything once to compare the SHA-256s, which `find_missing` has done too; sizes are compared
    always.
    """
    return TeacherTargets(_target_folder(folder).open(fingerprint, verify))


class TeacherTargets:
    """Teacher targets by item and number; may be read from several threads."""

    def __init__(self, rows: CachedRows) -> None:
        if not len(rows):
            raise InputError(f"no teacher targets in {rows.folder}", "those of one item at least", "build them first")
        self._rows = rows
        self.num_states: int = rows.shapes["t"][0]
        """How many an item has."""

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, items: Sequence[int] | np.ndarray, state_indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """State, time and target of teacher target `which[k]` of item `items[k]`: on the CPU, states and targets as
        they were kept."""
        rows = self._rows.read([str(int(item)) for item in items], entry_indices=list(state_indices))
        return rows["state"], rows["t"], rows["target"]
