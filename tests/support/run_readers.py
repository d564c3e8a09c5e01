"""Readers of run folders that share no code with the writers.

They use the standard library, numpy, Pillow and safetensors alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors import safe_open

LEFTOVERS = (
    r"\..*\.tmp", r"\.saving_.*", r"\..*\.removing", r"\.lock", r"\.owner\.json", r"\.halation_ranks_.*",
    r"ledger\.sqlite-(wal|shm|journal)",
)  # fmt: skip
STATES = ("open", "done", "failed")


def leftovers(run: Path) -> list[str]:
    """Temporary files, locks, journals and incomplete folders below a run folder."""
    return [
        str(path.relative_to(run))
        for path in run.rglob("*")
        if any(re.fullmatch(pattern, path.name) for pattern in LEFTOVERS)
    ]


# Checkpoints


def checkpoint_problem(folder: Path) -> str | None:
    """The reason why a folder is not a complete checkpoint, or None."""
    try:
        commit = json.loads((folder / "COMMIT.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        return f"commit file: {error}"
    if not isinstance(commit, dict):
        return "commit file: no object"
    text = json.dumps({key: commit[key] for key in sorted(commit) if key != "seal"}, sort_keys=True)
    if hashlib.sha256(text.encode()).hexdigest() != commit.get("seal"):
        return "commit file: seal"
    if {path.name for path in folder.iterdir()} != {"COMMIT.json", *commit["sha256"]}:
        return "other files than the commit file lists"
    for name, digest in commit["sha256"].items():
        data = (folder / name).read_bytes()
        if len(data) != commit["bytes"][name] or hashlib.sha256(data).hexdigest() != digest:
            return f"{name}: bytes"
    return None


def checkpoints(run: Path) -> dict[int, Path]:
    """Every folder named like a checkpoint, by step."""
    return {int(path.name.removeprefix("step_")): path for path in sorted(run.glob("step_*"))}


def valid_checkpoints(run: Path) -> dict[int, Path]:
    """The complete checkpoints, by step."""
    return {step: path for step, path in checkpoints(run).items() if checkpoint_problem(path) is None}


def checkpoint_tensors(folder: Path, part: str) -> dict[str, np.ndarray]:
    """The tensors of one part of a checkpoint, joined from all its files."""
    found: dict[str, list[tuple[int, np.ndarray]]] = {}
    for path in [*folder.glob(f"{part}.safetensors"), *folder.glob(f"{part}-*-of-*.safetensors")]:
        with safe_open(path, framework="np") as file:
            layout = json.loads(file.metadata()["halation"])
            for name in layout:
                found.setdefault(name, []).append((layout[name]["start"], file.get_tensor(name)))
    whole = {}
    for name, pieces in found.items():
        rows = [array for _, array in sorted(pieces, key=lambda piece: piece[0])]
        whole[name] = np.concatenate(rows) if rows[0].ndim else rows[0]
    return whole


def checkpoint_digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of a checkpoint except COMMIT.json."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != "COMMIT.json"
    }


def checkpoint_bytes(folder: Path, step: int) -> dict[str, bytes]:
    """The bytes of a checkpoint that training depends on: model, EMA, optimizer and position."""
    place = folder / "checkpoints" / f"step_{step:07d}"
    files = {path.name: path.read_bytes() for path in sorted(place.glob("*.safetensors"))}
    assert {name.split("-")[0].split(".")[0] for name in files} >= {"model", "ema", "optimizer"}
    state = json.loads((place / "state.json").read_bytes())
    return files | {name: json.dumps(state[name]).encode() for name in ("position", "ema_updates")}


def tensors_at(run: Path, step: int, part: str) -> dict[str, np.ndarray]:
    """The float32 tensors of one part of a run's checkpoint."""
    found = checkpoint_tensors(run / "checkpoints" / f"step_{step:07d}", part)
    assert all(values.dtype == np.float32 for values in found.values())
    return found


# Metrics, samples and logs of a training


def metric_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """The training loss by step."""
    return {row["step"]: row["loss"] for row in metric_rows(folder) if "loss" in row}


def validation_losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["value"] for row in metric_rows(folder) if row.get("metric") == "heldout_loss"}


def sample_files(folder: Path) -> dict[str, bytes]:
    """The bytes of images, prompts and grid in a folder of samples, by file name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".png", ".txt")}


def sample_rows(folder: Path, step: int) -> list[dict[str, Any]]:
    """The rows of samples.json at a step."""
    rows: list[dict[str, Any]] = json.loads((folder / f"samples/step_{step:07d}/samples.json").read_text())["samples"]
    return rows


def rank_log(folder: Path, rank: int) -> str:
    return (folder / "logs" / ("train.log" if rank == 0 else f"rank_{rank}.log")).read_text()


# Folders of generated images


def ledger_rows(folder: Path) -> list[dict[str, Any]]:
    """Every row of the ledger in the order of the index, its state by name."""
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        connection.row_factory = sqlite3.Row
        rows = [dict(row) for row in connection.execute("SELECT * FROM pictures ORDER BY picture")]
    return [row | {"state": STATES[row["state"]]} for row in rows]


def num_done(folder: Path) -> int:
    """Number of images that the ledger has as done; 0 before there is a ledger."""
    if not (folder / "ledger.sqlite").exists():
        return 0
    try:
        with contextlib.closing(sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=rw", uri=True)) as connection:
            return int(connection.execute("SELECT COUNT(*) FROM pictures WHERE state = 1").fetchone()[0])
    except sqlite3.OperationalError:  # the table is being made
        return 0


def metadata_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]


def image_digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every image by file name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.png"))}


def images_and_metadata(folder: Path) -> tuple[dict[str, str], bytes]:
    """Everything that must be equal in two folders of one run: all images, and the metadata byte for byte."""
    return image_digests(folder), (folder / "metadata.jsonl").read_bytes()


def damaged_images(folder: Path) -> Iterator[str]:
    """Files with a final name that are not complete images, independent of the ledger."""
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


def generation_problems(folder: Path, num_planned: int) -> list[str]:
    """Differences from exactly the planned images, each once, complete, as in the ledger and the metadata."""
    rows = ledger_rows(folder)
    found = list(damaged_images(folder))
    files = image_digests(folder)
    if [row["picture"] for row in rows] != list(range(num_planned)):
        found.append(f"the ledger has {len(rows)} rows instead of {num_planned}")
    found += [f"row {row['picture']} is {row['state']}: {row['reason']}" for row in rows if row["state"] != "done"]
    wanted = {f"{row['name']}.png": row["sha256"] for row in rows}
    if len(wanted) != len(rows):
        found.append("two rows have one name")
    found += [f"{name} is missing" for name in sorted(wanted.keys() - files.keys())]
    found += [f"{name} was not planned" for name in sorted(files.keys() - wanted.keys())]
    found += [f"{name} has another SHA-256" for name in wanted.keys() & files.keys() if wanted[name] != files[name]]
    lines = metadata_rows(folder)
    if [line["index"] for line in lines] != [row["picture"] for row in rows]:
        found.append("metadata.jsonl does not list every row once, by index")
    for row, line in zip(rows, lines, strict=False):
        listed = (line["file_name"], line["sha256"], line["prompt"], line["seed"])
        if listed != (f"{row['name']}.png", row["sha256"], row["prompt"], row["seed"]):
            found.append(f"metadata of row {row['picture']} is not the ledger's")
    return found + [f"left over: {name}" for name in leftovers(folder)]


def temporary_files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*.tmp")]


def listed_failures(folder: Path) -> dict[int, str]:
    """The reason of each failure in the lists of failed prompts, by index."""
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
