"""The budget of what peers make a server hold beyond their requests."""

import os
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from trireme.errors import ResourceExhausted

ENTRY_BYTES = 256
"""Counted for each thing that is held, beside its own bytes."""


class HeldBytes:
    """Counts what outlives its request: staged pushes, contributions to meetings and their answers,
    pulls that wait, what workers have said of the job. Threads: any.

    Args:
        num_bytes_max: for all together; None: the memory of the machine.
    """

    def __init__(self, num_bytes_max: int | None = None) -> None:
        of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.num_bytes_max = num_bytes_max or of_machine
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._bytes: dict[Hashable, int] = {}

    def hold(self, what: Hashable, num_bytes: int) -> None:
        """Count `what` as this many bytes, instead of what it was counted as. Requires: it is not
        held yet. Raises ResourceExhausted: there is no room for it.
        """
        self._set(what, num_bytes, is_new=True)

    @contextmanager
    def holding(self, what: Hashable, num_bytes: int) -> Iterator[None]:
        """Hold this many bytes while the block runs. Raises ResourceExhausted."""
        self.hold(what, num_bytes)
        try:
            yield
        finally:
            self.free(what)

    def note(self, what: Hashable, num_bytes: int) -> None:
        """As `hold`, for what is held already: made of other things, or recovered."""
        self._set(what, num_bytes, is_new=False)

    @property
    def room(self) -> int:
        """Bytes that may be held beside those that are."""
        return max(self.num_bytes_max - self.num_bytes, 0)

    def free(self, what: Hashable) -> None:
        """`what` is held no more, if it was."""
        with self._lock:
            self.num_bytes -= self._bytes.pop(what, 0)

    def _set(self, what: Hashable, num_bytes: int, *, is_new: bool) -> None:
        with self._lock:
            num_bytes, before = num_bytes + ENTRY_BYTES, self._bytes.get(what, 0)
            total = self.num_bytes + num_bytes - before
            if is_new and num_bytes > before and total > self.num_bytes_max:
                raise ResourceExhausted(
                    f"server: held_bytes_max is {self.num_bytes_max}, found {total}; --limits or"
                    " TRIREME_LIMITS of the server says how much it holds"
                )
            self._bytes[what], self.num_bytes = num_bytes, total
