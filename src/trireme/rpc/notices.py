"""When to say again that something is awaited: soon at first, then ever more seldom."""

FIRST_S = 3.0
"""Seconds until the first message of each wait. A call that lasts no longer says nothing itself."""
APART_MAX_S = 60.0


class Notices:
    """Due after FIRST_S of waiting, then each time the wait is twice as long, at most APART_MAX_S
    later. start: as of time.monotonic().
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self.next_at = start + FIRST_S

    def take_due(self, now: float) -> bool:
        """Whether to say it now; each message is due once: True moves `next_at` on."""
        if now < self.next_at:
            return False
        while self.next_at <= now:
            self.next_at += min(self.next_at - self._start, APART_MAX_S)
        return True
