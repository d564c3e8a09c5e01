"""What a teacher says, asked once on all ranks and kept: states, times and the answers a student should give there.

An item is a picture, or for a list of prompts a number that has one of them. Each has a few lessons; whoever trains then needs no
teacher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath

import numpy as np
import torch
from torch import Tensor

from halation.data.dataset import JSON
from halation.data.row_cache import CachedRows, RowFolder, Writer, row_bytes
from halation.distillation.target_plan import Condition, Plan, Predict, is_steep, taught, weights
from halation.errors import HalationError, InputError
from halation.faults import fault_point
from halation.flow.paths import Discrete, Path
from halation.plan import share

__all__ = ["Lessons", "Plan", "build", "is_steep", "missing", "open", "taught", "weights"]

FORMAT = 1
_PATIENCE_S = 60.0
"""What a killed build loses at most, besides the batch it was at: a large teacher takes minutes for a batch."""

Problem = HalationError | OSError | None


class _Stopped(Exception):
    """Somebody asked to stop, between two answers of the teacher."""


def _folder(path: str | FilePath) -> RowFolder:
    return RowFolder(path, "lessons", FORMAT)


def missing(num_items: int, folder: str | FilePath, fingerprint: Mapping[str, JSON]) -> list[int]:
    """The items below `num_items` that have no lessons yet; for one rank to find out, and to tell the others.

    What is there is read through. Damaged shards are removed, so that their items are among the missing.
    """
    place = _folder(folder)
    items = {str(item) for item in range(num_items)}
    if not place.is_claimed():
        return list(range(num_items))
    place.refuse_others(fingerprint)
    there, damaged = place.there(items)
    place.remove_damaged(damaged)
    return sorted(int(item) for item in items - there)


def build(
    plan: Plan,
    folder: str | FilePath,
    items: Sequence[int],
    *,
    path: Path,
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
    """Make the lessons of this rank's share of `items`, which are what is `missing`, the same list on all ranks.

    `condition` and `x0` give what the teacher sees of items, on `device`; `prompt` names one in a message. The teacher always gets
    `encode_size` items, the last ones filled up by repetition. `fingerprint` holds `plan.as_json()` under "plan".

    With `agree` ranks go in step, each as often to the teacher as the others, as a sharded one needs: it is given this rank's problem
    (or nothing) and returns any rank's. `on_progress(done, total)` counts this rank's items and is called after every forward.
    `stop` is asked after every answer, where ranks do not go in step; how many items were kept until then is returned.
    """
    if fingerprint.get("plan") != plan.as_json():
        raise ValueError('a fingerprint holds the plan it was made for, under "plan"')
    if encode_size < 1 or shard_size < 1:
        raise ValueError(f"shards of {shard_size} and batches of {encode_size} items; expected at least 1")
    if isinstance(path, Discrete) and plan.is_way and plan.num_steps > path.num_timesteps:
        raise InputError(
            f"--teacher_steps {plan.teacher_steps}", f"at most the {path.num_timesteps} of its table", "use fewer"
        )
    mine = [items[number] for number in share(len(items), part[1], part[0])]
    num_rows = -(-len(items) // part[1]) if agree else len(mine)  # the largest share, where all make as many forwards
    keeper = _Keeper(plan, _folder(folder), fingerprint, len(items), shard_size, prompt, tells=part[0] == 0)
    tell = on_progress or (lambda done, total: None)
    done = 0

    def heard(x: Tensor, t: Tensor, conditions: Condition) -> Tensor:
        answer = predict(x, t, conditions)
        fault_point("lessons.answer")
        tell(done, len(mine))
        if stop():
            raise _Stopped
        return answer

    tell(0, len(mine))
    problem: Problem = None
    with contextlib.suppress(_Stopped):  # what was kept before that is written
        for start in range(0, num_rows, encode_size):
            batch = mine[start : start + encode_size]
            filled = _filled(batch or items[:1], encode_size)
            inputs: list[tuple[Condition, Tensor | None]] = []
            problem = problem or _tried(lambda: inputs.append((condition(filled), x0(filled) if x0 else None)))  # noqa: B023
            _settle(problem, agree)
            rows = taught(plan, path, heard, filled, inputs[0][0], device=device, x0=inputs[0][1])
            problem = _tried(lambda: keeper.keep(batch, rows))  # noqa: B023
            done += len(batch)
            tell(done, len(mine))
    _settle(problem or _tried(keeper.close), agree)
    return done


def _filled(batch: Sequence[int], size: int) -> list[int]:
    return [*batch, *[batch[-1]] * (size - len(batch))]


def _tried(action: Callable[[], None]) -> Problem:
    """What went wrong, to be told when all are listening."""
    try:
        action()
    except (HalationError, OSError) as error:
        return error
    return None


def _settle(problem: Problem, agree: Callable[[str], str] | None) -> None:
    """Raise this rank's problem, or where ranks go in step any rank's: one that went on alone would wait for ever."""
    word = agree("" if problem is None else str(problem) or type(problem).__name__) if agree is not None else ""
    if problem is not None:
        raise problem
    if word:
        raise HalationError(word)


class _Keeper:
    """Writes lessons that can be learned from; the first batch tells whether there is room for all."""

    def __init__(
        self,
        plan: Plan,
        folder: RowFolder,
        fingerprint: Mapping[str, JSON],
        num_items: int,
        shard_size: int,
        prompt: Callable[[int], str],
        *,
        tells: bool,
    ) -> None:
        folder.claim(fingerprint)
        self._dtype = torch.float32 if plan.exact else torch.float16
        self._folder = folder
        self._free = folder.free_bytes
        self._num_items = num_items
        self._prompt = prompt
        self._tells = tells
        self._begun = False
        # Ways are kept always: nobody follows one again at every step.
        self._instead = "" if plan.is_way else ", or keep none (--no_teacher_cache)"
        self._writer = Writer(folder, shard_size, _PATIENCE_S)

    def keep(self, items: Sequence[int], rows: Mapping[str, Tensor]) -> None:
        """Those of the first rows; what follows them only filled a batch up."""
        if not items:
            return
        narrow = {
            "state": rows["state"][: len(items)].to(self._dtype),
            "t": rows["t"][: len(items)],
            "target": rows["target"][: len(items)].to(self._dtype),
        }
        if not self._begun:
            self._check_room(row_bytes(narrow))
            self._begun = True
        for item, good in zip(items, _finite(narrow), strict=True):
            if not good:
                raise InputError(
                    f"the teacher answers {self._prompt(item)[:80]!r} with numbers that are not finite, or too large for {self._dtype}",
                    "finite states and answers",
                    "use --teacher_dtype bf16 or fp32, or a lower --teacher_guidance",
                )
        self._writer.add([str(item) for item in items], narrow)

    def close(self) -> None:
        self._writer.flush()

    def _check_room(self, num_bytes: int) -> None:
        self._folder.check_room(
            self._num_items,
            num_bytes,
            self._free,
            name=f"the lessons of {self._num_items} items",
            action=f"keep fewer (--teacher_states, --trajectories, --max_pictures){self._instead}",
            tells=self._tells,
        )


def _finite(rows: Mapping[str, Tensor]) -> list[bool]:
    good = torch.stack([value.flatten(1).isfinite().all(1) for value in rows.values()]).all(0)
    return [bool(one) for one in good.tolist()]


def open(folder: str | FilePath, fingerprint: Mapping[str, JSON], verify: bool = True) -> Lessons:
    """Map what was built; refused if it was made for something else or a shard is damaged.

    `verify` reads everything once to compare the SHA-256s, which `missing` has done too; sizes are compared always.
    """
    place = _folder(folder)
    place.refuse_others(fingerprint)
    return Lessons(place.open(verify))


class Lessons:
    """Lessons by item and number; may be read from several threads."""

    def __init__(self, rows: CachedRows) -> None:
        if not len(rows):
            raise InputError(f"no lessons in {rows.folder}", "those of one item at least", "build them first")
        self._rows = rows
        self.num_states: int = rows.shapes["t"][0]
        """How many an item has."""

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, items: Sequence[int] | np.ndarray, which: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """State, time and target of lesson `which[k]` of item `items[k]`: on the CPU, states and targets as they were kept."""
        rows = self._rows.read([str(int(item)) for item in items], within=list(which))
        return rows["state"], rows["t"], rows["target"]
