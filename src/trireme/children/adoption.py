"""This process as the parent of what its descendants leave behind."""

import contextlib
from collections.abc import Iterator

from trireme.children.keeper_program import PR_SET_CHILD_SUBREAPER, prctl


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """While the block runs, descendants whose parents end become children of this process. Raises
    OSError: the kernel refuses.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)
