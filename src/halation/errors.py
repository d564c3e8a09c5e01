"""The errors people see: what was found, what was expected, what to do, and the exit code each one means."""

from __future__ import annotations

import errno

RESOURCE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
PERMISSION_ERRNOS = (errno.EACCES, errno.EPERM, errno.ESTALE)
_MAX_CHARS = 5000


class HalationError(Exception):
    """Something a person should read; the command line prints it without a traceback."""

    exit_code = 1


class InputError(HalationError):
    """Bad input or settings: found, expected, and what to do about it."""

    exit_code = 2

    def __init__(self, found: str, expected: str, action: str) -> None:
        found = _shorten(found)
        super().__init__(f"{found}\n  expected: {expected}\n  to do:    {action}")
        self.found = found
        self.expected = expected
        self.action = action

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        return type(self), (self.found, self.expected, self.action)  # or it could not come from another process


def _shorten(text: str) -> str:
    """A name or a value from a file may have millions of characters, which no terminal should show."""
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 500]} ... {text[-500:]}"


class FolderError(HalationError):
    """The folder that a command writes to is gone, is another one, or takes no more files."""


class RankFailure(HalationError):
    """A rank failed, hangs or disagrees with the others; the message names it."""


class Interrupted(HalationError):
    """The run was asked to stop, has saved, and the same command goes on from there."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def os_error_message(error: BaseException) -> str | None:
    """A sentence for a full, broken or read-only disk and the like, which is nobody's defect and needs no traceback."""
    if not isinstance(error, OSError) or error.errno not in RESOURCE_ERRNOS + PERMISSION_ERRNOS:
        return None
    where = f" ({error.filename})" if error.filename else ""
    action = (
        "check its permissions" if error.errno in PERMISSION_ERRNOS else "mend that, for a full disk free some space"
    )
    return f"the system refused: {error.strerror}{where}; {action}, then run the same command again"
