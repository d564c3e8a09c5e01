"""What `--generated`, `--reference` and `--prompts` mean: sources of pictures, checked against their ledger and their prompts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from halation.data.decode import SUFFIXES
from halation.errors import InputError
from halation.evaluation.image_sources import Files, files_below, stamps_of
from halation.generation.ledger import Ledger
from halation.generation.requests import Defaults, requests
from halation.generation.results import METADATA_FILE, SUMMARY_FILE
from halation.prompts import PromptFile
from halation.runs.folder import read_json
from halation.tables import decode, json_rows

LEDGER = "ledger.sqlite"
SHARED_LEDGER = "ledger"
NUM_SHOWN = 5
_SEED = re.compile(r"_seed\d+\Z")


def open_generated(folder: Path) -> Files:
    """The folder of a `halation generate`, which must hold what its ledger says and nothing else, or any folder of pictures."""
    if not folder.is_dir():
        found = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise InputError(f"--generated: {found}", "a folder of pictures", "check --generated")
    if (folder / LEDGER).is_file():
        with Ledger(folder / LEDGER) as ledger:
            return _run(folder, _planned(ledger))
    if (folder / SHARED_LEDGER).is_dir() and (folder / METADATA_FILE).is_file():
        return _run(folder, _listed(folder))
    return files_below(folder, "--generated")


def _planned(ledger: Ledger) -> Iterator[dict[str, Any]]:
    counts = ledger.counts()
    missing = counts["planned"] - counts["done"]
    if missing or not counts["planned"]:
        raise _unfinished(missing, counts["planned"], counts["failed"])
    for row in ledger.done():
        spec = row.request.spec
        yield {"name": row.request.name, "prompt": spec.prompt, "frames": spec.num_frames, "sha256": row.sha256}


def _listed(folder: Path) -> Iterator[dict[str, Any]]:
    """Of a folder that several processes shared: its lines are the pictures that are done, its summary says of how many."""
    summary = read_json(folder / SUMMARY_FILE) if (folder / SUMMARY_FILE).is_file() else {}
    rows = list(json_rows(METADATA_FILE, decode(METADATA_FILE, (folder / METADATA_FILE).read_bytes())))
    planned = int(summary.get("planned", 0))
    if len(rows) < planned or not rows:
        raise _unfinished(planned - len(rows), planned, int(summary.get("failed", 0)))
    for row in rows:
        value = row.values
        name = Path(value["file_name"]).stem
        yield {"name": name, "prompt": value["prompt"], "frames": value["num_frames"], "sha256": value["sha256"]}


def _unfinished(missing: int, planned: int, failed: int) -> InputError:
    return InputError(
        f"--generated: {missing} of {planned} pictures of that run are missing ({failed} of them failed)",
        "a run whose every picture is drawn",
        "run the same `halation generate` again until it ends with exit code 0",
    )


def _run(folder: Path, rows: Iterator[dict[str, Any]]) -> Files:
    names, prompts, digests = [], [], []
    for row in rows:
        if row["frames"] != 1:
            raise InputError(
                f"--generated: {row['name']} is a video of {row['frames']} frames",
                "a run of pictures",
                "draw with --num_frames 1",
            )
        names.append(f"{row['name']}.png")
        prompts.append(row["prompt"])
        digests.append(row["sha256"])
    there = {name for name in os.listdir(folder) if name.lower().endswith(SUFFIXES) and not name.startswith(".")}
    _refuse(sorted(set(names) - there), folder, "in its ledger and not in the folder", "run `halation generate` again")
    foreign = sorted(there - set(names) - {"grid.png"})
    _refuse(foreign, folder, "in the folder and not in its ledger", "move them elsewhere")
    return Files(
        kind="run",
        folder=folder,
        names=tuple(names),
        stamps=stamps_of(folder, names),
        captions=tuple(prompts),
        digests=tuple(digests),
    )


def _refuse(names: Sequence[str], folder: Path, what: str, action: str) -> None:
    if names:
        shown = ", ".join(names[:NUM_SHOWN]) + (" ..." if len(names) > NUM_SHOWN else "")
        raise InputError(
            f"--generated: {len(names)} pictures are {what} ({folder}): {shown}",
            "exactly the pictures that the run drew",
            action,
        )


def with_prompts(files: Files, prompts: str, seed_start: int) -> Files:
    """Captions from a prompt list, matched by file name: `{id}_seed{seed}`, `{id}`, or the number in it."""
    listed = PromptFile.open(prompts)
    texts: dict[str, str] = {}
    ids: dict[str, dict[str, str]] = {}
    nothing = Defaults(
        seed_start=seed_start, height=1, width=1, num_frames=1, steps=1, guidance_scale=1.0, negative_prompt=""
    )
    rows = list(listed.rows())
    # A list without ids counts from 000001: a folder that counts from 0 must not be taken for one that is one off.
    numbers = any(row.image_id is not None for row in rows)
    for request in requests(rows, nothing, listed.name):
        texts[request.name] = request.spec.prompt
        for name in _names(request.spec.id) if numbers else {request.spec.id}:
            ids.setdefault(name, {})[request.name] = request.spec.prompt
    doubtful = _shifted(files.names, ids)
    captions, unmatched = [], []
    for name in files.names:
        caption = None if Path(name).stem in doubtful else _caption(Path(name).stem, texts, ids)
        if caption is None:
            unmatched.append(name)
        captions.append(caption or "")
    if unmatched:
        shown = ", ".join(unmatched[:NUM_SHOWN]) + (" ..." if len(unmatched) > NUM_SHOWN else "")
        raise InputError(
            f"{len(unmatched)} of {len(files)} pictures cannot be matched to one prompt of {prompts}: {shown}",
            "file names {image_id}_seed{seed}.png or {image_id}.png with ids of the list (six digits from 000001 where it has none)",
            "give the list the pictures were drawn for and, where an id has several prompts, the --seed_start they were drawn with",
        )
    if files.captions is not None and files.kind == "run" and tuple(captions) != files.captions:
        at = next(i for i, (one, other) in enumerate(zip(captions, files.captions, strict=True)) if one != other)
        raise InputError(
            f"{files.names[at]} was drawn for {files.captions[at][:60]!r}, and {prompts} says {captions[at][:60]!r}",
            "the list the pictures were drawn for",
            "leave --prompts out: the run has its own",
        )
    return replace(files, captions=tuple(captions))


def _names(image_id: str) -> set[str]:
    """What a picture of this id may be called; numbers with or without leading zeros."""
    return {image_id, image_id.lstrip("0")} if image_id.isdigit() else {image_id}


def _shifted(names: Sequence[str], ids: Mapping[str, Mapping[str, str]]) -> set[str]:
    """Pictures of ids with several prompts whose seeds are not the first ones of the list: drawn from another --seed_start, it seems."""
    by_id: dict[str, set[str]] = {}
    for name in names:
        by_id.setdefault(_SEED.sub("", Path(name).stem), set()).add(Path(name).stem)
    doubtful: set[str] = set()
    for image_id, listed in ids.items():
        if len(set(listed.values())) > 1:
            there = by_id.get(image_id, set())
            if there != set(list(listed)[: len(there)]):
                doubtful |= there
    return doubtful


def _caption(stem: str, texts: Mapping[str, str], ids: Mapping[str, Mapping[str, str]]) -> str | None:
    if stem in texts:
        return texts[stem]
    for name in (stem, _SEED.sub("", stem)):
        for key in sorted(_names(name), key=len, reverse=True):  # an id with leading zeros before the bare number
            found = set(ids.get(key, {}).values())
            if len(found) == 1:
                return next(iter(found))
    return None
