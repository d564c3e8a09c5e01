"""From a prompt file to the rows of the ledger: planned once, recognised on resume, and only ever added to."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from halation.errors import InputError
from halation.generation.image_requests import ImageRequest, RenamedId, RequestDefaults, RequestIterator, iter_requests
from halation.generation.ledger import Ledger
from halation.prompt_files import PromptFile
from halation.runs import run_folder as runs

log = logging.getLogger(__name__)
RENAMED_FILE = "renamed_ids.jsonl"
NUM_SHOWN = 5


def plan(
    ledger: Ledger,
    prompts: PromptFile,
    *,
    limit: int,
    defaults: RequestDefaults,
    has_done_images: bool,
    folder: Path,
    accept_changes: bool = False,
) -> None:
    """Make the ledger hold exactly the first `limit` rows of the file (all for 0).

    A file and settings that the ledger knows are not read again. Where images were drawn (`has_done_images`), the rows they belong
    to must be what they were; others may change, and more may stand behind them. With `accept_changes`, other settings hold for what
    is not drawn yet; what is drawn stays, and its prompts must be what they were all the same.
    """
    facts = {"prompts_sha256": prompts.sha256, "limit": limit, "defaults": asdict(defaults)}
    if ledger.read_fact("plan") == facts:
        return
    if ledger.num_planned and not has_done_images:
        ledger.delete_plan()
    request_iterator = iter_requests(prompts.rows(), defaults, prompts.name)
    rows = _take_first(request_iterator, limit, prompts.name)
    changed: list[ImageRequest] = []
    if ledger.num_planned:
        changed, used_names = _compare_with_plan(ledger, rows, prompts.name, accept_changes)
        changed = list(_check_names_unused(used_names, changed))
        rows = _check_names_unused(used_names, rows)
    renamed: list[RenamedId] = []
    ledger.add_plan(_collect_renamed(rows, request_iterator, renamed), {"plan": facts}, changed)
    _write_renamed(folder, renamed, request_iterator)


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
    ledger: Ledger, rows: Iterator[ImageRequest], source: str, accept_changes: bool
) -> tuple[list[ImageRequest], frozenset[str]]:
    """The planned rows that are asked for otherwise now, and the names of images drawn under settings that hold no more.

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
                f"fewer prompts than before: the folder holds a plan of {ledger.num_planned}, {source} and --num_samples now give fewer",
                "the same prompts as before, or more behind them",
                "use the old list, or another --output_dir",
            )
        if request == planned_row.request:
            continue
        has_same_prompt = (request.spec.id, request.spec.prompt) == (
            planned_row.request.spec.id,
            planned_row.request.spec.prompt,
        )
        if planned_row.state != "done":
            changed.append(request)
        elif accept_changes and has_same_prompt:
            used_names.add(planned_row.request.name.lower())
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
                f"row {request.spec.index + 1} would be called {request.name} now, as an image that another row has drawn",
                "seeds that leave every image its own name",
                "use another --seed_start or another --output_dir",
            )
        yield request


def _collect_renamed(
    rows: Iterator[ImageRequest], request_iterator: RequestIterator, renamed: list[RenamedId]
) -> Iterator[ImageRequest]:
    for request in rows:
        yield request
        renamed += request_iterator.renamed_ids
        request_iterator.renamed_ids.clear()


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
