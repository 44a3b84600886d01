"""A job whose worker (argument 1) is killed once, when a shell command (argument 2) has changed the
files of its data. Each key is in one example: its row tells how often that was trained on.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from torch import nn

import trireme as tr
from trireme.data import Label, QueueDataset, Sparse


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        start = tr.initializer.Constant(0.0)
        table = tr.Table("ids", dim=1, optimizer=tr.optim.Count(), initializer=start)
        self.ids = tr.nn.EmbeddingBag(table, features=["id"])

    def forward(self, batch):
        return self.ids(batch).flatten(1).sum(1)


class KilledOnce(tr.Callback):
    on_all_workers = True

    def __init__(self):
        self.num_steps = 0

    def step(self, fit):
        self.num_steps += 1
        mine = fit.trainer.cluster.worker == int(sys.argv[1])
        if mine and self.num_steps == 3 and not Path("killed").exists():
            Path("killed").touch()
            subprocess.run(["sh", "-c", sys.argv[2]], check=True)
            os.kill(os.getpid(), signal.SIGKILL)


with tr.init():
    trainer = tr.Trainer(
        Model(),
        None,
        strategy=tr.Strategy("async"),
        loss=nn.functional.binary_cross_entropy_with_logits,
        callbacks=[KilledOnce()],
        progress=False,
    )
    schema = tr.data.multislot([Label("label"), Sparse("id")])
    trainer.fit(QueueDataset("part-*", schema=schema, batch_size=10))
    trainer.save("saved")
