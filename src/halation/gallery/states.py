"""Whether a run is running, finished, stopped or failed, and why: from the files it leaves, without ever taking its lock."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halation.gallery.tail import read_object, stamp_of
from halation.holds import ENDED_FILE, KILLED, OWNER_FILE, is_alive

SILENT_AFTER_S = 300.0
"""A command on another machine cannot be asked; one whose files did not change for so long is taken for gone."""
STATES = ("finished", "stopped", "failed")


@dataclass(frozen=True, kw_only=True)
class State:
    """`word` is running, finished, stopped or failed."""

    word: str
    reason: str = ""
    command: str = ""
    since: float | None = None


def state_of(folder: Path, changed: float, sharing: Sequence[Path] = (), done: bool | None = None) -> State:
    """The state of a run whose newest file is of the time `changed`.

    `sharing` are files that processes which hold nothing keep touching (leases); `done` says whether all that was planned
    is there, for runs that told nobody how they ended.
    """
    owner = read_object(folder / OWNER_FILE)
    ended = read_object(folder / ENDED_FILE)
    if owner:
        state = _of_owner(owner, changed)
        if state.word == "running" or ended.get("state") not in STATES:
            return state
    touched = max((stamp.mtime for path in sharing if (stamp := stamp_of(path)) is not None), default=0.0)
    if time.time() - touched < SILENT_AFTER_S:
        return State(word="running")
    if ended.get("state") in STATES:
        return State(
            word=ended["state"], reason=str(ended.get("reason") or ""), command=str(ended.get("command") or "")
        )
    if done:
        return State(word="finished")
    return State(word="stopped", reason="" if done is None else "not all of it is there")


def _of_owner(owner: dict[str, object], changed: float) -> State:
    command, host, pid = str(owner.get("command") or ""), owner.get("host"), owner.get("pid")
    since = _seconds(owner.get("since"))
    if host == socket.gethostname() and isinstance(pid, int):
        alive = is_alive(pid, owner.get("start"))
        return State(
            word="running" if alive else "stopped", reason="" if alive else KILLED, command=command, since=since
        )
    newest = max(changed, since or 0.0)
    if time.time() - newest < SILENT_AFTER_S:
        return State(word="running", command=command, since=since)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest))
    return State(word="stopped", reason=f"silent since {when}", command=command, since=since)


def _seconds(text: object) -> float | None:
    try:
        return time.mktime(time.strptime(str(text), "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None
