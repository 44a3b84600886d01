"""Counts of a server's pulls, pushes and checkpoints since its start."""

import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from trireme.protocol.wire import Push


class Counts:
    """Counts by table and by stream, and the times of the last checkpoints. Threads: any.

    pulled, missing, pushed: by table, keys that were pulled, keys pulled that had no row, and keys
    with a gradient in applied pushes. pushes, examples: by stream, in applied pushes.
    num_pulls: pulls answered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.pulled: Counter[str] = Counter()
        self.missing: Counter[str] = Counter()
        self.pushed: Counter[str] = Counter()
        self.pushes: Counter[int] = Counter()
        self.examples: Counter[int] = Counter()
        self.num_pulls = 0
        self._saved_at: dict[str, float] = {}

    def add_pull(self, tables: Iterable[tuple[str, int, int]]) -> None:
        """Count an answered pull: (name, keys, keys without a row) of each table."""
        with self._lock:
            self.num_pulls += 1
            for name, num_keys, num_missing in tables:
                self.pulled[name] += num_keys
                self.missing[name] += num_missing

    def add_push(self, push: Push) -> None:
        """Count a push that has been applied for the first time."""
        with self._lock:
            self.pushes[push.stream] += 1
            self.examples[push.stream] += push.examples
            for part in push.tables:
                self.pushed[part.table] += len(part.keys)

    def note_checkpoint(self, mode: str) -> None:
        with self._lock:
            self._saved_at[mode] = time.monotonic()

    def checkpoint_ages_s(self) -> dict[str, float]:
        """Seconds since the last checkpoint of each mode."""
        with self._lock:
            now = time.monotonic()
            return {mode: now - saved_at for mode, saved_at in self._saved_at.items()}

    def read(self, counter: str) -> dict[Any, int]:
        """A copy of one of the counters, by its name."""
        with self._lock:
            return dict(getattr(self, counter))
