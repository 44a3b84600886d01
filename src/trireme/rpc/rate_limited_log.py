"""A log for warnings that peers can cause at will, with a limited number of lines."""

import logging
import time
from collections.abc import Callable

LINES_MAX = 20
WINDOW_S = 10.0


class RateLimitedLog:
    """Writes at most 20 lines in 10 s, and one more with the number of suppressed lines about
    `kind`. Threads: one at a time.
    """

    def __init__(
        self, log: logging.Logger, kind: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._kind, self._clock = log, kind, clock
        self._window_ends = 0.0
        self._num_lines = 0

    @property
    def is_behind(self) -> bool:
        """Whether lines were suppressed that `check` or `flush` has not counted yet."""
        return self._num_lines > LINES_MAX

    def warning(self, text: str, *values: object) -> None:
        self.check()
        now = self._clock()
        if now >= self._window_ends:
            self._window_ends, self._num_lines = now + WINDOW_S, 0
        self._num_lines += 1
        if self._num_lines <= LINES_MAX:
            self._log.warning(text, *values)

    def check(self) -> None:
        """Log the number of suppressed lines if the 10 s are over."""
        if self.is_behind and self._clock() >= self._window_ends:
            self.flush()

    def flush(self) -> None:
        """Log the number of suppressed lines."""
        if self.is_behind:
            num = self._num_lines - LINES_MAX
            self._log.warning("%d more lines like these, about %s", num, self._kind)
            self._num_lines = LINES_MAX
