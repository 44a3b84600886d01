"""Admission in plain Python; tables of the core must equal it bit for bit."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from tests.property.table_model import GOLDEN, bucket_of
from tests.tables import MASK, mix64

DEPTH = 4
NONCLK, CLICK = 0.1, 1.0


@dataclass
class Sketch:
    width: int
    total: int = 0
    halved_at: int = 0
    cells: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cells = [[0] * self.width for _ in range(DEPTH)]


class Filter:
    """The pending state of a table's buckets, by the settings of _core.AdmissionConfig."""

    def __init__(self, seed: int, settings: dict[str, Any]) -> None:
        self.seed, self.settings = seed, settings
        self.n = settings.get("n", 1)
        self.counts: dict[int, tuple[int, int]] = {}  # key -> count, time of its last occurrence
        self.sketches: dict[int, Sketch] = {}
        self.cell_bytes = 1 if self.n <= 0xFF else 2 if self.n <= 0xFFFF else 4
        self.width = settings.get("sketch_bytes", 0) // 4096 // (DEPTH * self.cell_bytes)

    def admits(
        self,
        key: int,
        count: int,
        show_click: tuple[float, float],
        push: tuple[int, int],
        time: int,
    ) -> bool:
        match self.settings["name"]:
            case "count_filter" if self.width:
                return self._add_to_sketch(key, count, time) >= self.n
            case "count_filter":
                return self._add(key, count, time) >= self.n
            case "probability":
                bits = mix64(mix64((self.seed + 2 * GOLDEN) & MASK) ^ key)
                bits = mix64(mix64(bits ^ push[0]) ^ push[1])
                return (bits >> 11) < self.settings["p"] * 2**53
            case _:
                show, click = show_click
                return (show - click) * NONCLK + click * CLICK >= self.settings["threshold"]

    def _add(self, key: int, count: int, time: int) -> int:
        if count:
            before, seen = self.counts.get(key, (0, 0))
            self.counts[key] = before + count, max(seen, time)
        return self.counts.get(key, (0, 0))[0]

    def _add_to_sketch(self, key: int, count: int, time: int) -> int:
        sketch = self.sketches.setdefault(bucket_of(key), Sketch(self.width))
        if sketch.total == 0:
            sketch.halved_at = time
        sketch.total += count
        places = [
            (mix64((mix64(key) + (row + 1) * GOLDEN) & MASK) >> 32) * self.width >> 32
            for row in range(DEPTH)
        ]
        least = min(cells[at] for cells, at in zip(sketch.cells, places, strict=True))
        estimate = min(least + count, self.n)
        for cells, at in zip(sketch.cells, places, strict=True):
            cells[at] = max(cells[at], estimate)
        return estimate

    def settle(self, key: int) -> None:
        self.counts.pop(key, None)

    def clear(self, bucket: int) -> None:
        self.sketches.pop(bucket, None)
        for key in self.keys_of(bucket):
            del self.counts[key]

    def keys_of(self, bucket: int) -> list[int]:
        return sorted(key for key in self.counts if bucket_of(key) == bucket)

    def forget_before(self, bucket: int, oldest: int, now: int) -> None:
        for key in self.keys_of(bucket):
            if 0 < self.counts[key][1] < oldest:
                del self.counts[key]
        sketch = self.sketches.get(bucket)
        if sketch is not None and 0 < sketch.halved_at < oldest:
            sketch.cells = [[cell // 2 for cell in cells] for cells in sketch.cells]
            sketch.total //= 2
            sketch.halved_at = now

    def save(self, bucket: int) -> bytes:
        sketch = self.sketches.get(bucket)
        if sketch is not None and sketch.total:
            header = (1, 2, DEPTH, self.cell_bytes, self.width)
            head = struct.pack("<BBBBIQII", *header, sketch.total, self.n, sketch.halved_at)
            cells = (cell for cells in sketch.cells for cell in cells)
            return head + b"".join(cell.to_bytes(self.cell_bytes, "little") for cell in cells)
        keys = self.keys_of(bucket)
        if not keys:
            return b""
        head = struct.pack("<BBBBIQII", 1, 1, 0, 0, 0, len(keys), self.n, 0)
        return head + b"".join(struct.pack("<QII", key, *self.counts[key]) for key in keys)


class Model:
    """Rows that count their updates, admitted by a filter, dropped `ttl_s` after their last one."""

    def __init__(self, seed: int, settings: dict[str, Any], ttl_s: int) -> None:
        self.filter = Filter(seed, settings)
        self.ttl_s = ttl_s
        self.rows: dict[int, tuple[int, int]] = {}  # key -> updates, time
        self.applied: set[tuple[int, int]] = set()
        self.num_admitted = self.num_rejected = 0

    def push(
        self,
        keys: list[int],
        counts: list[int],
        shows: list[tuple[float, float]],
        ids: list[tuple[int, int]],
        time: int,
    ) -> None:
        if self.applied.issuperset(ids):
            return
        self.applied.update(ids)
        for key, count, show_click in zip(keys, counts, shows, strict=True):
            if key not in self.rows:
                if not self.filter.admits(key, count, show_click, min(ids), time):
                    self.num_rejected += 1
                    continue
                self.filter.settle(key)
                self.num_admitted += 1
            updates, seen = self.rows.get(key, (0, 0))
            self.rows[key] = updates + 1, max(seen, time)

    def erase(self, keys: list[int]) -> None:
        for key in keys:
            self.rows.pop(key, None)
            self.filter.settle(key)

    def clear(self, bucket: int) -> None:
        self.erase([key for key in self.rows if bucket_of(key) == bucket])
        self.filter.clear(bucket)

    def shrink(self, bucket: int, time: int) -> None:
        oldest = max(time - self.ttl_s, 0)
        gone = [key for key, (_, seen) in self.rows.items() if 0 < seen < oldest]
        self.erase([key for key in gone if bucket_of(key) == bucket])
        self.filter.forget_before(bucket, oldest, time)
