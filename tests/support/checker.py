"""Reads a run's folder with the standard library and safetensors alone: it shares no code with what wrote the folder."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
from safetensors import safe_open

LEFTOVERS = (r"\..*\.tmp", r"\.saving_.*", r"\..*\.removing", r"\.lock", r"\.owner\.json", r"\.halation_ranks_.*")


def problem(folder: Path) -> str | None:
    """Why a folder is not a whole checkpoint, or None."""
    try:
        commit = json.loads((folder / "COMMIT.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        return f"commit file: {error}"
    if not isinstance(commit, dict):
        return "commit file: no object"
    words = json.dumps({key: commit[key] for key in sorted(commit) if key != "seal"}, sort_keys=True)
    if hashlib.sha256(words.encode()).hexdigest() != commit.get("seal"):
        return "commit file: seal"
    if {path.name for path in folder.iterdir()} != {"COMMIT.json", *commit["sha256"]}:
        return "other files than the commit file lists"
    for name, digest in commit["sha256"].items():
        data = (folder / name).read_bytes()
        if len(data) != commit["bytes"][name] or hashlib.sha256(data).hexdigest() != digest:
            return f"{name}: bytes"
    return None


def checkpoints(run: Path) -> dict[int, Path]:
    """Every folder with a checkpoint's name, by its step."""
    return {int(path.name.removeprefix("step_")): path for path in sorted(run.glob("step_*"))}


def good(run: Path) -> dict[int, Path]:
    """The whole checkpoints, by step."""
    return {step: path for step, path in checkpoints(run).items() if problem(path) is None}


def tensors(folder: Path, part: str) -> dict[str, np.ndarray]:
    """The tensors of one part, put together from whatever number of files they lie in."""
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


def bits(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of a checkpoint that tells of the training (the list of them is not part of it)."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != "COMMIT.json"
    }


def leftovers(run: Path) -> list[str]:
    """Temporary files, locks and half-made folders that are still there."""
    return [
        str(path.relative_to(run))
        for path in run.rglob("*")
        if any(re.fullmatch(pattern, path.name) for pattern in LEFTOVERS)
    ]
