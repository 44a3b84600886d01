"""Every error that Trireme raises by name.

The same names stand in the C++ core, on the wire and here::

    TriremeError
    |-- BadRequest (ValueError)             the call is wrong: fix it
    |   |-- DataError                       a line or file of the data is wrong: fix it or skip it
    |   `-- NotFinite (ArithmeticError)     a model's outputs or loss are NaN or infinite
    |-- WrongMap                            the bucket map changed: refresh, re-send (clients do)
    |-- UnknownTable (LookupError)          no such table or block: create it first
    |-- SchemaMismatch (ValueError)         another schema of this name: rename one or equal them
    |-- NotReady                            not yet: retry
    |-- Fenced                              a newer process has taken over: stop
    |-- ResourceExhausted                   a limit is reached: slow down or raise the limit
    |-- Corruption                          stored or received bytes are damaged: use another copy
    |-- Unavailable (ConnectionError)       a process cannot be reached: retry with the same push id
    |   `-- NotAdmitted                     a server does not list this key: have it listed
    |-- DeadlineExceeded (TimeoutError)     no answer in time: retry with the same push id
    `-- Internal (RuntimeError)             our mistake: report it

Stopped is none of them: who is asked to stop, and has, exits with 0.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TriremeError(Exception):
    """Base of all errors here. `code` is permanent; `retry`: the same call may succeed later."""

    code: ClassVar[int] = 0
    name: ClassVar[str] = ""
    retry: ClassVar[bool] = False
    details: dict[str, Any] | None = (
        None  # values for programs, where the error has some; travels with it
    )


class BadRequest(TriremeError, ValueError):
    """The call itself is wrong; nothing was changed. Fix the call."""

    code, name = 1, "BAD_REQUEST"


class DataError(BadRequest):
    """Input data is wrong. The message names file, line and value."""


class NotFinite(BadRequest, ArithmeticError):
    """A model's outputs or loss are NaN or infinite, or the gradients of a step that is clipped by
    their norm. The message names the examples; nothing of their batch was pushed or applied.
    """


class WrongMap(TriremeError):
    """Planned with another version of the bucket map; nothing was applied. Refresh, re-send."""

    code, name, retry = 2, "WRONG_MAP", True


class UnknownTable(TriremeError, LookupError):
    """No table or block of that name exists here. Create it first."""

    code, name = 3, "UNKNOWN_TABLE"


class SchemaMismatch(TriremeError, ValueError):
    """The name has another schema; the message shows both. Rename one or make them equal."""

    code, name = 4, "SCHEMA_MISMATCH"


class NotReady(TriremeError):
    """What the call needs does not exist yet, but is expected. Retry until the deadline."""

    code, name, retry = 5, "NOT_READY", True


class Fenced(TriremeError):
    """A newer incarnation of this process has taken over. Stop; do not retry."""

    code, name = 6, "FENCED"


class ResourceExhausted(TriremeError):
    """A limit is reached. Slow down and retry, or raise the limit that the message names."""

    code, name, retry = 7, "RESOURCE_EXHAUSTED", True


class Corruption(TriremeError):
    """Stored or received bytes are damaged. Restore from another copy."""

    code, name = 8, "CORRUPTION"


class Unavailable(TriremeError, ConnectionError):
    """The process cannot be reached. Calling again with the same push id is safe."""

    code, name, retry = 9, "UNAVAILABLE", True


class NotAdmitted(Unavailable):
    """A server does not list the public key of this process: it said so, and nothing else."""

    retry = False


class DeadlineExceeded(TriremeError, TimeoutError):
    """No answer within the deadline. Calling again with the same push id is safe."""

    code, name, retry = 10, "DEADLINE_EXCEEDED", True


class Internal(TriremeError, RuntimeError):
    """A mistake of Trireme's own. Please report it with the message."""

    code, name = 11, "INTERNAL"


class Stopped(SystemExit):
    """Training was asked to stop and has done so after a step; the exit code of the process is 0.

    Attributes:
        reason: who has asked.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason


CLASSES: tuple[type[TriremeError], ...] = (
    BadRequest,
    WrongMap,
    UnknownTable,
    SchemaMismatch,
    NotReady,
    Fenced,
    ResourceExhausted,
    Corruption,
    Unavailable,
    DeadlineExceeded,
    Internal,
)


@contextmanager
def writing(what: str) -> Iterator[None]:
    """A block that writes files. `what`, as "Dump: cannot write PATH", begins its errors.

    Raises:
        ResourceExhausted: the disk is full. BadRequest: another OSError.
    """
    try:
        yield
    except TriremeError:  # some are OSErrors too: of a process, not of a file
        raise
    except OSError as error:
        kind = ResourceExhausted if error.errno in _FULL else BadRequest
        raise kind(f"{what}: {error.strerror or error}") from error


_CLASS_OF_CODE = {cls.code: cls for cls in CLASSES}


def class_of_code(code: int) -> type[TriremeError]:
    """The class of a code from the core or the wire; Internal for a code of a newer version."""
    return _CLASS_OF_CODE.get(code, Internal)
