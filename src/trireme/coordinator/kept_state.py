"""When the coordinator's state is written: before any answer that relies on it.

Each part returns its `state` in msgpack's types; its `install` is the inverse.
"""

from collections.abc import Callable
from typing import Any

State = dict[str, Any]


class KeptState:
    """Collects the state and writes it. write: writes it, or raises; None: it is not kept.
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
