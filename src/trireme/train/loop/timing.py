"""Where the time of a training loop goes: seconds by activity, in it and beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class Stopwatch:
    """Adds up seconds by activity, of any threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    def measure(self, activity: str) -> Measurement:
        """Measure a `with` block, even if it raises."""
        return Measurement(self, activity)

    def timed(self, activity: str, items: Iterable[T]) -> Iterator[T]:
        """The items; measures the time until each is there."""
        iterator = iter(items)
        while True:
            with self.measure(activity):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def add(self, activity: str, seconds: float) -> None:
        with self._lock:
            self._seconds[activity] = self._seconds.get(activity, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Seconds by activity so far."""
        with self._lock:
            return dict(self._seconds)


class Measurement:
    """The `with` block of Stopwatch.measure."""

    __slots__ = ("_activity", "_started", "_watch")

    def __init__(self, watch: Stopwatch, activity: str) -> None:
        self._watch, self._activity = watch, activity

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._watch.add(self._activity, time.perf_counter() - self._started)


class Timing:
    """The time that the threads of a trainer spend.

    loop: of training threads: "wait" (for the next batch), "forward", "backward", "push" (until the
        gradients are on their way; in sync until they are staged), "pull" where the loop pulls, and
        "compute" where compute workers run the model, in place of "forward" and "backward".
    background: of the threads beside them: "read", "parse", "unique" (distinct keys), "pull",
        "push".
    """

    def __init__(self) -> None:
        self.loop, self.background = Stopwatch(), Stopwatch()


LOOP = ("wait", "pull", "forward", "backward", "compute", "push")
BACKGROUND = ("read", "parse", "unique", "pull", "push")


@dataclass(frozen=True)
class _Clocks:
    """Clocks and counters at one moment."""

    time_s: float
    batches: int
    examples: int
    loop: Mapping[str, float]
    background: Mapping[str, float]


class TimeReport:
    """Reports after every `period` batches, and at the end, where the time went. The parts of the
    loop and its "other" add up to the elapsed time, times the number of threads. What happens
    behind the loop costs it time only as "wait". source: its `seconds`, if any, are those of
    reading and parsing.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        timing: Timing,
        source: object,
        *,
        period: int,
        threads: int,
    ) -> None:
        self._say, self._timing, self._source = say, timing, source
        self._period, self._threads = period, threads
        self._batches = self._examples = 0
        self._first = self._last = self._read()

    def observe(self, examples: int) -> None:
        """Count a batch after its step."""
        self._batches += 1
        self._examples += examples
        if self._batches % self._period == 0:
            before, self._last = self._last, self._read()
            self._say(f"batch {self._batches}: {self._between(before, self._last)}")

    def end(self) -> None:
        """Report on all batches."""
        self._say(f"all {self._batches} batches: {self._between(self._first, self._read())}")

    def _read(self) -> _Clocks:
        # The source's replace "read", which for one that reads ahead is waiting.
        background = self._timing.background.read() | getattr(self._source, "seconds", {})
        loop = self._timing.loop.read()
        return _Clocks(time.perf_counter(), self._batches, self._examples, loop, background)

    def _between(self, before: _Clocks, after: _Clocks) -> str:
        wall_s = max(after.time_s - before.time_s, 1e-9)
        loop = _differences(LOOP, before.loop, after.loop)
        background = _differences(BACKGROUND, before.background, after.background)
        loop["other"] = max(wall_s * self._threads - sum(loop.values()), 0.0)
        threads = "" if self._threads == 1 else f" of {self._threads} threads"
        return (
            f"{after.batches - before.batches} in {wall_s:.3f} s,"
            f" {(after.examples - before.examples) / wall_s:,.0f} examples/s;"
            f" loop{threads}: {_list(loop)}; behind it: {_list(background)}"
        )


def _differences(
    names: Iterable[str], before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0.0) for name in names if name in after}


def _list(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f} s" for name, value in seconds.items())
