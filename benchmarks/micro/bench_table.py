"""The table core on one thread: 10 M rows of 16 floats, 64 Ki distinct random keys per call.

overhead_bytes_per_row   memory beyond weights and state at the worst moment of growing from 1 M
                         rows: what the table says, and what the process really holds
grow                     one step of Adagrad on each of the first 3 M rows, which are new
lookup                   the weights of each key                 gather: see below
update_adagrad           one step of Adagrad on each key's row   gather: see below

gather is NumPy's take of the same weights from an array, by row number, without a search. Each row
of the array is one cache line, so no copy of random rows can read less memory.
Every call's keys are new: a measurement goes through the whole table once.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.harness import BenchError, Claim, Contest, Run, Settings
from trireme import _core

DIM = 16
LINE_BYTES = 64  # of a cache line: DIM floats
RATES = _core.RuleValues(lr=0.05)


def contests(settings: Settings) -> list[Contest]:
    work = Workload(**sizes(settings))

    def against_gather(metric: str, measure: Callable[[int], Run]) -> Contest:
        runs = {metric: measure, "gather": work.gather}
        return Contest(runs, [Claim(metric, metric, ("gather",), "rows/s")], settings.rounds, 1)

    overhead = "overhead_bytes_per_row"
    return [
        Contest({overhead: work.overhead}, [Claim(overhead, overhead, unit="bytes")], 1),
        Contest({"grow": work.grow}, [Claim("grow", "grow", unit="rows/s")], 1),
        against_gather("lookup", work.lookup),
        against_gather("update_adagrad", work.update),
    ]


def sizes(settings: Settings) -> dict[str, int]:
    """Of a Workload."""
    return {
        "num_rows": settings.pick(smoke=20_000, real=10_000_000),
        "num_first_rows": settings.pick(smoke=10_000, real=3_000_000),
        "num_rows_min": settings.pick(smoke=10_000, real=1_000_000),
        "num_keys": settings.pick(smoke=1024, real=65536),
    }


@dataclass(frozen=True)
class Growth:
    """A table that was grown, how fast at first, and the most memory per row beyond weights and
    state meanwhile.
    """

    table: _core.Table
    rows_per_s: float
    bytes_allocated: float
    bytes_resident: float


@dataclass
class Workload:
    """Calls over a table that is made when it is first needed.

    num_first_rows: how many rows are new while the growth is timed.
    num_rows_min: how many rows there are when the overhead begins to count.
    """

    num_rows: int
    num_first_rows: int
    num_rows_min: int
    num_keys: int
    sequence: int = 0

    @cached_property
    def pool(self) -> _core.Pool:
        return _core.Pool(1)

    @cached_property
    def grads(self) -> np.ndarray:
        return np.random.default_rng(1).standard_normal((self.num_keys, DIM), np.float32)

    @cached_property
    def out(self) -> np.ndarray:
        return np.zeros((self.num_keys, DIM), np.float32)

    @cached_property
    def keys(self) -> np.ndarray:
        return np.random.default_rng(0).integers(0, 2**64, self.num_rows, np.uint64)

    @cached_property
    def positions(self) -> list[np.ndarray]:
        """The positions in `keys` of each call's keys: all of them in random order, in pieces."""
        mixed = np.random.default_rng(2).permutation(self.num_rows)
        return np.split(mixed, range(self.num_keys, self.num_rows, self.num_keys))[:-1]

    @cached_property
    def calls(self) -> list[np.ndarray]:
        """The keys of each call."""
        return [self.keys[positions] for positions in self.positions]

    @cached_property
    def rows(self) -> np.ndarray:
        """The weights of `keys`, each row in a cache line."""
        table = self.growth.table  # first: its memory is measured
        memory = np.empty((self.num_rows + 1) * LINE_BYTES, np.uint8)
        start = -memory.ctypes.data % LINE_BYTES
        rows = memory[start:][: self.num_rows * LINE_BYTES].view(np.float32).reshape(-1, DIM)
        if missing := table.lookup(self.keys, rows, self.pool):
            raise BenchError(f"gather: expected rows for all keys, found {missing} missing")
        return rows

    @cached_property
    def growth(self) -> Growth:
        grads, keys = self.grads, self.keys  # in memory before the table is
        self._step(_new_table(), keys[: self.num_keys], grads)  # so is what any table's calls need
        before = _resident_bytes()
        table = _new_table()
        worst = np.zeros(2)
        elapsed_s = 0.0
        for start in range(0, self.num_rows, self.num_keys):
            part = keys[start : start + self.num_keys]
            began = time.perf_counter()
            self._step(table, part, grads[: len(part)])
            if start < self.num_first_rows:
                elapsed_s += time.perf_counter() - began
                rows_per_s = table.rows / elapsed_s
            if table.rows >= self.num_rows_min:
                taken = np.array([table.bytes, _resident_bytes() - before])
                worst = np.maximum(worst, taken / table.rows - table.row_bytes)
        if table.rows != self.num_rows:
            raise BenchError(f"table: expected {self.num_rows} rows, found {table.rows}")
        return Growth(table, rows_per_s, float(worst[0]), float(worst[1]))

    def overhead(self, _: int) -> Run:
        grown = self.growth
        detail = {"allocated": grown.bytes_allocated, "resident": grown.bytes_resident}
        return Run(max(detail.values()), detail=detail)

    def grow(self, _: int) -> Run:
        return Run(self.growth.rows_per_s)

    def gather(self, _: int) -> Run:
        rows, calls = self.rows, self.positions
        start = time.perf_counter()
        for positions in calls:  # in mode "raise", take would copy the rows twice
            np.take(rows, positions, axis=0, out=self.out, mode="clip")
        elapsed_s = time.perf_counter() - start
        return self._run(elapsed_s, hash=_digest(self.out))

    def lookup(self, _: int) -> Run:
        table, calls = self.growth.table, self.calls
        start = time.perf_counter()
        missing = sum(table.lookup(keys, self.out, self.pool) for keys in calls)
        elapsed_s = time.perf_counter() - start
        if missing:
            raise BenchError(f"lookup: expected rows for all keys, found {missing} missing")
        return self._run(elapsed_s, hash=_digest(self.out), simd=table.simd)

    def update(self, _: int) -> Run:
        table, calls = self.growth.table, self.calls
        start = time.perf_counter()
        applied = sum(self._step(table, keys, self.grads) for keys in calls)
        elapsed_s = time.perf_counter() - start
        if applied != len(calls) * self.num_keys:
            raise BenchError(f"update_adagrad: expected all keys applied, found {applied}")
        return self._run(elapsed_s, hash=None, simd=table.simd)  # rows go on changing

    def _step(self, table: _core.Table, keys: np.ndarray, grads: np.ndarray) -> int:
        self.sequence += 1
        return table.update(keys, grads, [(0, self.sequence)], RATES, self.pool)

    def _run(self, elapsed_s: float, hash: str | None, **detail: object) -> Run:
        return Run(len(self.calls) * self.num_keys / elapsed_s, hash=hash, detail=detail)


def _new_table() -> _core.Table:
    return _core.Table(
        dims=[DIM], rule="adagrad", initializer="uniform", init_a=-0.1, init_b=0.1, seed=1
    )


def _digest(rows: np.ndarray) -> str:
    return hashlib.sha256(rows).hexdigest()[:16]


def _resident_bytes() -> int:
    """Memory that this process holds."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise BenchError("smaps_rollup: expected a line Rss, found none")


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["table", *sys.argv[1:]]))
