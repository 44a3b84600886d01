"""Whether a process serves, and the reasons if not."""

import threading

STARTING = "start"


class Health:
    """The reasons why a process does not serve, by topic; at first one. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons = {STARTING: "not open yet"}

    def opened(self) -> None:
        self.clear(STARTING)

    def hinder(self, topic: str, reason: str) -> None:
        """Add a reason, or replace that of the same topic."""
        with self._lock:
            self._reasons[topic] = reason

    def clear(self, topic: str) -> None:
        """Remove the reason of a topic, if there is one."""
        with self._lock:
            self._reasons.pop(topic, None)

    def reasons(self) -> list[str]:
        """All reasons; empty: the process serves."""
        with self._lock:
            return list(self._reasons.values())
