"""Reads a folder of images with Pillow, hashlib, json and sqlite3 alone: it shares no code with what wrote the folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

LEFTOVERS = (r"\..*\.tmp", r"\.lock", r"\.owner\.json", r"ledger\.sqlite-(wal|shm|journal)")
STATES = ("open", "done", "failed")


def ledger(folder: Path) -> list[dict[str, Any]]:
    """Every row of the ledger by index, its state as a word."""
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        connection.row_factory = sqlite3.Row
        rows = [dict(row) for row in connection.execute("SELECT * FROM pictures ORDER BY picture")]
    return [row | {"state": STATES[row["state"]]} for row in rows]


def num_done(folder: Path) -> int:
    """Images the ledger calls done; 0 before there is a ledger."""
    if not (folder / "ledger.sqlite").exists():
        return 0
    try:
        with contextlib.closing(sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=rw", uri=True)) as connection:
            return int(connection.execute("SELECT COUNT(*) FROM pictures WHERE state = 1").fetchone()[0])
    except sqlite3.OperationalError:  # the table is being made
        return 0


def metadata(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]


def images(folder: Path) -> dict[str, str]:
    """The SHA-256 of every image by file name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.png"))}


def state(folder: Path) -> tuple[dict[str, str], bytes]:
    """All that must be the same in two folders of one run: every image, and the metadata byte for byte."""
    return images(folder), (folder / "metadata.jsonl").read_bytes()


def bad_images(folder: Path) -> Iterator[str]:
    """Files under a final name that are no whole images, whatever the ledger says of them."""
    for path in sorted(folder.glob("[!.]*.png")):
        try:
            with Image.open(path) as image:
                image.verify()
            with Image.open(path) as image:
                image.load()
                text = json.loads(image.text["halation"])
            if f"_seed{text['seed']}.png" not in path.name or image.size != (text["width"], text["height"]):
                yield f"{path.name}: is another image"
        except (OSError, SyntaxError, ValueError, KeyError) as error:
            yield f"{path.name}: {error!r}"


def problems(folder: Path, num_planned: int) -> list[str]:
    """Why the folder is not exactly the planned images, each once, whole, and as ledger and metadata say."""
    rows = ledger(folder)
    found = list(bad_images(folder))
    files = images(folder)
    if [row["picture"] for row in rows] != list(range(num_planned)):
        found.append(f"the ledger has {len(rows)} rows instead of {num_planned}")
    found += [f"row {row['picture']} is {row['state']}: {row['reason']}" for row in rows if row["state"] != "done"]
    wanted = {f"{row['name']}.png": row["sha256"] for row in rows}
    if len(wanted) != len(rows):
        found.append("two rows have one name")
    found += [f"{name} is missing" for name in sorted(wanted.keys() - files.keys())]
    found += [f"{name} was not planned" for name in sorted(files.keys() - wanted.keys())]
    found += [f"{name} has another SHA-256" for name in wanted.keys() & files.keys() if wanted[name] != files[name]]
    lines = metadata(folder)
    if [line["index"] for line in lines] != [row["picture"] for row in rows]:
        found.append("metadata.jsonl does not list every row once, by index")
    for row, line in zip(rows, lines, strict=False):
        told = (line["file_name"], line["sha256"], line["prompt"], line["seed"])
        if told != (f"{row['name']}.png", row["sha256"], row["prompt"], row["seed"]):
            found.append(f"metadata of row {row['picture']} is not the ledger's")
    return found + [f"left over: {name}" for name in leftovers(folder)]


def leftovers(folder: Path) -> list[str]:
    """Temporary files, locks and journals that are still there."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if any(re.fullmatch(pattern, path.name) for pattern in LEFTOVERS)
    ]


def temporaries(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*.tmp")]


def failures(folder: Path) -> dict[int, str]:
    """The reason of each failure that the lists of failed prompts tell of, by index."""
    found: dict[int, str] = {}
    for path in folder.glob("failed_prompts_gpu*.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                index, _id, _seed, _prompt, reason = line.split("\t")
                assert int(index) not in found, f"{index} is listed twice"
                found[int(index)] = json.loads(f'"{reason}"')
    return found


def summary(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
    return value
