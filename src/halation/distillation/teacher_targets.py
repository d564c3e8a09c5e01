"""Teacher targets, computed once on all ranks and cached: states, times, predictions.

An item is an image, or a trajectory of one of the prompts. Each item has a few teacher targets; with them, training
needs no teacher.
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
"""First random stream of an item; the streams before it are used in training, by position."""

Condition = dict[str, Tensor]
Predict = Callable[[Tensor, Tensor, Condition], Tensor]
"""The teacher: takes states, times (one per row) and conditions, returns guided predictions in float32."""
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
"""A killed build loses at most this much work and its current batch: a large teacher takes minutes per batch."""
OptionalError = HalationError | OSError | None


@dataclass(frozen=True, kw_only=True)
class TargetPlan:
    """The settings that decide the teacher targets of an item."""

    objective: str
    """`velocity`: the teacher's prediction at a state. `trajectory`: the prediction that leads from the state to the
    point of the teacher's trajectory at the end of the segment."""
    has_images: bool
    """True if items are noised images, False if they are prompts that the teacher samples from noise."""
    times: tuple[float, ...]
    """From 1 to 0: the ends of the segments for `trajectory`, the teacher's times for `velocity`."""
    teacher_steps: int
    """Steps of the teacher from 1 to 0."""
    num_states: int
    """Maximum number of teacher targets per item: a trajectory has no more states than steps."""
    sample_shape: tuple[int, ...]
    seed: int
    time_sampling: TimeDistribution = "uniform"
    time_shift: float = 1.0
    """Times of `velocity` on images."""
    caption_dropout: float = 0.0
    """Share of items that both teacher and student get without their caption."""
    exact: bool = False
    """Store float32 instead of half precision."""

    def __post_init__(self) -> None:
        if self.objective not in ("velocity", "trajectory"):
            raise ValueError(f"teacher targets are for velocity or trajectory, not {self.objective!r}")
        if self.num_states < 1 or self.teacher_steps < 1:
            raise ValueError(f"{self.num_states} states of {self.teacher_steps} steps; expected at least one")
        num_segments = len(self.times) - 1
        if self.objective == "trajectory" and self.num_states < num_segments:
            raise InputError(
                f"--teacher_states {self.num_states} with --student_steps {num_segments}",
                "at least one state for each of the student's steps",
                f"use --teacher_states {2 * num_segments}",
            )

    @property
    def follows_trajectory(self) -> bool:
        """True if the teacher runs step by step; on noised images it only predicts."""
        return self.objective == "trajectory" or not self.has_images

    @cached_property
    def segments(self) -> list[list[float]]:
        return segments(self.times, self.teacher_steps)

    @property
    def num_teacher_calls(self) -> int:
        """Number of calls of the teacher for a batch of items."""
        return sum(len(piece) - 1 for piece in self.segments) if self.follows_trajectory else self.num_states

    def kept_steps(self, item: int) -> list[int]:
        """Indices of the steps of an item's trajectory that become teacher targets."""
        u = self.draw(item, 0, ()).u_time
        if self.objective == "trajectory":
            return select_steps(self.segments, self.num_states, u)
        return stratified_indices(self.num_teacher_calls, self.num_states, u)

    def draw(self, item: int, number: int, shape: Sequence[int] | None = None) -> TrainingDraw:
        """Random draw `number` of an item, independent of the draws by position in training."""
        return training_draw(self.seed, item, self.sample_shape if shape is None else shape, FIRST_STREAM + number)

    def dropout_mask(self, items: Sequence[int]) -> Tensor:
        """Mask of the items without caption.

        It belongs to the plan, not to training, because the teacher's prediction was made with or without the caption.
        """
        return torch.tensor([self.draw(int(item), 0, ()).u_drop < self.caption_dropout for item in items])

    def as_json(self) -> dict[str, JSON]:
        """Everything that decides a teacher target, except teacher, path and items."""
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
    """Return True if small errors of a prediction become large errors of the image.

    This is so at high noise levels if the model predicts the noise.
    """
    return isinstance(path, DDPMPath) and path.prediction_type == "epsilon"


def loss_weights(plan: TargetPlan, path: NoisePath) -> Callable[[Tensor], Tensor] | None:
    """Loss weights of trajectory targets by time, with mean 1; None if all weights are equal.

    If the model predicts noise, a target is weighted by how far its error moves the end of the student's step, which
    is many times farther from pure noise than from little noise. The weight is not squared, as the error of the end
    states would suggest: later steps correct a part of the early errors, and would be learned badly. With velocities
    all steps move the end about equally far, and the weights are equal.
    """
    if plan.objective != "trajectory" or not amplifies_errors(path):
        return None
    ends = torch.tensor(sorted(plan.times))

    def leverage(t: Tensor) -> Tensor:
        following = torch.searchsorted(ends.to(t.device), t - 1e-6) - 1  # the end of the segment that `t` is in
        return path.step_sensitivity(t, ends.to(t.device)[following])

    starts = torch.tensor([piece[0] for piece in plan.segments])
    others = torch.tensor([time for piece in plan.segments for time in piece[1:-1]])
    share = min(1.0, (plan.num_states - len(starts)) / max(1, len(others)))  # share of `others` that become targets
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
    """Compute the teacher targets of these items in float32; yield after each teacher call.

    The yielded dict is complete after the last call. It has `state` and `target` (items, targets, ...), and `t`
    (items, targets). `predict` is called `plan.num_teacher_calls` times with a row for each item, whatever the items.
    """
    if (x0 is not None) != plan.has_images:
        raise ValueError("x0 must be given if, and only if, the plan has images")
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
        # Stratified times: one from each of `num_states` intervals, so that every image is noised both little and
        # much.
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
    """Targets along the teacher's trajectory.

    With prompts, one trajectory from noise runs through all segments. With images, every segment starts from the image
    noised to the start of the segment.
    """
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
    """Return the items below `num_items` without teacher targets. To be called on one rank.

    All existing shards are read. Damaged ones are removed, so that their items are among the missing.
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
    """Compute the teacher targets of this rank's share of `items`; return the number written.

    `items` is the result of `find_missing`, the same list on all ranks. `condition` and `x0` return the teacher's
    inputs for items, on `device`; `prompt` names an item in messages. The teacher always gets `encode_size` items; the
    last one is repeated as padding. `fingerprint` holds `plan.as_json()` under "plan".

    With `agree`, ranks run in lockstep and call the teacher equally often, as a sharded teacher needs. `agree` takes
    this rank's error (or "") and returns any rank's. `on_progress(done, total)` counts this rank's items and is called
    after every forward. `stop` is called after every prediction if ranks do not run in lockstep.
    """
    if fingerprint.get("plan") != plan.as_json():
        raise ValueError('the fingerprint must hold the plan under "plan"')
    if encode_size < 1 or shard_size < 1:
        raise ValueError(f"shards of {shard_size} and batches of {encode_size} items; expected at least 1")
    if isinstance(path, DDPMPath) and plan.follows_trajectory and plan.num_teacher_calls > path.num_timesteps:
        raise InputError(
            f"--teacher_steps {plan.teacher_steps}", f"at most {path.num_timesteps}, its timesteps", "use fewer"
        )
    rank_items = [items[number] for number in rank_range(len(items), part[1], part[0])]
    # In lockstep all ranks run as many forwards as the largest share needs.
    num_rows = -(-len(items) // part[1]) if agree else len(rank_items)
    row_folder = _target_folder(folder)
    row_folder.ensure_manifest(fingerprint)
    # Trajectories are always cached: computing one again at every step would cost too much.
    alternative = "" if plan.follows_trajectory else ", or disable the cache (--no_teacher_cache)"
    planned = PlannedRows(
        num_rows=len(items),
        name=f"the teacher targets of {len(items)} items",
        action=f"cache fewer (--teacher_states, --trajectories, --max_images){alternative}",
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
        if is_stopped:  # the batches before this one are written
            break
        problem = _catch_error(lambda: _add_rows(writer, plan, batch, rows, prompt))  # noqa: B023
        done += len(batch)
        report_progress(done, len(rank_items))
    _raise_any_error(problem or _catch_error(writer.flush), agree)
    return done


def _catch_error(action: Callable[[], None]) -> OptionalError:
    """Return the error of an action, to be raised when all ranks can agree on it."""
    try:
        action()
    except (HalationError, OSError) as error:
        return error
    return None


def _raise_any_error(problem: OptionalError, agree: Callable[[str], str] | None) -> None:
    """Raise this rank's error, or in lockstep any rank's: a rank continuing alone would hang."""
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
    """Write one row for each of `items`, without padding rows; raise if a value is not finite."""
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
                f"the teacher's targets for {prompt(item)[:80]!r} are not finite, or too large for {dtype}",
                "finite states and targets",
                "use --teacher_dtype bf16 or fp32, or a lower --teacher_guidance",
            )
    writer.add([str(item) for item in items], narrow)


def open_targets(folder: str | FilePath, fingerprint: Mapping[str, JSON], verify: bool = True) -> TeacherTargets:
    """Map the cached teacher targets; raise if the fingerprint differs or a shard is damaged.

    `verify` reads everything once to compare the SHA-256 sums, as `find_missing` does too. Sizes are always compared.
    """
    return TeacherTargets(_target_folder(folder).open(fingerprint, verify))


class TeacherTargets:
    """Teacher targets by item and index; safe to read from several threads."""

    def __init__(self, rows: CachedRows) -> None:
        if not len(rows):
            raise InputError(f"no teacher targets in {rows.folder}", "those of at least one item", "build them first")
        self._rows = rows
        self.num_states: int = rows.shapes["t"][0]
        """Number of targets per item."""

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, items: Sequence[int] | np.ndarray, state_indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Read state, time and target of teacher target `state_indices[k]` of item `items[k]`.

        Tensors are on the CPU; states and targets have the dtype of the cache.
        """
        rows = self._rows.read([str(int(item)) for item in items], entry_indices=list(state_indices))
        return rows["state"], rows["t"], rows["target"]
