"""Trains in mode collective with checkpoints, resumes, and prints how often each example counted.

Arguments: FOLDER of the checkpoints; the STEP (0: none) at which worker 1 does a DEED: "die" kills
it, once in a job, "wait" waits for a line of input. With "ddp" the model is wrapped
in DistributedDataParallel, with "loop" it is trained in a plain loop. Prints `step N` before the
N-th batch of this process.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import trireme as tr
from trireme import _core
from trireme.table import RowClassId

FOLDER, STEP, DEED = sys.argv[1], int(sys.argv[2]), sys.argv[3]
DIED = Path(f"{FOLDER}.died")
NUM_EXAMPLES, BATCH, EPOCHS = 301, 4, 2
SCHEMA = tr.data.Schema([tr.data.Sparse("a"), tr.data.Label()])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        start = tr.initializer.Constant(0.0)
        table = tr.Table("t", dim=1, optimizer=tr.optim.Count(), initializer=start)
        self.rows = tr.nn.EmbeddingBag(table, features=["a"])
        self.head = nn.Linear(1, 1)
        self.num_steps = 0

    def forward(self, batch: Any) -> torch.Tensor:
        self.num_steps += 1
        print(f"step {self.num_steps}\n", end="", flush=True)  # in one write
        if cluster.worker == 1 and self.num_steps == STEP and not DIED.exists():
            if DEED == "die":
                DIED.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            sys.stdin.readline()
        return self.head(self.rows(batch).flatten(1)).squeeze(1)


cluster = tr.init()
torch.manual_seed(5)
model = Model()
wrapped: nn.Module = model
if DEED == "ddp":
    torch.distributed.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(model)
trainer = tr.Trainer(
    wrapped,
    torch.optim.SGD(model.parameters(), lr=0.1),
    loss=nn.functional.binary_cross_entropy_with_logits,
    strategy=tr.Strategy("collective"),
    progress=False,
)
ids = np.arange(NUM_EXAMPLES)  # each in one example alone
columns = {"a": ids, "label": np.ones(NUM_EXAMPLES, np.float32)}
data = tr.data.ArrayDataset(columns, schema=SCHEMA, batch_size=BATCH, shuffle=True, seed=1)
if DEED == "loop":
    for epoch in range(EPOCHS):
        for batch in data.stream(cluster.worker, cluster.num_workers, epoch=epoch):
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
            loss.backward()
            trainer.optimizer.step()
        trainer.optimizer.end_pass()
        cluster.client.coordinator.gather({}, [])  # longer streams have gone on meanwhile
        trainer.optimizer.refresh()
else:
    checkpoints = tr.Checkpoints(FOLDER, every_steps=5)
    trainer.fit(data, epochs=EPOCHS, checkpoints=checkpoints, resume=True)
cluster.client.coordinator.gather({}, [])
keys = _core.unique(ids.astype(np.uint64), cluster.pool)[0]
rows = cluster.client.pull({RowClassId("t"): keys}).rows[RowClassId("t")]
trainer.optimizer.refresh()
print(f"WEIGHT {model.head.weight.item().hex()}\n", end="", flush=True)
counts = sorted(set(rows[:, 0].tolist()))
print(f"COUNTS {counts} steps {model.num_steps}\n", end="", flush=True)
