"""Saves a table of a million rows; prints the memory before, and the peak during the save."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

import trireme as tr
from tests.tables import T_ROWS
from trireme import _core
from trireme.checkpoint.worker_side.save import save_checkpoint
from trireme.job.embedded import embedded
from trireme.optim import values_of_group
from trireme.worker.gradients import PushHeader, TableGradient

DIM, NUM_ROWS, NUM_PUSHES = 16, 1_000_000, 4


def kib(field: str) -> int:
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if field in x]
    return int(line.split()[1])


def main(folder: str) -> None:
    table = tr.Table("t", dim=DIM, optimizer=tr.optim.Adagrad(lr=0.1))
    with embedded(threads=1) as cluster:
        cluster.client.create_table(table.schema)
        for number, keys in enumerate(np.array_split(np.arange(NUM_ROWS), NUM_PUSHES), 1):
            distinct = _core.unique(keys.astype(np.uint64), cluster.pool)[0]
            values = values_of_group(table.optimizer.group(), number)
            gradient = TableGradient(distinct, torch.ones(len(distinct), DIM), values)
            cluster.client.push(PushHeader(number, 0, [], 1), {T_ROWS: gradient})
        before = kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts over
        save_checkpoint(cluster.client, folder, extra={}, tensors={})
        sys.stdout.write(f"{before} {kib('VmHWM')}\n")


if __name__ == "__main__":
    main(sys.argv[1])
