"""A Predictor's lookup on one thread: 10 M rows of 16 floats in mapped files, 64 Ki random keys per
call.

lookup   the weights of each key, from an export    table: the same from the trained table

Both answer the same keys in turn; the files' pages are in memory. Every call has new keys: a
measurement reads the whole table once.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.harness import BenchError, Claim, Contest, Run, Settings
from benchmarks.micro.bench_table import DIM, Workload, sizes
from trireme import _core
from trireme.inference.row_layers import mapped
from trireme.storage.checked_file import written_for_mapping


def contests(settings: Settings) -> list[Contest]:
    work = Exported(**sizes(settings))
    claim = Claim("lookup", "lookup", ("table",), "rows/s")
    return [
        Contest({"lookup": work.lookup_frozen, "table": work.lookup}, [claim], settings.rounds, 1)
    ]


class Exported(Workload):
    """A table, and an export of it."""

    @cached_property
    def frozen(self) -> _core.FrozenTable:
        with tempfile.TemporaryDirectory() as folder:  # mapped files survive their removal
            path = Path(folder) / "all.rows"
            self._write(path)
            rows = _core.FrozenRows([str(path)], [mapped(path)])
        return _core.FrozenTable([rows], init_a=-0.1, init_b=0.1, seed=1, initial_weights=DIM)

    def _write(self, path: Path) -> None:
        writer = _core.FrozenWriter(encoding="float32", dim=DIM)
        with written_for_mapping(path.parent, path.name) as (file, _):
            for bucket in range(4096):
                content = self.growth.table.snapshot(bucket)
                weights = content.rows[:, : 4 * DIM]
                file.write(writer.add(content.keys, np.ascontiguousarray(weights)))
            file.write(writer.finish())

    def lookup_frozen(self, _: int) -> Run:
        frozen, calls = self.frozen, self.calls
        start = time.perf_counter()
        missing = sum(frozen.lookup(keys, self.out, self.pool) for keys in calls)
        elapsed_s = time.perf_counter() - start
        if missing:
            raise BenchError(f"lookup: expected rows for all keys, found {missing} missing")
        digest = hashlib.sha256(self.out).hexdigest()[:16]
        return self._run(elapsed_s, hash=digest, detail={})


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["predictor", *sys.argv[1:]]))
