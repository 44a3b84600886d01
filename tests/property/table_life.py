"""Lifetimes of rows for the table model: statistics, expiry, limits."""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from tests.tables import MASK, mix64
from trireme import _core

DAY = 86_400
KEPT_MIN = 64  # removed keys that a bucket remembers, if it has no more rows
SLACK = 16


def power(base: float, n: int) -> float:
    """By squaring: `**` may round otherwise."""
    result = 1.0
    while n > 0:
        if n & 1:
            result *= base
        base *= base
        n >>= 1
    return result


@dataclass(frozen=True)
class Policy:
    """As _core.PolicyConfig; `max_rows` of a bucket."""

    is_scored: bool = False
    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0
    decay_rate: float = 1.0
    delete_threshold: float = 0.0
    delete_after_unseen_days: int | None = None
    ttl_s: int | None = None
    max_rows: int | None = None

    def config(self) -> _core.PolicyConfig:
        max_rows = None if self.max_rows is None else self.max_rows * 4096 + 4095
        return _core.PolicyConfig(**{**vars(self), "max_rows": max_rows})

    def score(self, show: float, click: float) -> float:
        return (show - click) * self.nonclk_coeff + click * self.click_coeff


@dataclass
class Statistics:
    version: int = 0
    time: int = 0
    show: float = 0.0
    click: float = 0.0
    delta_score: float = 0.0
    feature: int = 0

    def days_to(self, time: int) -> int:
        return time // DAY - self.time // DAY if 0 < self.time < time else 0

    def pack(self, is_scored: bool) -> bytes:
        values = list(vars(self).values())
        return struct.pack("<IIddfI", *values) if is_scored else struct.pack("<II", *values[:2])

    @classmethod
    def unpack(cls, packed: bytes) -> Statistics:
        return cls(*struct.unpack("<IIddfI" if len(packed) == 32 else "<II", packed))


@dataclass(frozen=True)
class Columns:
    """What a push says besides keys and gradients."""

    time: int = 0
    version: int = 0
    show_click: np.ndarray | None = None
    features: np.ndarray | None = None


NOTHING = Columns()


class Life:
    """The statistics of each row, and the keys that were removed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.version = 0
        self.statistics: dict[int, Statistics] = {}
        self.counters = Counter(admitted=0, rejected=0, expired=0, evicted=0)
        self._removed: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of version, key
        self._forgotten = Counter[int]()

    @property
    def row_bytes(self) -> int:
        return 32 if self.policy.is_scored else 8

    def score(self, show: float, click: float) -> float:
        policy = self.policy
        return (show - click) * policy.nonclk_coeff + click * policy.click_coeff

    def push(self, key: int, i: int, columns: Columns) -> None:
        """The i-th key of a push, which has a row by now."""
        row = self.statistics.setdefault(key, Statistics())
        if columns.show_click is not None:
            show, click = columns.show_click[i].tolist()
            decay = power(self.policy.decay_rate, row.days_to(columns.time))
            row.show, row.click = row.show * decay + show, row.click * decay + click
            row.delta_score = float(np.float32(row.delta_score + self.score(show, click)))
            if columns.features is not None:
                row.feature = int(columns.features[i])
        row.version, row.time = self.version, max(row.time, columns.time)

    def effective(self, key: int, time: int, *, day_over: bool) -> tuple[float, float]:
        row = self.statistics.get(key)
        if row is None:
            return 0.0, 0.0
        decay = power(self.policy.decay_rate, row.days_to(time) + day_over)
        return row.show * decay, row.click * decay

    def is_expired(self, key: int, time: int, *, day_over: bool) -> bool:
        policy, row = self.policy, self.statistics[key]
        if policy.ttl_s is not None and row.time and time - row.time > policy.ttl_s:
            return True
        if not policy.is_scored:
            return False
        days = policy.delete_after_unseen_days
        if days is not None and row.days_to(time) > days:
            return True
        score = self.score(*self.effective(key, time, day_over=day_over))
        return score < policy.delete_threshold

    def surplus(self, keys: Collection[int], marks: int) -> list[int]:
        """The rows of a bucket that its limit removes; `marks`: the sum of its marks."""
        limit = self.policy.max_rows
        if limit is None or len(keys) <= limit:
            return []

        def age(key: int) -> tuple[int, int, int]:
            row = self.statistics[key]
            return row.time, row.version, mix64(key ^ mix64(marks & MASK))

        return sorted(keys, key=age)[: len(keys) - (limit - limit // SLACK)]

    def remove(self, bucket: int, key: int, num_rows: int) -> None:
        """`num_rows`: that the bucket has without it."""
        del self.statistics[key]
        removed = self._removed[bucket]
        if len(removed) >= max(num_rows, KEPT_MIN):
            self._forget(bucket, removed[len(removed) // 2][0])
        self._removed[bucket].append((self.version, key))

    def forget(self, version: int) -> None:
        for bucket in range(4096):
            self._forget(bucket, version)

    def _forget(self, bucket: int, version: int) -> None:
        self._removed[bucket] = [entry for entry in self._removed[bucket] if entry[0] > version]
        self._forgotten[bucket] = max(self._forgotten[bucket], version)

    def removed(self, bucket: int, since: int) -> list[int] | None:
        """Ascending; None: some were forgotten."""
        if since == 0:
            return []
        if since < self._forgotten[bucket]:
            return None
        return sorted({key for version, key in self._removed[bucket] if version > since})

    def restore(self, bucket: int, statistics: dict[int, Statistics]) -> None:
        """`statistics`: of all rows of the bucket, whose former ones are gone already."""
        self._removed[bucket], self._forgotten[bucket] = [], 0
        self.put(statistics)

    def put(self, statistics: dict[int, Statistics]) -> None:
        self.version = max([self.version, *(row.version for row in statistics.values())])
        self.statistics.update({key: replace(row) for key, row in statistics.items()})
