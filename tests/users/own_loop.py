"""A loop of one's own: evaluation in the middle, early stopping, checkpoints, resume."""

import sys

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


folder, mode = sys.argv[1], sys.argv[2]
cluster = tr.init()
torch.manual_seed(0)
draw = torch.Generator().manual_seed(0)
user, item = torch.randint(0, 50, (2, 2000), generator=draw)
liked = torch.where(user % 5 + item % 5 > 4, 0.9, 0.1)  # what is to be learned
columns = {"user": user, "item": item, "label": torch.bernoulli(liked, generator=draw)}
data = [
    {name: values[i : i + 100] for name, values in columns.items()} for i in range(0, 2000, 100)
]
train, valid = data[:16], data[16:]

model, criterion = Model(), nn.functional.binary_cross_entropy_with_logits
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = tr.Trainer(
    model, optimizer, loss=criterion, metrics=["auc"], strategy=tr.Strategy(mode), progress=False
)
optimizer = trainer.optimizer  # replaces torch's
trainer.resume(folder)  # does nothing where there is no checkpoint yet

best, worse = float("inf"), 0
for epoch in range(trainer.num_epochs, 20):
    for batch in tr.prefetch(train, model, epoch=epoch):
        loss = criterion(model(batch), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step := optimizer.num_steps) % 8 == 4:  # all workers at the same place
            print("middle", cluster.worker, step, trainer.evaluate(valid)["loss"], flush=True)
    figures = trainer.evaluate(valid)  # the same on all workers
    print("epoch", cluster.worker, epoch, figures["loss"], figures["auc"], flush=True)
    trainer.num_epochs = epoch + 1
    trainer.save(f"{folder}/{epoch}")
    worse = 0 if figures["loss"] < best else worse + 1
    best = min(best, figures["loss"])
    if optimizer.agree_to_stop(worse == 2):  # all stop if one wants to
        break
print("stopped", cluster.worker, trainer.num_epochs, flush=True)
