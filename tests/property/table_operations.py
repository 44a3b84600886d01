"""Random operations on a table and on its model, whose answers must be equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from tests.property.table_life import Columns
from tests.property.table_model import NUM_BUCKETS, Model, Values, bucket_of, key_at, rows_of
from tests.tables import MASK, clear, contains, restore
from trireme import _core
from trireme.errors import BadRequest

# (share, smallest, largest) number of keys of a call. The largest go through the code that works
# in parallel; few, because the model takes its time.
SIZES = ((5, 0, 0), (25, 1, 1), (50, 2, 8), (19.9, 9, 64), (0.05, 4500, 5000), (0.05, 17000, 17000))
CONTENTS_MAX = 40


class NumKeys(NamedTuple):
    """Of each kind; crowded: of each of three buckets."""

    anywhere: int = 1500
    crowded: int = 150
    alike: int = 350


def keys_by_kind(
    random: Random, buckets: range, is_mine: Callable[[int], bool], num: NumKeys
) -> list[list[int]]:
    """Few enough keys that operations meet, by how their hashes lie to one another.

    All anywhere; small and large numbers; all in a few buckets; all with the same bucket, place in
    the bucket and tag, more than a line's counter of passed keys can count.
    """
    few = (buckets[0], buckets[20], buckets[-1])
    crowded = [
        key_at(bucket, random.randrange(2**52)) for bucket in few for _ in range(num.crowded)
    ]
    place, tag = random.randrange(2**32), random.randrange(256)
    others = random.sample(range(2**12), num.alike)
    alike = [key_at(buckets[20], place << 20 | other << 8 | tag) for other in others]
    kinds = [
        [random.randrange(2**64) for _ in range(num.anywhere)],
        [0, 1, 2**63 - 1, 2**63, MASK - 1, MASK, *range(2, 100)],
        crowded,
        alike,
    ]
    mine = [[key for key in keys if is_mine(key) and bucket_of(key) in buckets] for keys in kinds]
    assert all(mine), "expected keys of every kind"
    return mine


@dataclass
class Content:
    """Of a bucket, as _core.Snapshot has it."""

    keys: np.ndarray
    classes: np.ndarray
    rows: np.ndarray
    marks: dict[int, int]
    pending: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))


class Operations:
    """One caller of a table: `step` does a random operation to table and model, and compares.

    The table may have other callers if their keys and streams are others; if it has (`is_alone` is
    false) then what they share is not compared: the number of rows. `buckets` are those of this
    caller alone, whole: only they are replaced.
    """

    def __init__(
        self,
        table: _core.Table,
        model: Model,
        seed: str,
        *,
        streams: tuple[int, ...] = (0, 1, 2, 3),
        buckets: range = range(NUM_BUCKETS),
        is_mine: Callable[[int], bool] = lambda key: True,
        is_alone: bool = True,
        pool: _core.Pool | None = None,
        num_keys: NumKeys = NumKeys(),  # noqa: B008 it never changes
    ) -> None:
        self.table, self.model = table, model
        self.random, self.rng = Random(seed), np.random.default_rng(list(seed.encode()))
        self.kinds = keys_by_kind(self.random, buckets or range(NUM_BUCKETS), is_mine, num_keys)
        self.streams, self.buckets, self.is_alone = streams, buckets, is_alone
        self.last = dict.fromkeys(streams, 0)
        self.contents: list[tuple[int, Content]] = []
        self.pool = pool or _core.Pool(2)
        self.number, self.doing, self.sizes = 0, "", SIZES
        self.policy, self.time = model.life.policy, 0
        whole = [(8, self.snapshot), (4, self.restore), (2, self.clear)] if buckets else []
        if is_alone:
            whole += [(6, self.snapshot_since), (3, self.apply_rows), (6, self.shrink)]
            whole += [(0.5, self.forget_removed)]
        if self.policy.is_scored:
            whole += [(8, self.statistics), (3, self.settle)]
        weighted = [
            (35, self.update),
            (25, self.lookup),
            (10, self.contains),
            (8, self.erase),
            (3, self.advance),
            (2, self.compare_marks),
            (1, self.set_marks),
            *whole,
        ]
        self.shares = [share for share, _ in weighted]
        self.operations = [operation for _, operation in weighted]

    def step(self) -> None:
        self.number += 1
        operation = self.random.choices(self.operations, self.shares)[0]
        self.doing = f"operation {self.number}, {operation.__name__}"
        operation()
        if self.is_alone:
            assert self.table.rows == len(self.model.rows)
            assert self.table.version == self.model.life.version
            assert self.table.counters == self.model.life.counters

    # ---- what operations are about ----

    def keys(self) -> np.ndarray:
        share, low, high = zip(*self.sizes, strict=True)
        (i,) = self.random.choices(range(len(share)), share)
        size = self.random.randint(low[i], high[i])
        kind = self.kinds[0] if size > 1000 else self.random.choice(self.kinds)
        keys = self.random.choices(kind, k=size)
        if self.random.random() < 0.3:
            keys.sort(key=bucket_of)
        self.doing += f", {size} keys"
        return np.array(keys, np.uint64)

    def bucket(self) -> int:
        """One that has rows, more often than not."""
        bucket = bucket_of(self.random.choice(self.random.choice(self.kinds)))
        if bucket not in self.buckets or self.random.random() < 0.1:
            bucket = self.random.choice(self.buckets)
        self.doing += f", bucket {bucket}"
        return bucket

    def ids(self) -> list[tuple[int, int]]:
        """The next push of a stream, more often than not; or an old one again; or of several."""
        number = self.random.choice((1, 1, 1, 1, 1, 2, 3))
        ids = []
        for stream in self.random.sample(self.streams, min(number, len(self.streams))):
            if self.last[stream] > 0 and self.random.random() < 0.2:
                ids.append((stream, self.random.randint(1, self.last[stream])))
            else:
                self.last[stream] += self.random.choice((1, 1, 1, 1, 5))
                ids.append((stream, self.last[stream]))
        self.doing += f", ids {ids}"
        return ids

    def values(self) -> Values:
        bounds = (-0.4, 0.3) if self.random.random() < 0.2 else (-np.inf, np.inf)
        return Values(
            lr=self.random.choice((0.0, 0.05, 0.3)),
            weight_decay=self.random.choice((0.0, 0.01)),
            eps=self.random.choice((1e-8, 1e-3)),
            beta1=self.random.choice((0.9, 0.5)),
            l1=self.random.choice((0.0, 0.5)),
            l2=self.random.choice((0.0, 0.1)),
            lower=bounds[0],
            upper=bounds[1],
            step=self.random.randint(1, 100),
        )

    def moment(self) -> int:
        """Data time advances by seconds or days; now and then it is late, or unknown."""
        self.time += self.random.choice((0, 0, 10, 5000, 86_400, 300_000))
        time = self.random.choice((self.time,) * 8 + (self.time // 2, 0))
        self.doing += f", time {time}"
        return time

    def version(self) -> int:
        """The table's, the next, or one so far ahead that 16 bits do not tell how far."""
        if not self.is_alone:
            return 0
        version = self.table.version
        ahead = self.random.choices((0, 1, 2**15, 2**16 - 1, 2**16), (20, 10, 1, 1, 1))[0]
        self.doing += f", version {version + ahead}"
        return min(version + ahead, 2**32 - 1)

    def columns(self, num_keys: int) -> Columns:
        if not self.policy.is_scored:
            return Columns(self.moment(), self.version())
        show_click = self.rng.choice([0, 1, 3, 0.25], (num_keys, 2)).astype(np.float32)
        features = self.rng.integers(0, 2**32, num_keys, np.uint32)
        return Columns(
            self.moment(),
            self.version(),
            show_click,
            features if self.random.random() < 0.8 else None,
        )

    # ---- operations ----

    def lookup(self) -> None:
        keys = self.keys()
        out = np.full((len(keys), self.model.dim), np.nan, np.float32)
        missing = self.table.lookup(keys, out, self.pool)
        expected, expected_missing = self.model.lookup(keys)
        assert missing == expected_missing
        if out.tobytes() != expected.tobytes():
            np.testing.assert_array_equal(out, expected)

    def contains(self) -> None:
        keys = self.keys()
        assert contains(self.table, keys).tolist() == self.model.contains(keys)

    def update(self, keys: np.ndarray | None = None) -> None:
        """A push of these keys; without, of some."""
        keys = self.keys() if keys is None else keys
        ids, values = self.ids(), self.values()
        grads = self.rng.standard_normal((len(keys), self.model.dim), np.float32)
        rates, columns = _core.RuleValues(**vars(values)), self.columns(len(keys))
        applied = self.table.update(keys, grads, ids, rates, self.pool, **vars(columns))
        assert applied == self.model.update(keys, grads, ids, values, columns)

    def erase(self) -> None:
        keys = self.keys()
        assert self.table.erase(keys, self.pool) == self.model.erase(keys)

    def advance(self) -> None:
        ids = self.ids()
        self.table.advance(ids)
        self.model.advance(ids)

    def compare_marks(self) -> None:
        """Marks of its own buckets; of all, if it has none."""
        buckets = self.buckets or range(NUM_BUCKETS)
        for stream in self.streams:
            actual = self.table.marks(stream)[buckets]
            assert (actual == self.model.marks[stream][buckets]).all()

    def set_marks(self) -> None:
        """As after buckets have come from elsewhere: some have the last push, some have not."""
        stream = self.random.choice(self.streams)
        back = self.rng.integers(0, 3, NUM_BUCKETS)
        marks = np.maximum(self.last[stream] - back, 0).astype(np.uint64)
        self.table.set_marks(stream, marks)
        self.model.marks[stream] = marks

    def compare_bucket(self, bucket: int) -> Content:
        content = self.table.snapshot(bucket)
        rows, marks = rows_of(content)
        own_marks = {stream: mark for stream, mark in marks.items() if stream in self.streams}
        assert (rows, own_marks) == self.model.snapshot(bucket)
        return Content(content.keys, content.classes, content.rows, own_marks)

    def snapshot(self) -> None:
        bucket = self.bucket()
        content = self.compare_bucket(bucket)
        self.contents.insert(self.random.randint(0, len(self.contents)), (bucket, content))
        del self.contents[CONTENTS_MAX:]

    def restore(self) -> None:
        """What some bucket held at an earlier time, its rows in another order."""
        if not self.contents:
            return
        bucket, actual = self.random.choice(self.contents)
        order = self.rng.permutation(len(actual.keys))
        content = Content(
            actual.keys[order], actual.classes[order], actual.rows[order], actual.marks
        )
        self.doing += f", bucket {bucket}, {len(order)} keys"
        restore(self.table, bucket, content)
        self.model.restore(bucket, *rows_of(content))

    def clear(self) -> None:
        bucket = self.bucket()
        clear(self.table, bucket)
        self.model.restore(bucket, {}, {})

    def snapshot_since(self) -> None:
        """What has changed since a version: a recent one, more often than not."""
        bucket, version = self.bucket(), self.table.version
        back = self.random.choice((0, 1, 2, 5, 2**15 - 1, 2**15, 2**16, 2**17, version))
        since = max(version - back, 0)
        self.doing += f", since {since}"
        removed = self.model.life.removed(bucket, since)
        if removed is None:
            with pytest.raises(BadRequest, match="the keys removed before are forgotten"):
                self.table.snapshot(bucket, since)
            return
        content = self.table.snapshot(bucket, since)
        assert rows_of(content)[0] == self.model.snapshot(bucket, since)[0]
        assert content.removed.tolist() == removed

    def apply_rows(self) -> None:
        """Some rows of an earlier time, and keys removed."""
        if not self.contents:
            return
        bucket, actual = self.random.choice(self.contents)
        some = self.rng.random(len(actual.keys)) < 0.5
        content = Content(actual.keys[some], actual.classes[some], actual.rows[some], {})
        there = self.model.keys_of(bucket)
        removed = self.random.sample(there, self.random.randint(0, min(len(there), 5)))
        self.doing += f", bucket {bucket}, {some.sum()} keys, removed {removed}"
        gone = np.array(removed, np.uint64)
        self.table.apply(bucket, content.keys, content.classes, content.rows, gone)
        self.model.apply_rows(bucket, rows_of(content)[0], removed)

    def shrink(self) -> None:
        bucket, time, version = self.bucket(), self.moment(), self.version()
        day_over = self.random.random() < 0.5
        for _ in range(2):
            actual = self.table.shrink(bucket, time, day_over, version)
            assert actual == self.model.shrink(bucket, time, version, day_over=day_over)
        assert actual == (0, 0), "the second time, nothing is left to remove"

    def forget_removed(self) -> None:
        version = max(self.table.version - self.random.choice((0, 1, 5)), 0)
        self.doing += f", version {version}"
        self.table.forget_removed(version)
        self.model.life.forget(version)

    def statistics(self) -> None:
        keys, time, day_over = self.keys(), self.moment(), self.random.random() < 0.5
        out = np.full((len(keys), 2), np.nan)
        self.table.statistics(keys, out, time, day_over, self.pool)
        expected = [
            self.model.life.effective(key, time, day_over=day_over) for key in keys.tolist()
        ]
        np.testing.assert_array_equal(out, np.array(expected).reshape(-1, 2))

    def settle(self) -> None:
        keys = self.keys()
        scores = self.rng.random(len(keys), np.float32)
        assert self.table.settle(keys, scores) == len(keys)
        self.model.settle(keys, scores)

    def compare_all(self) -> None:
        """Everything that is this caller's."""
        self.doing = "comparing everything at the end"
        self.compare_marks()
        for bucket in self.buckets:
            self.compare_bucket(bucket)
        keys = np.array(sorted({key for kind in self.kinds for key in kind}), np.uint64)
        assert contains(self.table, keys).tolist() == self.model.contains(keys)
