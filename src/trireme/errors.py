"""The errors of Trireme. The C++ core and the wire use the same names::

    TriremeError
    |-- BadRequest (ValueError)             the call is wrong: fix it
    |   |-- DataError                       a line or file of the data is wrong: fix it or skip it
    |   |-- Absent (AttributeError)         a name of Fleet without a counterpart: write another
    |   |-- NotFinite (ArithmeticError)     outputs, loss or gradients are NaN or infinite
    |   `-- Superseded                      another model took the rows: rename its tables
    |-- WrongMap                            the bucket map changed: refresh it, send again
    |-- UnknownTable (LookupError)          no such table or block: create it first
    |-- SchemaMismatch (ValueError)         another schema of this name: rename one or equal them
    |-- NotReady                            not yet: retry
    |-- Fenced                              a newer process has taken over: stop
    |-- ResourceExhausted                   a limit is reached: slow down or raise the limit
    |-- Corruption                          stored or received bytes are damaged: use another copy
    |-- Unavailable (ConnectionError)       a process cannot be reached: retry with the same push id
    |   `-- NotAdmitted                     a server does not list this key: have it listed
    |-- DeadlineExceeded (TimeoutError)     no answer in time: retry with the same push id
    |-- Internal (RuntimeError)             a bug of Trireme: report it
    `-- Leased                              a pass on a device has the rows: wait for its end

Stopped is not an error: a process that was asked to stop, and has, exits with 0; after Ctrl-C with
130.
"""

import errno
import math
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOCALE = ": set PYTHONUTF8=1, or a locale of UTF-8, such as LC_ALL=C.UTF-8"


class TriremeError(Exception):
    """Base of all errors.

    Attributes:
        code: permanent; identifies the class on the wire.
        retry: whether the same call may succeed later.
        details: values for programs, which are sent with the error.
    """

    code: ClassVar[int] = 0
    name: ClassVar[str] = ""
    retry: ClassVar[bool] = False
    details: dict[str, Any] | None = None


class BadRequest(TriremeError, ValueError):
    """The call itself is wrong; nothing was changed. Fix the call."""

    code, name = 1, "BAD_REQUEST"
    is_of_script = False  # see wrong_argument


class DataError(BadRequest):
    """Input data is wrong. The message names file, line and value."""


class Absent(BadRequest, AttributeError):  # type: ignore[misc]  # Python sets its `name`
    """A name of Fleet or paddle without a counterpart here; the message says what to write.
    hasattr(module, name) is False, as a script expects that asks what there is.
    """


class NotFinite(BadRequest, ArithmeticError):
    """NaN or infinity in a model's outputs, loss or gradients. The message names the examples, the
    table and key, or the parameter; nothing of their batch was pushed or applied.
    """


class Superseded(BadRequest):
    """Another model of this process has begun anew with the names of this one, whose rows are gone.
    The message says which, and how to have both.
    """


class WrongMap(TriremeError):
    """Planned with another version of the bucket map; nothing was applied. Refresh, send again."""

    code, name, retry = 2, "WRONG_MAP", True


class UnknownTable(TriremeError, LookupError):
    """No table or block of that name exists here. Create it first."""

    code, name = 3, "UNKNOWN_TABLE"


class SchemaMismatch(TriremeError, ValueError):
    """The name has another schema; the message shows what differs. Rename one or equal them."""

    code, name = 4, "SCHEMA_MISMATCH"


class NotReady(TriremeError):
    """Something that the call needs does not exist yet. Retry until the deadline."""

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
    """A server does not list the public key of this process, and told it nothing else."""

    retry = False


class DeadlineExceeded(TriremeError, TimeoutError):
    """No answer within the deadline. Calling again with the same push id is safe."""

    code, name, retry = 10, "DEADLINE_EXCEEDED", True


class Internal(TriremeError, RuntimeError):
    """A bug of Trireme. Please report it with the message."""

    code, name = 11, "INTERNAL"


class Leased(TriremeError):
    """A pass on a device of some worker has the rows and dense weights, which `details` name;
    nothing was changed. Wait for its end.
    """

    code, name, retry = 12, "LEASED", True


class Stopped(SystemExit):
    """Training has stopped after a step because it was asked to; the process exits with `code`.

    Attributes:
        reason: who asked.
    """

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(code)
        self.reason = reason


PERMANENT = (DataError, NotFinite, Absent, Superseded, SchemaMismatch)
"""What the same script, started again, meets again; unless a disk or network has caused it."""
CLASSES = tuple(TriremeError.__subclasses__())
"""The classes with a code of their own, in the order of the codes."""


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Convert the OSErrors of a block that writes files.

    what: begins their messages, for example "Dump: cannot write PATH".

    Raises ResourceExhausted: the disk is full. BadRequest: another OSError, as a name that the
    locale cannot spell.
    """
    try:
        yield
    except TriremeError:  # some are OSErrors too, but not of a file
        raise
    except OSError as error:
        kind = ResourceExhausted if error.errno in _FULL else BadRequest
        raise kind(f"{what}: {error.strerror or error}") from error
    except UnicodeEncodeError as error:
        raise BadRequest(f"{what}: {error}{_LOCALE}") from error


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Raises Corruption if a block that reads this file finds that the disk cannot read it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EBADMSG, errno.EUCLEAN):
            raise
        raise Corruption(f"{path}: expected to read it, found {error.strerror}") from error


@contextmanager
def looking(path: object) -> Iterator[None]:
    """Raises BadRequest for an OSError of a block that looks whether a path is there: it is below a
    folder that may not be entered, or its name is too long, or the locale cannot spell it.
    """
    try:
        os.fsencode(str(path))  # else Python says that it is not there
        yield
    except UnicodeEncodeError as error:
        raise BadRequest(f"cannot look for {path}: {error}{_LOCALE}") from error
    except OSError as error:
        raise BadRequest(f"cannot look for {path}: {error.strerror or error}") from error


def is_file(path: Path) -> bool:
    """Whether it is a file. Raises BadRequest: as `looking`."""
    with looking(path):
        return path.is_file()


def as_error(error: Exception) -> TriremeError:
    """What ends a call by an exception of Python. ResourceExhausted: the system gives this process
    no memory, or no thread; else Internal.
    """
    if isinstance(error, MemoryError):
        return ResourceExhausted(f"expected memory for this call, found none: {error}")
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return ResourceExhausted(
            "expected one more thread, found that the system refuses it: allow the process more"
            " (ulimit -u, pids.max of its cgroup), or more memory"
        )
    return Internal(f"{type(error).__name__}: {error}")


def start_thread(thread: Thread) -> None:
    """Raises ResourceExhausted: the system lets this process have no more threads."""
    try:
        thread.start()
    except RuntimeError as error:
        raise as_error(error) from error


# How arguments are checked: each of these raises BadRequest with what it expected and what it got.


def wrong_argument(text: str) -> BadRequest:
    """Of what a script says, whatever the state of the job: started again, it meets it again."""
    error = BadRequest(text)
    error.is_of_script = True
    return error


def check_flags(subject: str, **flags: object) -> None:
    """Raises BadRequest: one is neither True nor False; None is the default of its taker."""
    for name, value in flags.items():
        if value is not None:
            check_kind(subject, name, value, bool, "True or False")


def check_counts(subject: str, low: int = 1, **counts: object) -> None:
    """Raises BadRequest: one is no whole number >= low."""
    for name, value in counts.items():
        check_kind(subject, name, value, int, f"an integer >= {low}")
        is_count = value >= low  # type: ignore[operator]  # a number
        check_values(subject, **{name: (is_count, f"as an integer >= {low}", value)})


_RANGES = {
    ">= 0": lambda number: number >= 0,
    "> 0": lambda number: number > 0,
    "in [0, 1]": lambda number: 0 <= number <= 1,
    "in [0, 1)": lambda number: 0 <= number < 1,
    "in (0, 1]": lambda number: 0 < number <= 1,
}


def check_numbers(subject: str, expected: str, **numbers: object) -> None:
    """Raises BadRequest: one is no finite number in this range, one of _RANGES."""
    for name, value in numbers.items():
        check_kind(subject, name, value, float, f"a finite number {expected}")
        is_right = _RANGES[expected](value) and value < math.inf  # type: ignore[operator]  # as above
        check_values(subject, **{name: (is_right, f"as a finite number {expected}", value)})


def check_choice(subject: str, choices: Collection[str], **values: object) -> None:
    """Raises BadRequest: one is none of these words."""
    for name, value in values.items():
        is_known = isinstance(value, str) and value in choices
        check_values(subject, **{name: (is_known, f"as one of {', '.join(choices)}", value)})


def check_known(subject: str, what: str, known: Collection[str], names: Iterable[str]) -> None:
    """Raises BadRequest: some of these names are none of the known ones. what: they are."""
    if unknown := [name for name in names if name not in known]:
        shown = ", ".join(known) or "(none)"
        raise wrong_argument(f"{subject}: expected {what} {shown}, found {', '.join(unknown)}")


def check_kind(
    subject: str, name: str, value: object, kind: type | tuple[type, ...], expected: str
) -> None:
    """Raises BadRequest: the argument is of another type. kind: int stands for whole numbers and
    float for numbers of any type but bool, bool for 0 and 1, each also as an array of no dimension.
    expected: the type in words, with an example if it helps.
    """
    kind = Integral if kind is int else kind
    if kind in (bool, float):
        is_number = hasattr(value, "__float__") and getattr(value, "shape", ()) == ()
        if is_number and (value in (0, 1) if kind is bool else not isinstance(value, bool)):
            return
    elif isinstance(value, kind) and not (kind is Integral and isinstance(value, bool)):
        return
    shown = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
    shown = shown if len(shown) <= 80 else type(value).__name__
    raise wrong_argument(f"{subject}: expected {name} as {expected}, found {shown}")


def check_values(subject: str, **conditions: tuple[bool, str, object]) -> None:
    """For what the others do not cover, of values whose kinds are right. Raises BadRequest for the
    first condition that does not hold.

    conditions: name of a value -> (whether it is valid, what is expected, the value).
    """
    for name, (is_valid, expected, value) in conditions.items():
        if not is_valid:
            raise wrong_argument(f"{subject}: expected {name} {expected}, found {value!r}")


_CLASS_OF_CODE = {cls.code: cls for cls in CLASSES}


def class_of_code(code: int) -> type[TriremeError]:
    """The class of a code from the core or the wire; Internal for an unknown one."""
    return _CLASS_OF_CODE.get(code, Internal)
