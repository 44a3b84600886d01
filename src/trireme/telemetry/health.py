"""Whether a process serves, and if not, why."""

from __future__ import annotations

import threading

STARTING = "start"


class Health:
    """The reasons for which a process does not serve, by what they concern. Threads: any.

    It begins with one: it has not opened yet.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons = {STARTING: "not open yet"}

    def opened(self) -> None:
        self.clear(STARTING)

    def hinder(self, what: str, reason: str) -> None:
        """It does not serve for this reason, until `what` is cleared."""
        with self._lock:
            self._reasons[what] = reason

    def clear(self, what: str) -> None:
        """`what` hinders it no more, if it did."""
        with self._lock:
            self._reasons.pop(what, None)

    def reasons(self) -> list[str]:
        """Empty: it serves."""
        with self._lock:
            return list(self._reasons.values())
