"""Sets up the ledger of a folder: chooses its kind, plans rows from prompts, repairs rows.

Rows are planned once, compared on resume, and rows of done images are never changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import asdict
from pathlib import Path

from halation.errors import InputError, format_count
from halation.generation.image_requests import ImageRequest, RenamedId, RequestDefaults, RequestIterator, iter_requests
from halation.generation.ledger import LEDGER_NAMES, Ledger, LedgerDamage, LedgerKind
from halation.generation.metadata_and_summary import prove_outcome, read_spec, remove_result
from halation.prompt_files import PromptFile, PromptRow
from halation.runs import run_folder as runs
from halation.sample_specs import SampleSpec

log = logging.getLogger(__name__)
RENAMED_FILE = "renamed_ids.jsonl"
NUM_SHOWN = 5
KIND_FILE = "ledger.kind"
"""Holds the kind of ledger of a folder. Created first, so that two commands cannot start it with different kinds."""
KIND_TIMEOUT_S = 10.0


def has_ledger(folder: Path, kind: LedgerKind) -> bool:
    return (folder / LEDGER_NAMES[kind]).exists()


@contextlib.contextmanager
def claim_ledger_kind(folder: Path, kind: LedgerKind) -> Iterator[LedgerKind]:
    """Choose the kind of ledger of a folder unless it has one; yield the kind in effect.

    Inside the context, this process holds a shared lock on the kind file. A kind file without a lock and without a
    ledger was left by a killed command and is ignored. A command that ends without a ledger removes its kind file.
    """
    descriptor, decided = _decide_ledger_kind(folder, kind)
    try:
        yield decided
    finally:
        path = folder / KIND_FILE
        with contextlib.suppress(OSError):  # the folder may be gone, which the command reports itself
            is_unused = decided == kind and not has_ledger(folder, kind)
            if is_unused and _try_lock(descriptor, fcntl.LOCK_EX) and runs.is_same_file(path, descriptor):
                path.unlink(missing_ok=True)
        os.close(descriptor)


def _decide_ledger_kind(folder: Path, kind: LedgerKind) -> tuple[int, LedgerKind]:
    """Return the open, locked kind file and the kind."""
    path = folder / KIND_FILE
    other: LedgerKind = "files" if kind == "sqlite" else "sqlite"
    deadline = time.monotonic() + KIND_TIMEOUT_S
    while True:
        descriptor = _open_kind_file(path, kind)
        if _try_lock(descriptor, fcntl.LOCK_EX):  # no other command is using it
            _write_kind(descriptor, other if has_ledger(folder, other) else kind)
        is_locked = _try_lock(descriptor, fcntl.LOCK_SH)
        found = os.pread(descriptor, 16, 0)
        if is_locked is None and not found:  # neither locks nor hard links: the last writer wins
            _write_kind(descriptor, kind)
        if is_locked is not False and runs.is_same_file(path, descriptor):
            for decided in (kind, other):
                if found == decided.encode():
                    return descriptor, decided
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise InputError(
                f"{path} holds {found!r}", "sqlite or files", "remove that file if no command is running in the folder"
            )
        time.sleep(0.02)


def _open_kind_file(path: Path, kind: LedgerKind) -> int:
    """Open the kind file, creating it with our kind as content.

    The content is complete from the start, even on a file system without locks.
    """
    if not path.exists():
        with contextlib.suppress(OSError, InputError):  # no hard links, or another command's file appeared and vanished
            runs.create_once(path, kind.encode())
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    except IsADirectoryError:
        raise InputError(f"{path} is a folder", "a file of Halation, or none", "choose another --output_dir") from None


def _write_kind(descriptor: int, kind: LedgerKind) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, kind.encode(), 0)


def _try_lock(descriptor: int, operation: int) -> bool | None:
    """Return True if the lock was acquired, False if it is held, None without lock support."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def plan(
    ledger: Ledger,
    prompts: PromptFile,
    *,
    limit: int,
    defaults: RequestDefaults,
    has_done_images: bool,
    folder: Path,
    accept_changes: bool = False,
    unrecorded: Sequence[ImageRequest] = (),
    check: Callable[[PromptRow, SampleSpec], None] | None = None,
) -> None:
    """Make the ledger hold exactly the first `limit` rows of the prompt file (0: all).

    If the file and the settings equal those in the ledger, the file is not read again. If images are done
    (`has_done_images`), their rows must be unchanged; other rows may change, and more may follow. With
    `accept_changes`, new settings apply to the images that are not done; done images stay, and their prompts must
    be unchanged. `check` is called for rows with settings of their own. `unrecorded` rows have an image in the
    folder that a killed call did not record: they count as done, and the image is removed if its row changes.
    """
    facts = {"prompts_sha256": prompts.sha256, "limit": limit, "defaults": asdict(defaults)}
    if ledger.read_fact("plan") == facts:
        return
    request_iterator = iter_requests(prompts.rows(), defaults, prompts.name, check)
    rows = _take_first(request_iterator, limit, prompts.name)
    changed: list[ImageRequest] = []
    if ledger.num_planned and has_done_images:
        drawn = {request.spec.index for request in unrecorded}
        changed, used_names = _compare_with_plan(ledger, rows, prompts.name, accept_changes, drawn)
        changed = list(_check_names_unused(used_names, changed))
        rows = _check_names_unused(used_names, rows)

    def remove_superseded() -> None:
        indices = {request.spec.index for request in changed}
        for request in unrecorded:
            if request.spec.index in indices:
                remove_result(folder, request.name, request.spec.num_frames)

    renamed: list[RenamedId] = []

    def collect_renamed() -> Iterator[ImageRequest]:
        for request in rows:
            yield request
            renamed.extend(request_iterator.renamed_ids)
            request_iterator.renamed_ids.clear()

    ledger.add_plan(
        collect_renamed(),
        {"plan": facts},
        changed,
        replaces=not has_done_images,
        before_commit=remove_superseded,
    )
    _write_renamed(folder, renamed, request_iterator)


def repair(ledger: Ledger, prompts: PromptFile, folder: Path) -> None:
    """Restore damaged rows: planned values from the prompt list, outcomes from the images.

    Raises with the row number if the prompt list is not the planned one.
    """
    damage = ledger.find_damage()
    if not damage:
        return
    if damage.planned:
        ledger.restore_plan(_replan(ledger, prompts, folder, damage))
    outcomes, opened = [], []
    for request in ledger.requests(damage.outcomes):
        outcome = prove_outcome(folder, request)
        if outcome is None:
            opened.append(request.spec.index)
        else:
            outcomes.append(outcome)
    ledger.restore_outcomes(outcomes, opened)
    rows = sorted({*damage.planned, *damage.outcomes})
    log.warning(
        "%s: %s damaged (the first is row %d); restored from %s and the images, %d to generate again",
        ledger.path, format_count(len(rows), "row"), rows[0] + 1, prompts.name, len(opened),
    )  # fmt: skip
    remaining = ledger.find_damage()
    if remaining:
        raise _damaged_row_error(ledger, (*remaining.planned, *remaining.outcomes)[0], prompts.name)


def _replan(ledger: Ledger, prompts: PromptFile, folder: Path, damage: LedgerDamage) -> list[ImageRequest]:
    """Return the damaged rows as they were planned."""
    indices = damage.planned
    facts = ledger.read_fact("plan")
    try:
        if facts["prompts_sha256"] != prompts.sha256:
            raise _damaged_row_error(ledger, indices[0], prompts.name)
        defaults, limit = RequestDefaults(**facts["defaults"]), int(facts["limit"])
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged_row_error(ledger, indices[0], prompts.name) from error
    wanted = set(indices)
    rows = itertools.islice(iter_requests(prompts.rows(), defaults, prompts.name), limit or None)
    found = [request for request in rows if request.spec.index in wanted]
    if len(found) != len(wanted):
        raise _damaged_row_error(ledger, indices[0], prompts.name)
    return [_restore_request(ledger, folder, request, damage, prompts.name) for request in found]


def _restore_request(
    ledger: Ledger, folder: Path, listed: ImageRequest, damage: LedgerDamage, source: str
) -> ImageRequest:
    """Return the request of a row from the prompt list, or from its image.

    The image differs from the list if it was generated with earlier settings.
    """
    index, has_good_outcome = listed.spec.index, listed.spec.index not in damage.outcomes
    if has_good_outcome and not ledger.is_done(index):
        return listed
    for stem in dict.fromkeys((listed.name, ledger.read_damaged_name(index))):
        with contextlib.suppress(OSError, TypeError, ValueError):
            spec = SampleSpec(**read_spec(folder / f"{stem}.png") or {})
            if (spec.index, spec.id, spec.prompt) == (index, listed.spec.id, listed.spec.prompt):
                return ImageRequest(spec=spec, name=stem)
    if has_good_outcome and listed.spec.num_frames == 1 and (folder / f"{listed.name}.png").exists():
        raise _damaged_row_error(ledger, index, f"neither its image nor {source}", "proves it")
    return listed


def _damaged_row_error(
    ledger: Ledger, index: int, source: str, problem: str = "is not the list it was planned from"
) -> InputError:
    return InputError(
        f"{ledger.path} is damaged: row {index + 1} is not as written, and {source} {problem}",
        "an undamaged ledger, or the prompt list it was planned from, to restore it",
        "give that list, restore the ledger from a copy, or start in a new --output_dir",
    )


def _take_first(request_iterator: Iterator[ImageRequest], limit: int, source: str) -> Iterator[ImageRequest]:
    num_taken = 0
    for request in itertools.islice(request_iterator, limit or None):
        num_taken += 1
        yield request
    if num_taken < limit:
        raise InputError(
            f"--num_samples {limit}, but {source} has {format_count(num_taken, 'prompt')}",
            "at most as many samples as prompts",
            "omit --num_samples to use all prompts",
        )


def _compare_with_plan(
    ledger: Ledger, rows: Iterator[ImageRequest], source: str, accept_changes: bool, unrecorded: Set[int]
) -> tuple[list[ImageRequest], frozenset[str]]:
    """Return the changed rows, and the names of images generated with earlier settings.

    Rows with images must equal the rows of the file exactly; with `accept_changes`, only their prompts must.
    """
    changed: list[ImageRequest] = []
    used_names: set[str] = set()
    lines: list[str] = []
    num_different = 0
    for planned_row in ledger.rows():
        request = next(rows, None)
        if request is None:
            raise InputError(
                f"fewer prompts than before: the folder holds a plan of {ledger.num_planned}, "
                f"{source} and --num_samples now give fewer",
                "the same prompts as before, with new ones only at the end",
                "use the old list, or another --output_dir",
            )
        if request == planned_row.request:
            continue
        has_same_prompt = (request.spec.id, request.spec.prompt) == (
            planned_row.request.spec.id,
            planned_row.request.spec.prompt,
        )
        if planned_row.state != "done" and request.spec.index not in unrecorded:
            changed.append(request)
        elif accept_changes and has_same_prompt:
            if planned_row.state == "done":
                used_names.add(planned_row.request.name.lower())
            else:
                changed.append(request)
        else:
            num_different += 1
            before, after = asdict(planned_row.request.spec), asdict(request.spec)
            if num_different <= NUM_SHOWN:
                lines += [f"row {request.spec.index + 1}: {line.strip()}" for line in runs.diff_settings(before, after)]
    if lines:
        shown = "\n".join(f"  {line}" for line in lines)
        raise InputError(
            f"{format_count(num_different, 'prompt')} changed since the images in this folder were generated:\n{shown}",
            "the same prompts as before, with new ones only at the end",
            "use the old list, or another --output_dir",
        )
    return changed, frozenset(used_names)


def _check_names_unused(used_names: frozenset[str], rows: Iterable[ImageRequest]) -> Iterator[ImageRequest]:
    """Yield the rows; raise if one would overwrite another row's image from earlier settings."""
    for request in rows:
        if request.name.lower() in used_names:
            raise InputError(
                f"row {request.spec.index + 1} would now be named {request.name}, the name of another row's image",
                "seeds that give every image a unique name",
                "use another --seed_start or another --output_dir",
            )
        yield request


def _write_renamed(folder: Path, renamed: list[RenamedId], request_iterator: RequestIterator) -> None:
    """Warn about ids that cannot be file names, and list all of them in a file."""
    if request_iterator.num_shared_ids:
        log.warning(
            "%s in more than one row; the images differ by seed", format_count(request_iterator.num_shared_ids, "id")
        )
    if not renamed:
        return
    path = folder / RENAMED_FILE
    old = path.read_bytes() if path.exists() else b""
    runs.write_atomic(
        path, old + b"".join((json.dumps(asdict(row), ensure_ascii=True) + "\n").encode() for row in renamed)
    )
    shown = "; ".join(f"{row.id[:60]!r} -> {row.name}" for row in renamed[:NUM_SHOWN])
    log.warning("%s mapped to valid file names (see %s): %s", format_count(len(renamed), "id"), RENAMED_FILE, shown)
