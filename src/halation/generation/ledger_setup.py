"""Sets up the ledger of a folder: its kind, rows planned from prompts, repaired rows.

Rows are planned once, recognised on resume, and only ever added to.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict
from pathlib import Path

from halation.errors import InputError
from halation.generation.image_requests import ImageRequest, RenamedId, RequestDefaults, RequestIterator, iter_requests
from halation.generation.ledger import LEDGER_NAMES, Ledger, LedgerDamage, LedgerKind
from halation.generation.metadata_and_summary import prove_outcome, read_spec, remove_result
from halation.prompt_files import PromptFile
from halation.runs import run_folder as runs
from halation.sample_specs import SampleSpec

log = logging.getLogger(__name__)
RENAMED_FILE = "renamed_ids.jsonl"
NUM_SHOWN = 5
KIND_FILE = "ledger.kind"
"""Which kind of ledger a folder has: created first, so that commands of two kinds cannot begin it together."""
KIND_TIMEOUT_S = 10.0


def has_ledger(folder: Path, kind: LedgerKind) -> bool:
    return (folder / LEDGER_NAMES[kind]).exists()


@contextlib.contextmanager
def claim_ledger_kind(folder: Path, kind: LedgerKind) -> Iterator[LedgerKind]:
    """Decide for one kind of ledger, unless that is decided; yields the kind that holds.

    While entered, this process holds a shared lock of the file with the decision. A decision without a lock and without
    a ledger was left by a command that was killed, and binds no other; a command that ends without a ledger removes it.
    """
    descriptor, decided = _decide_ledger_kind(folder, kind)
    try:
        yield decided
    finally:
        path = folder / KIND_FILE
        with contextlib.suppress(OSError):  # the folder may be gone, which the command says in its own words
            is_unused = decided == kind and not has_ledger(folder, kind)
            if is_unused and _try_lock(descriptor, fcntl.LOCK_EX) and runs.is_same_file(path, descriptor):
                path.unlink(missing_ok=True)
        os.close(descriptor)


def _decide_ledger_kind(folder: Path, kind: LedgerKind) -> tuple[int, LedgerKind]:
    """The open file with the decision, locked, and the decision."""
    path = folder / KIND_FILE
    other: LedgerKind = "files" if kind == "sqlite" else "sqlite"
    deadline = time.monotonic() + KIND_TIMEOUT_S
    while True:
        descriptor = _open_kind_file(path, kind)
        if _try_lock(descriptor, fcntl.LOCK_EX):  # no other command is using it
            _write_kind(descriptor, other if has_ledger(folder, other) else kind)
        is_locked = _try_lock(descriptor, fcntl.LOCK_SH)
        found = os.pread(descriptor, 16, 0)
        if is_locked is None and not found:  # neither locks nor hard links: the last one to write decides
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
    """The file with the decision; a new one holds ours from the start, also where the file system has no locks."""
    if not path.exists():
        with contextlib.suppress(OSError, InputError):  # no hard links, or another command's file came and went
            runs.create_once(path, kind.encode())
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    except IsADirectoryError:
        raise InputError(f"{path} is a folder", "a file of Halation, or none", "choose another --output_dir") from None


def _write_kind(descriptor: int, kind: LedgerKind) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, kind.encode(), 0)


def _try_lock(descriptor: int, operation: int) -> bool | None:
    """Whether the lock could be taken; None on a file system without locks."""
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
) -> None:
    """Make the ledger hold exactly the first `limit` rows of the file (all for 0).

    A file and settings that the ledger knows are not read again. Where images were drawn (`has_done_images`), their
    rows must be what they were; others may change, and more may follow. With `accept_changes`, other settings hold for
    what is not drawn yet; what is drawn stays, and its prompts must still be what they were. Rows that are `unrecorded`
    have an image in the folder that a killed call did not record: it binds like others, and is removed where its row
    changes.
    """
    facts = {"prompts_sha256": prompts.sha256, "limit": limit, "defaults": asdict(defaults)}
    if ledger.read_fact("plan") == facts:
        return
    request_iterator = iter_requests(prompts.rows(), defaults, prompts.name)
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
    """Restore rows that were damaged on disk: planned values from the prompt list, outcomes from the images.

    Raises, with the row, where the list is not the one that was planned from.
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
        "%s: %d rows were damaged on disk (the first is row %d); restored from %s and the images, %d are drawn again",
        ledger.path, len(rows), rows[0] + 1, prompts.name, len(opened),
    )  # fmt: skip
    remaining = ledger.find_damage()
    if remaining:
        raise _damaged_row_error(ledger, (*remaining.planned, *remaining.outcomes)[0], prompts.name)


def _replan(ledger: Ledger, prompts: PromptFile, folder: Path, damage: LedgerDamage) -> list[ImageRequest]:
    """The damaged rows as they were planned."""
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
    """The request of a row: as the list has it now, or as its image says if that was drawn under earlier settings."""
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
        f"{ledger.path} is damaged: row {index + 1} is not what was written, and {source} {problem}",
        "the ledger as Halation wrote it, or the prompt list of that time, from which it can be restored",
        "give that list, restore the ledger from a copy, or start in a new --output_dir",
    )


def _take_first(request_iterator: Iterator[ImageRequest], limit: int, source: str) -> Iterator[ImageRequest]:
    num_taken = 0
    for request in itertools.islice(request_iterator, limit or None):
        num_taken += 1
        yield request
    if num_taken < limit:
        raise InputError(
            f"--num_samples {limit}, but {source} has {num_taken} prompts",
            "at most as many samples as prompts",
            "leave --num_samples out for all",
        )


def _compare_with_plan(
    ledger: Ledger, rows: Iterator[ImageRequest], source: str, accept_changes: bool, unrecorded: Set[int]
) -> tuple[list[ImageRequest], frozenset[str]]:
    """The planned rows that changed, and the names of images drawn under settings that no longer hold.

    Rows whose images are drawn must be the file's rows, word for word; with `accept_changes`, their prompts must.
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
                "the same prompts as before, or more behind them",
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
            f"{num_different} prompts are not those their images in this folder were drawn from:\n{shown}",
            "the same prompts as before, or more behind them",
            "use the old list, or another --output_dir",
        )
    return changed, frozenset(used_names)


def _check_names_unused(used_names: frozenset[str], rows: Iterable[ImageRequest]) -> Iterator[ImageRequest]:
    """The rows, unless one would write over an image that another row has drawn under earlier settings."""
    for request in rows:
        if request.name.lower() in used_names:
            raise InputError(
                f"row {request.spec.index + 1} would be called {request.name} now, "
                "as an image that another row has drawn",
                "seeds that leave every image its own name",
                "use another --seed_start or another --output_dir",
            )
        yield request


def _write_renamed(folder: Path, renamed: list[RenamedId], request_iterator: RequestIterator) -> None:
    """Say which ids did not become names as they stand, and list all of them in a file."""
    if request_iterator.num_shared_ids:
        log.warning("%d ids stand in more than one row; their images differ by seed", request_iterator.num_shared_ids)
    if not renamed:
        return
    path = folder / RENAMED_FILE
    old = path.read_bytes() if path.exists() else b""
    runs.write_atomic(
        path, old + b"".join((json.dumps(asdict(row), ensure_ascii=True) + "\n").encode() for row in renamed)
    )
    shown = "; ".join(f"{row.id[:60]!r} -> {row.name}" for row in renamed[:NUM_SHOWN])
    log.warning("%d ids cannot be file names as they are and were mapped (%s): %s", len(renamed), RENAMED_FILE, shown)
