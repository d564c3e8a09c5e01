"""From a prompt file to the rows of the ledger: planned once, recognised on resume, and only ever added to."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from halation.errors import InputError
from halation.generation.ledger import Ledger
from halation.generation.requests import Defaults, Renamed, Request, Requests, requests
from halation.prompts import PromptFile
from halation.runs import folder as runs

log = logging.getLogger(__name__)
RENAMED_FILE = "renamed_ids.jsonl"
NUM_SHOWN = 5


def plan(
    ledger: Ledger,
    prompts: PromptFile,
    *,
    limit: int,
    defaults: Defaults,
    bound: bool,
    folder: Path,
    accept: bool = False,
) -> None:
    """Make the ledger hold exactly the first `limit` rows of the file (all for 0).

    A file and settings that the ledger knows are not read again. Where pictures were drawn (`bound`), the rows they belong
    to must be what they were; others may change, and more may stand behind them. With `accept`, other settings hold for what
    is not drawn yet; what is drawn stays, and its prompts must be what they were all the same.
    """
    facts = {"prompts_sha256": prompts.sha256, "limit": limit, "defaults": asdict(defaults)}
    if ledger.fact("plan") == facts:
        return
    if ledger.num_planned and not bound:
        ledger.forget_plan()
    asked = requests(prompts.rows(), defaults, prompts.name)
    rows = _first(asked, limit, prompts.name)
    changed: list[Request] = []
    if ledger.num_planned:
        changed, taken = _compare(ledger, rows, prompts.name, accept)
        changed = list(_apart_from(taken, changed))
        rows = _apart_from(taken, rows)
    renamed: list[Renamed] = []
    ledger.plan(_noting(rows, asked, renamed), {"plan": facts}, changed)
    _list_renamed(folder, renamed, asked)


def _first(asked: Iterator[Request], limit: int, source: str) -> Iterator[Request]:
    number = 0
    for request in itertools.islice(asked, limit or None):
        number += 1
        yield request
    if number < limit:
        raise InputError(
            f"--num_samples {limit}, but {source} has {number} prompts",
            "at most as many samples as prompts",
            "leave --num_samples out for all",
        )


def _compare(
    ledger: Ledger, rows: Iterator[Request], source: str, accept: bool
) -> tuple[list[Request], frozenset[str]]:
    """The planned rows that are asked for otherwise now, and the names of pictures drawn under settings that hold no more.

    Rows whose pictures are drawn must be the file's rows, word for word; with `accept`, their prompts must.
    """
    changed: list[Request] = []
    taken: set[str] = set()
    lines: list[str] = []
    num_different = 0
    for known in ledger.rows():
        now = next(rows, None)
        if now is None:
            raise InputError(
                f"fewer prompts than before: the folder holds a plan of {ledger.num_planned}, {source} and --num_samples now give fewer",
                "the same prompts as before, or more behind them",
                "use the old list, or another --output_dir",
            )
        if now == known.request:
            continue
        same_words = (now.spec.id, now.spec.prompt) == (known.request.spec.id, known.request.spec.prompt)
        if known.state != "done":
            changed.append(now)
        elif accept and same_words:
            taken.add(known.request.name.lower())
        else:
            num_different += 1
            before, after = asdict(known.request.spec), asdict(now.spec)
            if num_different <= NUM_SHOWN:
                lines += [f"row {now.spec.index + 1}: {line.strip()}" for line in runs.difference(before, after)]
    if lines:
        shown = "\n".join(f"  {line}" for line in lines)
        raise InputError(
            f"{num_different} prompts are not those their pictures in this folder were drawn from:\n{shown}",
            "the same prompts as before, or more behind them",
            "use the old list, or another --output_dir",
        )
    return changed, frozenset(taken)


def _apart_from(taken: frozenset[str], rows: Iterable[Request]) -> Iterator[Request]:
    """The rows, unless one would write over a picture that another row has drawn under earlier settings."""
    for request in rows:
        if request.name.lower() in taken:
            raise InputError(
                f"row {request.spec.index + 1} would be called {request.name} now, as a picture that another row has drawn",
                "seeds that leave every picture its own name",
                "use another --seed_start or another --output_dir",
            )
        yield request


def _noting(rows: Iterator[Request], asked: Requests, renamed: list[Renamed]) -> Iterator[Request]:
    for request in rows:
        yield request
        renamed += asked.renamed
        asked.renamed.clear()


def _list_renamed(folder: Path, renamed: list[Renamed], asked: Requests) -> None:
    """Say which ids did not become names as they stand, and list all of them in a file."""
    if asked.num_shared_ids:
        log.warning("%d ids stand in more than one row; their pictures differ by seed", asked.num_shared_ids)
    if not renamed:
        return
    path = folder / RENAMED_FILE
    old = path.read_bytes() if path.exists() else b""
    runs.publish(path, old + b"".join((json.dumps(asdict(row), ensure_ascii=True) + "\n").encode() for row in renamed))
    shown = "; ".join(f"{row.id[:60]!r} -> {row.name}" for row in renamed[:NUM_SHOWN])
    log.warning("%d ids cannot be file names as they are and were mapped (%s): %s", len(renamed), RENAMED_FILE, shown)
