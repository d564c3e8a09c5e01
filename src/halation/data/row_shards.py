"""What the caches on disk share: a folder that is made for one thing, and shards that count only with the note beside them.

A shard is `NAME.safetensors`, and `NAME.json` says its size, its SHA-256 and what it holds. The note is published last: a
shard without it is not there. Nothing here knows what a shard is about.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halation.errors import InputError
from halation.runs.folder import publish, writer_of

_AGAIN = "delete the folder and build it again"


def claim(path: Path, asked: Mapping[str, Any]) -> None:
    """Make the folder of this manifest ours, or refuse it: every rank does this and writes the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        there = read_manifest(path, int(asked["format"]))
        refuse_stale(path.parent, there["fingerprint"], asked["fingerprint"])
        refuse_stale(path.parent, {**there, "name": None}, {**asked, "name": None})
    else:
        publish(path, json.dumps(asked, indent=1, sort_keys=True).encode())
    _remove_leftovers(path.parent)


def read_manifest(path: Path, wanted: int) -> dict[str, Any]:
    """What a cache was made for, in the format that is wanted."""
    try:
        asked = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(
            f"no cache in {path.parent}", f"a folder with a {path.name}", "build the cache first"
        ) from None
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}", "JSON", _AGAIN) from None
    if not isinstance(asked, dict) or asked.get("format") != wanted:
        raise InputError(f"{path} is of another format", f"format {wanted}", _AGAIN)
    return asked


def refuse_stale(folder: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise with every difference between what a cache was made for and what is wanted."""
    lines = [
        f"\n    {key}: {_short(first)} in the cache, {_short(second)} wanted"
        for key, first, second in _differences(dict(there), json.loads(json.dumps(wanted)))
    ]
    if lines:
        raise InputError(
            f"the cache {folder} was made for something else:{''.join(lines)}",
            "a cache made with exactly these settings",
            "delete the folder or name another one, and the cache is built again",
        )


def _differences(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Names and both values of what differs; objects that both have are looked into."""
    for key in sorted(there.keys() | wanted.keys()):
        first, second = there.get(key), wanted.get(key)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            yield from ((f"{key}.{inner}", *values) for inner, *values in _differences(first, second))
        elif first != second:
            yield key, first, second


def _short(value: Any) -> str:
    """A value as people can compare it: a hash by its beginning."""
    return re.sub(r"\b[0-9a-f]{32,}\b", lambda found: f"{found[0][:12]}...", repr(value))


def refuse_damaged(folder: Path, bad: list[str], num: int) -> None:
    if bad:
        raise InputError(
            f"{len(bad)} of {num} shards of the cache {folder} are missing or damaged: {', '.join(bad[:10])}",
            "every shard with the size and SHA-256 written beside it",
            "build the cache again with the same settings; only these shards are made",
        )


def publish_shard(path: Path, content: bytes, notes: Mapping[str, Any]) -> None:
    """A shard and, when it is whole, its note."""
    commit = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), **notes}
    commit["digest"] = _digest_of_notes(commit)
    publish(path, content, point="cache")
    publish(path.with_suffix(".json"), json.dumps(commit, sort_keys=True).encode(), point="cache")


def committed(path: Path, *, verify: bool) -> dict[str, Any] | None:
    """What is written beside a shard, or None where shard or note are missing, cut or changed; `verify` reads all of it."""
    try:
        commit = json.loads(path.with_suffix(".json").read_bytes())
        size = path.stat().st_size
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(commit, dict) or commit.get("digest") != _digest_of_notes(commit) or commit["num_bytes"] != size:
        return None
    return commit if not verify or is_whole(path, commit) else None


def is_whole(path: Path, commit: Mapping[str, Any]) -> bool:
    """Whether a shard's bytes are those that its note was written for."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == commit["sha256"]
    except FileNotFoundError:
        return False


def _digest_of_notes(commit: Mapping[str, Any]) -> str:
    """A damaged caption must be found like a damaged pixel."""
    body = {key: value for key, value in commit.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file by name, and where its data begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}, 8 + length


def _remove_leftovers(folder: Path) -> None:
    """Temporary files of killed processes of this machine; those of living ones and of other machines are theirs."""
    for path in folder.glob(f".*.{socket.gethostname()}-*.tmp"):
        owner = writer_of(path)
        if owner != os.getpid() and not Path(f"/proc/{owner}").exists():
            path.unlink(missing_ok=True)
