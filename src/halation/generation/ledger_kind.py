"""Decides which kind of ledger a new folder has, so that commands of two kinds cannot begin it together."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from halation.errors import InputError
from halation.generation.ledger import LEDGER_FILE
from halation.runs.run_folder import is_same_file

LedgerKind = Literal["sqlite", "files"]
LEDGER_NAMES: dict[LedgerKind, str] = {"sqlite": LEDGER_FILE, "files": "ledger"}
"""One file, or a folder of files that several commands write."""
KIND_FILE = "ledger.kind"
"""Which kind of ledger a folder has: created once, before anything else, so that commands of two kinds cannot begin it together."""
KIND_TIMEOUT_S = 10.0


def has_ledger(folder: Path, kind: LedgerKind) -> bool:
    return (folder / LEDGER_NAMES[kind]).exists()


@contextlib.contextmanager
def claim_ledger_kind(folder: Path, kind: LedgerKind) -> Iterator[LedgerKind]:
    """Decide for one kind of ledger, unless that is decided; yields the kind that holds, also where another command decided.

    While entered, this process holds a shared lock of the file with the decision. A decision without a lock and without a
    ledger was left by a command that was killed, and binds no other; a command that ends without a ledger removes it.
    """
    descriptor, decided = _decide_ledger_kind(folder, kind)
    try:
        yield decided
    finally:
        path = folder / KIND_FILE
        with contextlib.suppress(OSError):  # the folder may be gone, which the command says in its own words
            is_unused = decided == kind and not has_ledger(folder, kind)
            if is_unused and _try_lock(descriptor, fcntl.LOCK_EX) and is_same_file(path, descriptor):
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
        if is_locked is not False and is_same_file(path, descriptor):
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
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            temporary.write_bytes(kind.encode())
            with contextlib.suppress(OSError):  # another command was first, or the file system has no hard links
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
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
