"""This process as the parent of what its descendants leave behind."""

import contextlib
import ctypes
from collections.abc import Iterator

from trireme.children.keeper_program import PR_SET_CHILD_SUBREAPER, prctl

_PR_GET_CHILD_SUBREAPER = 37


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """While the block runs, descendants whose parents end become children of this process. Raises
    OSError: the kernel refuses.
    """
    before = _adopts()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before)


def _adopts() -> int:
    adopts = ctypes.c_int()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({_PR_GET_CHILD_SUBREAPER})")
    return adopts.value
