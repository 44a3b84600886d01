"""Tracebacks of Trireme's errors end at the user's line: what lies below it is ours to know.

`python -X dev` shows them whole, and so do errors that are bugs of Trireme (`Internal`).
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any

_OWN = os.path.dirname(__file__) + os.sep


def shorten() -> None:
    """From now on, in this process and in the cells of its notebook."""
    if sys.flags.dev_mode or hasattr(sys.excepthook, "is_of_trireme"):
        return
    before = sys.excepthook

    def show(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, *_shown(value, traceback))

    show.is_of_trireme = True  # type: ignore[attr-defined]
    sys.excepthook = show
    if "IPython" in sys.modules:
        _shorten_in_cells(sys.modules["IPython"].get_ipython())


def _shorten_in_cells(shell: Any) -> None:
    """shell: IPython's, or None. It shows errors itself; handlers of the user's own stay."""
    if shell is None or shell.custom_exceptions:
        return
    from trireme.errors import TriremeError

    def show(
        shell: Any, kind: type[BaseException], value: BaseException, traceback: Any, tb_offset: Any
    ) -> None:
        shell.showtraceback((kind, *_shown(value, traceback)), tb_offset=tb_offset)

    shell.set_custom_exc((TriremeError,), show)


def _shown(
    value: BaseException, traceback: TracebackType | None
) -> tuple[BaseException, TracebackType | None]:
    """The error as it is shown. One that is caught keeps all: nobody has called this then."""
    from trireme.errors import Internal, TriremeError

    if isinstance(value, Internal) or not isinstance(value, TriremeError):
        return value, traceback
    short = _to_users_line(traceback)
    if short is traceback:
        return value, traceback
    # Errors that happened below the user's line have their texts in its own; the user's stay.
    before = _before(value)
    while before is not None and not _concerns_user(before):
        before = _before(before)
    value.__cause__, value.__context__, value.__suppress_context__ = None, before, False
    return value.with_traceback(short), short


def _before(error: BaseException) -> BaseException | None:
    """The error that Python would show above this one."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _concerns_user(error: BaseException) -> bool:
    """Whether an error was caught by others than Trireme, or passed through a script."""
    files = list(map(_file, _calls(error.__traceback__)))
    packages = _folders("purelib", "platlib")
    scripts = [
        f for f in files if not f.startswith((_OWN, *packages, *_folders("stdlib", "platstdlib")))
    ]
    return bool(scripts) or bool(files and not files[0].startswith(_OWN))


def _to_users_line(traceback: TracebackType | None) -> TracebackType | None:
    """Without the calls at the end that are ours or of libraries through which we were called. As
    it is, if it does not end in our own or if there are no others.
    """
    calls = _calls(traceback)
    if not calls:
        return None
    whole, last = calls[0], len(calls)
    if not _file(calls[-1]).startswith(_OWN):
        return whole
    while last and _is_below_user(_file(calls[last - 1])):
        last -= 1
    if not last:
        return whole
    short: TracebackType | None = None
    for call in reversed(calls[:last]):
        short = TracebackType(short, call.tb_frame, call.tb_lasti, call.tb_lineno)
    return short


def _calls(traceback: TracebackType | None) -> list[TracebackType]:
    calls = []
    while traceback is not None:
        calls.append(traceback)
        traceback = traceback.tb_next
    return calls


def _is_below_user(file: str) -> bool:
    """Ours, torch or Python's. Other packages may be the user's program, which was installed."""
    packages, standard = _folders("purelib", "platlib"), _folders("stdlib", "platstdlib")
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    known = (_OWN,) if torch is None else (_OWN, os.path.dirname(torch) + os.sep)
    return file.startswith(known) or (file.startswith(standard) and not file.startswith(packages))


def _folders(*names: str) -> tuple[str, ...]:
    import sysconfig

    return tuple(sysconfig.get_path(name) + os.sep for name in names)


def _file(call: TracebackType) -> str:
    """Of the module: code that it makes has no file, such as a dataclass's __init__."""
    made = call.tb_frame.f_globals.get("__file__")
    return made if isinstance(made, str) else call.tb_frame.f_code.co_filename
