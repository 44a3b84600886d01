"""Saves a table of a million rows, or 12 M dense parameters of Adam; prints the memory before, and
the peak during the save.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

import trireme as tr
from tests.tables import T_ROWS
from trireme import _core
from trireme.checkpoint.worker_side.save import save_checkpoint
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.optim import values_of_group
from trireme.protocol.block_spec import BlockSpec
from trireme.worker.gradients import PushHeader, TableGradient

DIM, NUM_ROWS, NUM_PUSHES = 16, 1_000_000, 4
NUM_PARAMETERS, NUM_BLOCKS = 12 << 20, 48


def kib(field: str) -> int:
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if field in x]
    return int(line.split()[1])


def with_rows(cluster: Cluster) -> None:
    table = tr.Table("t", dim=DIM, optimizer=tr.optim.Adagrad(lr=0.1))
    cluster.client.create_table(table.schema)
    for number, keys in enumerate(np.array_split(np.arange(NUM_ROWS), NUM_PUSHES), 1):
        distinct = _core.unique(keys.astype(np.uint64), cluster.pool)[0]
        values = values_of_group(table.optimizer.group(), number)
        gradient = TableGradient(distinct, torch.ones(len(distinct), DIM), values)
        cluster.client.push(PushHeader(number, 0, [], 1), {T_ROWS: gradient})


def with_blocks(cluster: Cluster) -> None:
    assert cluster.server is not None
    store, size = cluster.server.blocks, NUM_PARAMETERS // NUM_BLOCKS
    specs = [BlockSpec("w", number * size, size, 0) for number in range(NUM_BLOCKS)]
    groups = [{"lr": 0.1}]
    store.create("Adam", groups, specs, np.zeros(NUM_PARAMETERS, np.float32), {})
    ids = [spec.id for spec in specs]
    store.apply(groups, ids, np.ones(NUM_PARAMETERS, np.float32), [(0, 1)])


def main(folder: str, what: str) -> None:
    pa.array([1])  # imports pandas if it is installed, which is not the memory of a save
    with embedded(threads=1) as cluster:
        {"rows": with_rows, "blocks": with_blocks}[what](cluster)
        before = kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts over
        save_checkpoint(cluster.client, folder, extra={}, tensors={})
        sys.stdout.write(f"{before} {kib('VmHWM')}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
