"""Warnings that a peer can cause at will: so many in a while, then only how many there were."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LINES_MAX = 20
WINDOW_S = 10.0


class SparseLog:
    """At most 20 lines in 10 s. Threads: one at a time."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._window_ends = 0.0
        self._num_lines = 0

    def warning(self, text: str, *values: object) -> None:
        now = self._clock()
        if now >= self._window_ends:
            if self._num_lines > LINES_MAX:
                self._log.warning("%d more lines like these", self._num_lines - LINES_MAX)
            self._window_ends, self._num_lines = now + WINDOW_S, 0
        self._num_lines += 1
        if self._num_lines <= LINES_MAX:
            self._log.warning(text, *values)
