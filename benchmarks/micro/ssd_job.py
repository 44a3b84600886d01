"""One contestant of `ssd`: rows of 16 floats and Adagrad's state that are read and written back.

    python -m benchmarks.micro.ssd_job KIND FOLDER --rows N --memory BYTES --seconds S

`ours`: a table with rows on SSD. `rocksdict`: RocksDB from Python, 16 threads. Each step takes
DRAWN keys by Zipf's law, with --even all alike, and reads and updates the rows of the distinct
ones. After as long again, the steps of S seconds count. `recovery`: N rows of ours; how long a
start with their snapshot takes. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.macro.ssd_large import DIM, TABLE, zipf_ranks
from trireme import _core
from trireme.coordinator.coordinator import Coordinator
from trireme.job.durability import Durability, kept
from trireme.job.handlers import handlers_of
from trireme.protocol.block_messages import map_to_wire
from trireme.protocol.routing import BucketMap
from trireme.rpc import Request
from trireme.server.attendance import Attendance
from trireme.server.row_tier import RowTier
from trireme.server.state import ServerState

DRAWN = 1 << 15
VALUE_BYTES = 8 * DIM  # weights and state
_THREADS = 16  # of rocksdict
_VALUES = _core.RuleValues(lr=0.05)
_SPREAD = 2_654_435_761

Step = Callable[[np.ndarray], None]


class Ours:
    def __init__(self, folder: Path, num_rows: int, memory: int) -> None:
        self._tier, self._folder = RowTier(memory, [folder]), folder
        self.rows = self._tier.make_rows(TABLE.schema)
        self._pool, self._number = _core.Pool(2), 0
        self._out = np.empty((DRAWN, DIM), np.float32)
        fill(self.rows, num_rows)
        self._number = num_rows

    def step(self, keys: np.ndarray) -> None:
        out, self._number = self._out[: len(keys)], self._number + 1
        self.rows.lookup(keys, out, self._pool)
        self.rows.update(keys, out, [(0, self._number)], _VALUES, self._pool)

    def counts(self) -> dict[str, int]:
        return dict(self.rows.tier or {})

    def file_bytes(self) -> int:
        """Disk space below the folder."""
        return sum(file.stat().st_blocks * 512 for file in self._folder.rglob("*"))


class RocksDict:
    def __init__(self, folder: Path, num_rows: int, memory: int) -> None:
        from rocksdict import (  # type: ignore[import-not-found,unused-ignore]
            BlockBasedOptions,
            Cache,
            DBCompressionType,
            Options,
            Rdict,
            WriteBatch,
            WriteOptions,
        )

        buffer = min(memory // 16, 64 << 20)
        options, blocks = Options(raw_mode=True), BlockBasedOptions()
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_write_buffer_size(buffer)
        options.set_max_write_buffer_number(2)
        options.increase_parallelism(4)
        # Indexes and filters are in memory at all times: in a small cache they are read again.
        blocks.set_block_cache(Cache(memory - 2 * buffer - num_rows * 7 // 2))
        options.set_compression_type(DBCompressionType.none())  # floats do not become smaller
        blocks.set_bloom_filter(10, False)
        options.set_block_based_table_factory(blocks)
        writing = WriteOptions()
        writing.disable_wal = True
        self._db, self._batch = Rdict(str(folder / "db"), options), WriteBatch
        self._db.set_write_options(writing)
        self._writing = writing
        self._pool = ThreadPoolExecutor(_THREADS)
        value = bytes(VALUE_BYTES)
        for begin in range(0, num_rows, DRAWN):
            batch = WriteBatch(raw_mode=True)
            for key in range(begin, min(begin + DRAWN, num_rows)):
                batch.put(key.to_bytes(8, "big"), value)
            self._db.write(batch, writing)

    def step(self, keys: np.ndarray) -> None:
        list(self._pool.map(self._part, np.array_split(keys, _THREADS)))

    def _part(self, keys: np.ndarray) -> None:
        names = [key.tobytes() for key in keys.byteswap()]
        values = self._db.get(names)
        rows = np.frombuffer(b"".join(values), np.float32) * np.float32(0.5)
        content, batch = rows.tobytes(), self._batch(raw_mode=True)
        for i, name in enumerate(names):
            batch.put(name, content[i * VALUE_BYTES : (i + 1) * VALUE_BYTES])
        self._db.write(batch, self._writing)

    def counts(self) -> dict[str, int]:
        return {}


def fill(rows: _core.Table, num_rows: int) -> None:
    pool = _core.Pool(2)
    for number, begin in enumerate(range(0, num_rows, DRAWN), 1):
        keys = np.arange(begin, min(begin + DRAWN, num_rows), dtype=np.uint64)
        keys = _core.unique(keys, pool)[0]
        grads = np.ones((len(keys), DIM), np.float32)
        rows.update(keys, grads, [(0, number)], _VALUES, pool)


def measure(
    made: Ours | RocksDict, num_rows: int, seconds: float, *, is_even: bool
) -> dict[str, Any]:
    rng, pool, ranks = np.random.default_rng(3), _core.Pool(1), zipf_ranks(num_rows)

    def run(for_s: float) -> tuple[list[float], int]:
        end, times, num_keys = time.monotonic() + for_s, [], 0
        while time.monotonic() < end:
            if is_even:
                drawn = rng.integers(0, num_rows, DRAWN).astype(np.uint64)
            else:
                drawn = ranks(rng, DRAWN) * np.uint64(_SPREAD) % np.uint64(num_rows)
            keys = _core.unique(drawn, pool)[0]
            start = time.monotonic()
            made.step(keys)
            times.append(time.monotonic() - start)
            num_keys += len(keys)
        return times, num_keys

    run(seconds)
    before = made.counts()
    times, num_keys = run(seconds)
    after = made.counts()
    spent = sum(times)
    result = {
        "rows_per_s": num_keys / spent,
        "step_median_ms": 1e3 * float(np.median(times)),
        "step_p99_ms": 1e3 * float(np.percentile(times, 99)),
        "steps": len(times),
    }
    if isinstance(made, Ours):
        more = {name: after[name] - before[name] for name in after}
        written = more["evicted"] + more["cleaned"]
        result |= {
            "reads_per_s": more["pages_read"] / spent,
            "write_amplification": written / max(more["evicted"], 1),
            "index_bytes_per_cold_row": after["index_bytes"] / max(after["rows"], 1),
            "hit_rate": more["hits"] / max(more["hits"] + more["misses"], 1),
            "rows_on_ssd": after["rows"],
            "bytes_over_budget": after["bytes"] - after["memory_bytes"],
            "file_bytes_per_row_byte": made.file_bytes()
            / max(after["rows"] * made.rows.row_bytes, 1),
        }
    return result


class Restarted:
    """A server's state without a network, with a state folder."""

    def __init__(self, folder: Path, memory: int) -> None:
        self._exit = ExitStack()
        (folder / "ssd").mkdir(exist_ok=True)
        tier = RowTier(memory, [folder / "ssd"])
        self._exit.callback(tier.close)
        self.state, coordinator, attendance = (
            ServerState(_core.Pool(2), tier=tier),
            Coordinator(),
            Attendance(),
        )
        durability = Durability(mode="process", folder=folder / "state", log_bytes=1 << 40)
        self._exit.enter_context(kept(durability, self.state, coordinator, attendance))
        handlers = attendance.handlers()
        self._handlers = handlers_of(self.state, coordinator, handlers, folder)

    def create(self) -> None:
        head, arrays = map_to_wire(BucketMap.even(("here",)))
        join = {"servers": ["here"], "worker": 0, "num_workers": 1, "token": "a"}
        self._ask("coord.join", join)
        self._ask("ps.map", {"map": head, "index": 0, "job": "j", "state": ""}, list(arrays))
        self._ask("ps.create_table", {"schema": TABLE.schema.to_wire()})

    def _ask(self, method: str, body: dict[str, Any], arrays: list[Any] | None = None) -> None:
        request = Request(1, method, body, arrays or [], "", "", "", time.monotonic() + 60)
        self._handlers[method](request)

    def snapshot(self) -> None:
        with self.state.journal.replacing():
            pass

    def close(self) -> None:
        self.state.tables.clear()
        self._exit.close()


def recovery(folder: Path, num_rows: int, memory: int) -> dict[str, Any]:
    server = Restarted(folder, memory)
    server.create()
    rows = server.state.tables[TABLE.name].rows
    fill(rows, num_rows)
    start = time.monotonic()
    server.snapshot()
    snapshot_s = time.monotonic() - start
    del rows
    server.close()
    start = time.monotonic()
    server = Restarted(folder, memory)
    recovery_s = time.monotonic() - start
    rows = server.state.tables[TABLE.name].rows
    use = rows.tier or {}
    if rows.rows != num_rows:
        raise RuntimeError(f"expected {num_rows} rows, found {rows.rows}")
    result = {"recovery_s": recovery_s, "snapshot_s": snapshot_s, "rows_on_ssd": use["rows"]}
    result["index_bytes_per_cold_row"] = use["index_bytes"] / max(use["rows"], 1)
    del rows
    server.close()
    return result


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["ours", "rocksdict", "recovery"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--even", action="store_true")
    args = parser.parse_args(argv)
    if args.kind == "recovery":
        result = recovery(args.folder, args.rows, args.memory)
    else:
        kind = Ours if args.kind == "ours" else RocksDict
        made = kind(args.folder, args.rows, args.memory)
        result = measure(made, args.rows, args.seconds, is_even=args.even)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
