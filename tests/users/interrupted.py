"""Training that a user interrupts with Ctrl-C, and starts again."""

import sys

import torch
from torch import nn

import trireme as tr


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        table = tr.Table("ids", dim=4, optimizer=tr.optim.Adagrad(lr=0.2))
        self.ids = tr.nn.EmbeddingBag(table, features=["user"])
        self.head = nn.Linear(4, 1)

    def forward(self, batch):
        print("step", flush=True)
        return self.head(self.ids(batch).flatten(1)).squeeze(1)


folder, num_batches = sys.argv[1], int(sys.argv[2])
tr.init()
torch.manual_seed(0)
users = torch.randint(0, 50, (num_batches, 10))
data = [{"user": user, "label": (user % 2).float()} for user in users]
model = Model()
trainer = tr.Trainer(
    model,
    torch.optim.Adam(model.parameters(), lr=0.01),
    loss=nn.functional.binary_cross_entropy_with_logits,
)
trainer.fit(data, epochs=2, checkpoints=tr.Checkpoints(folder, every_steps=1000000), resume=True)
print("done", trainer.num_epochs, trainer.optimizer.num_steps)
