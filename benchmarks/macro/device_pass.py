"""Passes on a device, on the CPU: training of data in memory, and the two ends of a pass.

ctr_b4096              CTR-DNN on examples in memory, in a pass from its beginning to its end,
                       beside the same without passes in the embedded job
begin_pass_rows_per_s  begin_pass over data that has each key of a table once: its keys are read,
                       and their rows brought into blocks
end_pass_rows_per_s    end_pass after a step on each of these rows

memcpy copies rows of the same bytes, in memory that both sides have touched before, on one thread.
"""

from __future__ import annotations

import hashlib
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import trireme as tr
from benchmarks.criteo import tsv_files
from benchmarks.harness import BenchError, Claim, Contest, Run, Settings
from benchmarks.macro.ours import run_job
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.rows.core_table import make_core_table

DIM = 9
ROW_DIM = 16
NUM_BATCHES = 16
_NUM_WARM = 2
_NUM_TIMED = 8


def contests(settings: Settings) -> list[Contest]:
    batch = settings.pick(smoke=512, real=4096)
    num_rows = settings.pick(smoke=4_096, real=2_000_000)
    trained = f"ctr_b{batch}"
    return [
        Contest(
            {
                trained: lambda _: _train(settings, batch, in_pass=True),
                "async": lambda _: _train(settings, batch, in_pass=False),
            },
            [Claim(trained, trained, ("async",))],
            settings.rounds,
        ),
        Contest(
            {
                "begin_pass_rows_per_s": partial(_ends, num_rows, "begin"),
                "end_pass_rows_per_s": partial(_ends, num_rows, "end"),
                "memcpy": partial(_copy, num_rows),
            },
            [
                Claim(name, name, ("memcpy",), unit="rows/s")
                for name in ("begin_pass_rows_per_s", "end_pass_rows_per_s")
            ],
            settings.rounds,
        ),
    ]


def _train(settings: Settings, batch: int, *, in_pass: bool) -> Run:
    train = tsv_files(settings).train
    out = run_job(
        is_embedded=True,
        rule="adagrad",
        net="ctr",
        batch=batch,
        dim=DIM,
        threads=1,
        seed=1,
        warm=train[:_NUM_WARM],
        timed=train[_NUM_WARM : _NUM_WARM + _NUM_TIMED],
        in_memory=True,
        in_pass=in_pass,
    )
    return Run(out["examples_per_s"], detail=out)


class _Rows(nn.Module):
    """The sum of rows; there is nothing else to train."""

    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("rows", dim=ROW_DIM, optimizer=tr.optim.Adagrad(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(table, features=["id"])

    def forward(self, batch: Any) -> torch.Tensor:
        return self.rows(batch).flatten(1).sum(1)


def _ends(num_rows: int, end: str, _: int) -> Run:
    """Make all rows in one pass, then time an end of the next one."""
    ids = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    data = [{"id": part, "label": torch.zeros(len(part))} for part in ids.chunk(NUM_BATCHES)]
    with embedded() as home:
        trainer = tr.Trainer(
            _Rows(), None, loss=lambda out, _: out.mean(), progress=False, cluster=home
        )
        with trainer.on_device(data):
            trainer.fit(data)
        started = time.perf_counter()
        trainer.begin_pass(data)
        seconds = {"begin": time.perf_counter() - started}
        trainer.fit(data)
        started = time.perf_counter()
        trainer.end_pass()
        seconds["end"] = time.perf_counter() - started
        digest = _digest(home, num_rows)
    return Run(num_rows / seconds[end], hash=digest, detail={"row_bytes": _row_bytes()})


def _digest(home: Cluster, num_rows: int) -> str:
    assert home.server is not None
    rows = home.server.tables["rows"].rows
    if rows.rows != num_rows:
        raise BenchError(f"expected {num_rows} rows, found {rows.rows}")
    weights = np.empty((num_rows, ROW_DIM), np.float32)
    rows.lookup(np.arange(num_rows, dtype=np.uint64), weights, home.pool)
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]


def _row_bytes() -> int:
    """Of a row as it leaves memory: weights, state, statistics."""
    table = tr.Table("rows", dim=ROW_DIM, optimizer=tr.optim.Adagrad(lr=0.1))
    return make_core_table(table.schema).row_bytes


def _copy(num_rows: int, _: int) -> Run:
    source = np.ones((num_rows, _row_bytes()), np.uint8)
    target = np.zeros_like(source)
    started = time.perf_counter()
    np.copyto(target, source)
    seconds = time.perf_counter() - started
    return Run(num_rows / seconds, detail={"row_bytes": _row_bytes()})
