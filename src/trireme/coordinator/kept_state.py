"""When the coordinator's state is written: before any answer that relies on it.

Each part returns its `state` in msgpack's types; its `install` is the inverse.
"""

from collections.abc import Callable
from typing import Any

State = dict[str, Any]


class KeptState:
    """Collects the state and writes it where it is kept. A write that failed is tried again."""

    def __init__(self, collect: Callable[[], State]) -> None:
        self._collect = collect
        self._write: Callable[[State], None] | None = None
        self._is_changed = False

    def keep(self, write: Callable[[State], None]) -> None:
        """Write the state from now on. `write` raises if it cannot."""
        self._write = write

    def note_change(self) -> None:
        """The state has changed, or may have, since it was last written."""
        self._is_changed = True

    def flush(self) -> None:
        """Write the state if it has changed."""
        if self._write is not None and self._is_changed:
            self._write(self._collect())
        self._is_changed = False

    def flush_change(self) -> None:
        """Write the state, which has just changed."""
        self.note_change()
        self.flush()
