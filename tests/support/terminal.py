"""A command on a real pseudo-terminal, and the screen that its output leaves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[78=>]|[\r\n\x08\x07]|[^\x1b\r\n\x08\x07]")


class Screen:
    """What a terminal of this size shows: text, line ends, wrapping, cursor up, erasing, and whether the cursor shows."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.rows: list[list[str]] = [[]]
        self.row = self.column = 0
        self.is_cursor_visible = True

    def feed(self, text: str) -> None:
        for found in TOKEN.finditer(text):
            token = found[0]
            if found[2]:
                self._control(found[1], found[2])
            elif token == "\r":
                self.column = 0
            elif token == "\n":
                self._line_feed()
            elif token == "\x08":
                self.column = max(self.column - 1, 0)
            elif token[0] not in "\x1b\x07":
                self._put(token)

    def _put(self, letter: str) -> None:
        if self.column == self.width:  # a full line wraps with the next letter, as terminals do
            self.column = 0
            self._line_feed()
        line = self.rows[self.row]
        line += [" "] * (self.column + 1 - len(line))
        line[self.column] = letter
        self.column += 1

    def _line_feed(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])

    def _control(self, numbers: str, kind: str) -> None:
        if kind == "A":  # rows above the screen cannot be reached
            self.row = max(self.row - int(numbers or 1), len(self.rows) - self.height, 0)
        elif kind == "K":
            assert numbers == "2", f"erasing {numbers} is not known here"
            self.rows[self.row] = []
        elif numbers == "?25":
            self.is_cursor_visible = kind == "h"
        else:
            assert kind == "m", f"the control sequence {numbers}{kind} is not known here"

    def lines(self) -> list[str]:
        """Everything written so far, with what has scrolled away; without empty lines."""
        return [text for text in ("".join(row).rstrip() for row in self.rows) if text]


class Terminal:
    """A command on a pseudo-terminal of its own, where Ctrl+C is echoed as `^C` and interrupts the foreground."""

    def __init__(self, command: Sequence[str], width: int, height: int = 24, **environment: str) -> None:
        self.screen = Screen(width, height)
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        left_out = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "RANK")
        usual: Mapping[str, str] = {name: value for name, value in os.environ.items() if name not in left_out}
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**usual, "TERM": "xterm-256color", **environment},
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def read_until(self, condition: Callable[[str], object], timeout_s: float = 300.0) -> None:
        """Read until the screen's text satisfies the condition."""
        deadline = time.monotonic() + timeout_s
        while not condition("\n".join(self.screen.lines())):
            assert self._read(0.1), "the command ended first:\n" + "\n".join(self.screen.lines())
            assert time.monotonic() < deadline, "\n".join(self.screen.lines())

    def finish(self, timeout_s: float = 300.0) -> int:
        """Read to the end and return the exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read(0.1):
            assert time.monotonic() < deadline, "\n".join(self.screen.lines())
        return self.process.wait(timeout_s)

    def _read(self, timeout_s: float) -> bool:
        """Feed what there is to the screen; return False when all processes have closed the terminal."""
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return True
        part = b""
        with contextlib.suppress(OSError):  # EIO: Linux says so that the other side has hung up
            part = os.read(self._ours, 65536)
        self.screen.feed(part.decode(errors="replace"))
        return bool(part)
