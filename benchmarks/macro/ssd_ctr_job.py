"""CTR-DNN over a filled table, whose keys come by Zipf's law; embedded. Prints examples/s.

    python -m benchmarks.macro.ssd_ctr_job FOLDER --rows N --memory BYTES --batches N

--memory 0: all rows are in memory. Rows that are used often gather in memory in --warm_batches,
before those that count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

import trireme as tr
from benchmarks.macro.job import CTR, FEATURES, NUM_DENSE, cross_entropy
from benchmarks.macro.ssd_large import TABLE, zipf_ranks
from benchmarks.micro.ssd_job import fill
from trireme.job.embedded import embedded
from trireme.server.row_tier import RowTier

ROW_BYTES = 144  # 16 weights, 16 of state, key, stamp
_SPREAD = 2_654_435_761


def batches(num: int, batch: int, num_rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
    rng, ranks = np.random.default_rng(seed), zipf_ranks(num_rows)
    made = []
    for _ in range(num):
        drawn = ranks(rng, batch * len(FEATURES)) * np.uint64(_SPREAD) % np.uint64(num_rows)
        columns = drawn.astype(np.int64).reshape(len(FEATURES), batch)
        one = {name: torch.from_numpy(ids) for name, ids in zip(FEATURES, columns, strict=True)}
        one["dense"] = torch.from_numpy(rng.random((batch, NUM_DENSE), np.float32))
        one["label"] = torch.from_numpy(rng.integers(0, 2, batch).astype(np.float32))
        made.append(one)
    return made


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--warm_batches", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4096)
    args = parser.parse_args(argv)
    torch.manual_seed(1)
    tier = RowTier(args.memory, [args.folder]) if args.memory else None
    with embedded(tier=tier) as cluster:
        model = CTR(TABLE)
        trainer = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters(), 1e-3),
            loss=cross_entropy,
            strategy=tr.Strategy("async"),
            threads=2,
            progress=False,
            cluster=cluster,
        )
        trainer.fit(batches(1, args.batch, args.rows, 0))
        assert cluster.server is not None
        rows = cluster.server.tables[TABLE.name].rows
        fill(rows, args.rows)
        trainer.fit(batches(args.warm_batches, args.batch, args.rows, 1))
        before, data = rows.tier or {}, batches(args.batches, args.batch, args.rows, 2)
        start, cpu = time.monotonic(), time.process_time()
        trainer.fit(data)
        spent, cpu = time.monotonic() - start, time.process_time() - cpu
        after = rows.tier or {}
    detail = (
        {name: after[name] - before[name] for name in ("hits", "misses", "fetched", "reads")}
        if after
        else {}
    )
    result = {"memory": args.memory, "share": args.memory / (args.rows * ROW_BYTES)}
    result |= {"examples_per_s": args.batches * args.batch / spent, **detail}
    result["cpu_ms_per_batch"] = 1e3 * cpu / args.batches
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
