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
    # The errors that it came from happened below the user's line, and their texts are in its own.
    value.__cause__, value.__suppress_context__ = None, True
    return value.with_traceback(short), short


def _to_users_line(traceback: TracebackType | None) -> TracebackType | None:
    """Without the calls at the end that are ours or of libraries through which we were called. As
    it is, if it does not end in our own or if there are no others.
    """
    import sysconfig

    calls = []
    while traceback is not None:
        calls.append(traceback)
        traceback = traceback.tb_next
    if not calls:
        return None
    whole, last = calls[0], len(calls)
    if not _file(calls[-1]).startswith(_OWN):
        return whole
    libraries = (_OWN, *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
    while last and _file(calls[last - 1]).startswith(libraries):
        last -= 1
    if not last:
        return whole
    short: TracebackType | None = None
    for call in reversed(calls[:last]):
        short = TracebackType(short, call.tb_frame, call.tb_lasti, call.tb_lineno)
    return short


def _file(call: TracebackType) -> str:
    return call.tb_frame.f_code.co_filename
