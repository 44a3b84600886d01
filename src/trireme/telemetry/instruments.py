"""Instruments: numbers by labels that Prometheus collects.

These cost a third of the instruments of Prometheus' client where requests are counted: one lock and
one search per observation. The collected families and their format are the client's.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

Labels = tuple[str, ...]

SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Upper bounds of durations, from a call over loopback to a wait for another process."""


class Counter:
    """Numbers that only grow, one per combination of labels. Threads: any. name: ends in _total.
    labels: names; `add` takes their values in this order. Values from peers must be of a bounded
    set.
    """

    def __init__(self, name: str, documentation: str, labels: Sequence[str] = ()) -> None:
        self._name, self._documentation, self._labels = name, documentation, tuple(labels)
        self._lock = threading.Lock()
        self._values: dict[Labels, float] = {} if labels else {(): 0}

    def add(self, number: float, *labels: str) -> None:
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + number

    def read(self) -> dict[Labels, float]:
        with self._lock:
            return dict(self._values)

    def collect(self) -> Iterator[Metric]:
        yield _family(self._name, self._documentation, self._labels, self.read())


class Histogram:
    """Counts of observations per combination of labels, in the first bucket with a bound >= the
    value. bounds: ascending. Threads: any.
    """

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name, self._documentation, self._labels = name, documentation, tuple(labels)
        self._bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, value: float, *labels: str) -> None:
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            counts = self._counts.get(labels)
            if counts is None:
                counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
                self._sums[labels] = 0.0
            counts[bucket] += 1
            self._sums[labels] += value

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            read = [(key, list(counts), self._sums[key]) for key, counts in self._counts.items()]
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, counts, total in read:
            family.add_metric(labels, _cumulated(self._bounds, counts), total)
        yield family


LabeledNumbers = Mapping[Labels, float]
Numbers = float | Mapping[Any, Any] | None
"""Of a gauge: one number, or Numbers by the values of its first label. None: there is none now."""


class Gauge:
    """Numbers that are read when Prometheus asks for them; a counter if the name ends in _total.
    read: from any thread.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        read: Callable[[], Numbers],
        labels: Sequence[str] = (),
    ) -> None:
        self._name, self._documentation, self._labels = name, documentation, tuple(labels)
        self._read = read

    def collect(self) -> Iterator[Metric]:
        values = dict(_by_labels(self._read()))
        yield _family(self._name, self._documentation, self._labels, values)


def _by_labels(numbers: Numbers, labels: Labels = ()) -> Iterator[tuple[Labels, float]]:
    if isinstance(numbers, Mapping):
        for label, part in numbers.items():
            yield from _by_labels(part, (*labels, str(label)))
    elif numbers is not None:
        yield labels, numbers


def _family(
    name: str, documentation: str, labels: Sequence[str], values: LabeledNumbers
) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, documentation, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def histogram_family(
    name: str, documentation: str, bounds: Sequence[float], values: Mapping[int, int]
) -> HistogramMetricFamily:
    """A histogram of whole numbers. values: number -> occurrences."""
    counts = [0] * (len(bounds) + 1)
    for value, count in values.items():
        counts[bisect_left(bounds, value)] += count
    total = float(sum(value * count for value, count in values.items()))
    family = HistogramMetricFamily(name, documentation, labels=())
    family.add_metric((), _cumulated(bounds, counts), total)
    return family


def _cumulated(bounds: Sequence[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    buckets, below = [], 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(below)))
    return buckets
