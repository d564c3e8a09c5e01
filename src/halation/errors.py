"""The errors people see: what was found, what was expected, what to do, and the exit code each one means."""

from __future__ import annotations

import errno

RESOURCE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)


class HalationError(Exception):
    """Something a person should read; the command line prints it without a traceback."""

    exit_code = 1


class InputError(HalationError):
    """Bad input or settings: found, expected, and what to do about it."""

    exit_code = 2

    def __init__(self, found: str, expected: str, action: str) -> None:
        super().__init__(f"{found}\n  expected: {expected}\n  to do:    {action}")
        self.found = found
        self.expected = expected
        self.action = action

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        return type(self), (self.found, self.expected, self.action)  # or it could not come from another process


class RankFailure(HalationError):
    """A rank failed, hangs or disagrees with the others; the message names it."""


class Interrupted(HalationError):
    """The run was asked to stop, has saved, and the same command goes on from there."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def os_error_message(error: BaseException) -> str | None:
    """A sentence for a full, broken or read-only disk and the like, which is nobody's defect and needs no traceback."""
    if not isinstance(error, OSError) or error.errno not in RESOURCE_ERRNOS:
        return None
    where = f" ({error.filename})" if error.filename else ""
    return f"the system refused: {error.strerror}{where}; mend that, for a full disk free some space, then run the same command again"
