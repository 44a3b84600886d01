"""A loop of one's own whose worker 1 is killed in the second epoch."""

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
        table = tr.Table("ids", dim=4, optimizer=tr.optim.Adagrad(lr=0.2))
        self.ids = tr.nn.EmbeddingBag(table, features=["id"])
        self.head = nn.Linear(4, 1)

    def forward(self, batch):
        return self.head(self.ids(batch).flatten(1)).squeeze(1)


mode = sys.argv[1]
cluster = tr.init()
torch.manual_seed(0)
ids = torch.randint(0, 50, (2000,), generator=torch.Generator().manual_seed(0))
data = [{"id": some, "label": (some % 2).float()} for some in ids.split(50)]
strategy = tr.Strategy(mode, staleness=2) if mode == "bounded" else tr.Strategy(mode)
model, criterion = Model(), nn.functional.binary_cross_entropy_with_logits
adam = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = tr.Trainer(model, adam, loss=criterion, strategy=strategy, progress=False)
optimizer = trainer.optimizer
for epoch in range(2):
    for number, batch in enumerate(tr.prefetch(data, model, epoch=epoch)):
        loss = criterion(model(batch), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if cluster.worker == 1 and (epoch, number) == (1, 1) and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if optimizer.num_steps % 5 == 0:
            print("at", optimizer.num_steps, trainer.evaluate(data[-4:])["loss"], flush=True)
