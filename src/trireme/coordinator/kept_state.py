"""When the coordinator's state is written: before any answer that relies on it.

Not thread-safe: the coordinator locks.
"""

from collections.abc import Callable
from typing import Any

State = dict[str, Any]
"""In msgpack's types."""


class KeptState:
    """collect: returns the state.

    Attributes:
        write: writes the state, or raises; None: it is not kept.
        is_changed: since it was last written. A write that failed is tried again.
    """

    def __init__(self, collect: Callable[[], State]) -> None:
        self._collect = collect
        self.write: Callable[[State], None] | None = None
        self.is_changed = False

    def flush(self) -> None:
        """Write the state if it has changed."""
        if self.write is not None and self.is_changed:
            self.write(self._collect())
        self.is_changed = False

    def flush_change(self) -> None:
        """Write the state, which has just changed."""
        self.is_changed = True
        self.flush()
