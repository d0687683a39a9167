"""Exit codes of every command, and which error leads to which. Scripts rely on them: never renumber (docs/cli.md)."""

from __future__ import annotations

from enum import IntEnum

import click

from kvstore import errors


class Exit(IntEnum):
    OK = 0
    ERROR = 1
    USAGE = 2
    """Wrong arguments or settings: nothing was done."""
    UNREACHABLE = 3
    """No daemon answers."""
    NOT_FOUND = 4
    DEGRADED = 5
    """The daemon serves, but not with everything it was given."""
    DENIED = 6
    CORRUPTION = 7
    """Stored bytes are proven to be damaged."""


class Failure(click.ClickException):
    """Ends a command with one sentence on standard error, and `code`. `hint` says what to do."""

    def __init__(self, message: str, code: Exit = Exit.ERROR, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


class Unreachable(Failure):
    """No daemon answers. The hint is the command that starts one."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, Exit.UNREACHABLE, hint)


_CODES: dict[type[errors.KVStoreError], Exit] = {
    errors.Invalid: Exit.USAGE,
    errors.Denied: Exit.DENIED,
    errors.Corrupt: Exit.CORRUPTION,
    errors.Closed: Exit.UNREACHABLE,
}


def failure_of(error: errors.KVStoreError | OSError) -> Failure:
    """The Failure that tells of `error`; other kinds than those of the table are plain errors (1)."""
    if isinstance(error, PermissionError):
        what = f"{error.filename}: permission denied" if error.filename else "permission denied"
        return Failure(what, Exit.DENIED, "run it as root or as the user who runs the daemon")
    if isinstance(error, FileNotFoundError):
        return Failure(f"{error.filename}: no such file", Exit.NOT_FOUND)
    if isinstance(error, OSError):
        return Failure(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    return Failure(str(error), _CODES.get(type(error), Exit.ERROR))
