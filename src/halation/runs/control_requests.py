"""Requests to a running training, as files in its folder; rank 0 reads and answers them.

A request records the owner process it was sent to, so a later start of the same run ignores it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halation.errors import HalationError, InputError
from halation.logging_setup import ON_CONSOLE
from halation.runs import lock
from halation.runs import run_folder as runs

log = logging.getLogger(__name__)

ACTIONS = ("sample", "save", "stop")
"""Possible requests, in the order of execution."""
CONTROLLABLE_JOBS = ("train", "distill")
CONTROL_FOLDER = "control"
RESPONSES_FILE = "controls.jsonl"
POLL_INTERVAL_S = 0.1
TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class ControlRequest:
    """One request; its file is at `path` until the run takes it."""

    run: Path
    action: str
    id: str
    owner: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The owner record of the run when the request was sent."""

    @property
    def path(self) -> Path:
        return self.run / CONTROL_FOLDER / f"{self.action}-{self.id}.json"


@dataclass(frozen=True, kw_only=True)
class ControlResponse:
    """The response to a request; `refused` is the reason if it was rejected."""

    action: str
    step: int
    refused: str = ""


def send_request(folder: Path, action: str, by: str = "`halation ctl`") -> ControlRequest:
    """Write a request for a run's next step; raises InputError if no run would take it."""
    assert action in ACTIONS
    while True:
        owner = _require_running(folder)
        request = ControlRequest(run=folder, action=action, id=os.urandom(4).hex(), owner=owner)
        record = {"action": action, "id": request.id, "by": by, "owner": owner, "time": time.time()}
        try:
            request.path.parent.mkdir(exist_ok=True)
            runs.write_json_atomic(request.path, record)
            return request
        except FileNotFoundError:  # the run removed the empty folder meanwhile, or ended
            continue
        except OSError as error:
            raise InputError(
                f"cannot write to {request.path.parent}: {error.strerror or error}",
                "a run whose folder is writable",
                "run the command as the user of the run, or on the machine of the run",
            ) from error


def cancel_request(request: ControlRequest) -> bool:
    """Withdraw a request; return False if the run has already taken it."""
    try:
        request.path.unlink()
    except FileNotFoundError:
        return False
    with contextlib.suppress(OSError):  # it has other requests, or the run has removed it
        request.path.parent.rmdir()
    return True


def read_response(request: ControlRequest) -> ControlResponse | None:
    """Return the run's response, or None."""
    try:
        with open(request.run / RESPONSES_FILE, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        if request.id.encode() in line:
            with contextlib.suppress(ValueError, KeyError):
                row = json.loads(line)
                return ControlResponse(action=row["action"], step=row["step"], refused=row.get("refused", ""))
    return None


def is_owner_running(request: ControlRequest) -> bool:
    """Return True if the process that the request was sent to still runs."""
    try:
        return _require_running(request.run) == request.owner
    except HalationError:
        return False


def is_starting(folder: Path) -> bool:
    """Return True if a training has locked the folder but not written config.json yet."""
    owner = _read_live_owner(folder)
    return owner is not None and owner.get("command") in CONTROLLABLE_JOBS and not (folder / runs.CONFIG_FILE).exists()


def _require_running(folder: Path) -> dict[str, Any]:
    """Return the owner of a running training, or raise; remote owners count as running."""
    run = runs.RunFolder(folder)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}", "the folder of a running training", "check the path")
    if not run.config.exists():
        if is_starting(folder):
            raise InputError(f"{folder} is still starting", "a running training", "retry in a moment (--wait_s)")
        raise InputError(
            f"{folder} is not a run: it has no {runs.CONFIG_FILE}",
            "the --output_dir of a running `halation train` or `distill`",
            "check the path",
        )
    job = runs.read_record(run)["job"]
    if job not in CONTROLLABLE_JOBS:
        raise InputError(
            f"{folder} holds a `{job}` run",
            "a running `halation train` or `distill`",
            "stop it with Ctrl+C or a signal: finished work is kept",
        )
    owner = _read_live_owner(folder)
    if owner is not None:
        return owner
    ended = lock.read_json_object(folder / lock.ENDED_FILE)
    found, reason = f"{folder} is not running", str(ended.get("reason") or "")
    if ended.get("state") == "finished":
        raise InputError(
            f"{found}: it is finished", "a running training", "to continue it, run its command with more steps"
        )
    if ended.get("state") == "failed":
        found += f": it failed{': ' * bool(reason)}{reason}"
    goes_on = "resumes from its last checkpoint" if run.has_checkpoints() else "starts over, as nothing was saved"
    raise InputError(found, "a running training", f"start it: the same command {goes_on}")


def _read_live_owner(folder: Path) -> dict[str, Any] | None:
    """Return the owner record of a folder, or None if its process, on this machine, has ended."""
    owner = lock.read_json_object(folder / lock.OWNER_FILE)
    pid = owner.get("pid")
    if owner.get("host") == socket.gethostname() and not (
        isinstance(pid, int) and lock.is_alive(pid, owner.get("start"))
    ):
        return None
    return owner or None


def decode_actions(number: int) -> frozenset[str]:
    """Decode the bit mask in which ranks share actions."""
    return frozenset(action for bit, action in enumerate(ACTIONS) if number >> bit & 1)


class ControlInbox:
    """Takes and answers requests on rank 0; on other ranks it is always empty."""

    def __init__(self, folder: Path, *, is_enabled: bool, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        self.folder = folder
        self.is_enabled = is_enabled
        self.poll_interval_s = poll_interval_s
        self._requests_folder = str(folder / CONTROL_FOLDER)
        self._next_poll = 0.0
        self._pending: list[dict[str, Any]] = []
        self.requested_by: dict[str, str] = {}
        """The last requester of each answered action."""

    def poll(self) -> int:
        """Return a bit mask of the actions requested since the last call.

        Requests are removed before they are executed, so that a kill may lose one but never repeats one.
        """
        if not self.is_enabled or time.monotonic() < self._next_poll:
            return 0
        self._next_poll = time.monotonic() + self.poll_interval_s
        try:
            os.stat(self._requests_folder)
        except OSError:  # no requests, the usual case
            return 0
        self._pending += self._pop_requests()
        return sum(1 << ACTIONS.index(action) for action in {row["action"] for row in self._pending})

    def respond(self, step: int, refused: Mapping[str, str]) -> None:
        """Answer the requests that were taken: with the step, or with the reason in `refused`."""
        rows, self._pending = self._pending, []
        for row in rows:
            reason = refused.get(row["action"], "")
            self.requested_by[row["action"]] = str(row["by"])
            what = f"not done at step {step}: {reason}" if reason else f"accepted at step {step}"
            level = logging.WARNING if reason else logging.INFO
            log.log(level, "%s, requested by %s, is %s", row["action"], row["by"], what, extra=ON_CONSOLE)
            response = {name: row[name] for name in ("action", "id", "by")} | {"step": step, "time": time.time()}
            try:
                with open(self.folder / RESPONSES_FILE, "ab") as file:
                    file.write((json.dumps(response | ({"refused": reason} if reason else {})) + "\n").encode())
            except OSError as error:  # a lost response must not stop the training
                log.error("cannot write %s: %s", self.folder / RESPONSES_FILE, error.strerror or error)

    def close(self, step: int) -> None:
        """Reject waiting requests and remove their folder."""
        if not self.is_enabled:
            return
        self.is_enabled = False
        self._pending += self._pop_requests()
        self.respond(step, dict.fromkeys(ACTIONS, "the run has ended"))
        shutil.rmtree(self._requests_folder, ignore_errors=True)

    def _pop_requests(self) -> list[dict[str, Any]]:
        owner = lock.read_json_object(self.folder / lock.OWNER_FILE)
        rows = []
        with contextlib.suppress(OSError):
            for path in sorted(Path(self._requests_folder).glob("*.json")):  # incomplete files have hidden names
                row = lock.read_json_object(path)
                try:
                    path.unlink()
                except FileNotFoundError:  # it was withdrawn
                    continue
                if row.get("owner") == owner and row.get("action") in ACTIONS and {"id", "by"} <= row.keys():
                    rows.append(row)
                else:
                    log.warning("dropped %s: it was not sent to this start of the run", path.name)
            os.rmdir(self._requests_folder)
        return rows
