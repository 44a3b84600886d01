"""A job whose worker (argument 2) is killed once in its second epoch, and started again."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import trireme as tr


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        table = tr.Table("ids", dim=4, optimizer=tr.optim.Adagrad(lr=0.2), salt=True)
        self.ids = tr.nn.EmbeddingBag(table, features=["user", "item"])
        self.head = nn.Linear(8, 1)

    def forward(self, batch):
        return self.head(self.ids(batch).flatten(1)).squeeze(1)


class KilledOnce(tr.Callback):
    on_all_workers = True

    def step(self, fit):
        marker = Path("killed")
        mine = fit.trainer.cluster.worker == int(sys.argv[2])
        if mine and fit.epoch == 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


cluster = tr.init()
torch.manual_seed(0)
user, item = torch.randint(0, 50, (2, 1900), generator=torch.Generator().manual_seed(0))
columns = {"user": user, "item": item, "label": ((user + item) % 2).float()}
train = tr.data.ArrayDataset({n: v[:1500] for n, v in columns.items()}, batch_size=50, shuffle=True)
valid = {n: v[1500:] for n, v in columns.items()}
model = Model()
stopping = tr.EarlyStopping("loss", patience=3)
best = tr.BestCheckpoint("best", monitor="loss")
trainer = tr.Trainer(
    model,
    torch.optim.Adam(model.parameters(), lr=0.01),
    strategy=tr.Strategy(sys.argv[1]),
    loss=nn.functional.binary_cross_entropy_with_logits,
    metrics=["auc"],
    callbacks=[stopping, best, tr.TensorBoard("runs"), KilledOnce()],
    progress=False,
)
trainer.fit(train, epochs=20, valid=valid)
print("ended", cluster.worker, trainer.num_epochs, stopping.best, best.best, best.path, flush=True)
