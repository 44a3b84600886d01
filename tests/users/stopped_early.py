"""Early stopping, the best checkpoint and TensorBoard, alone or as a job."""

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


tr.init()
torch.manual_seed(0)
draw = torch.Generator().manual_seed(0)
user, item = torch.randint(0, 50, (2, 1900), generator=draw)
liked = torch.where(user % 5 + item % 5 > 4, 0.9, 0.1)  # what is to be learned
columns = {"user": user, "item": item, "label": torch.bernoulli(liked, generator=draw)}
train = {name: values[:1500] for name, values in columns.items()}
valid = {name: values[1500:] for name, values in columns.items()}
model = Model()
best = tr.BestCheckpoint("best", monitor="auc")
trainer = tr.Trainer(
    model,
    torch.optim.Adam(model.parameters(), lr=0.01),
    loss=nn.functional.binary_cross_entropy_with_logits,
    metrics=["auc"],
    callbacks=[tr.EarlyStopping("loss", patience=2), best, tr.TensorBoard("runs/1", every_steps=2)],
)
figures = trainer.fit(train, epochs=20, valid=valid)
print(trainer.num_epochs, "epochs", figures["valid_auc"], "best", best.best, best.path, flush=True)
trainer.load(best.path)
print(trainer.evaluate(valid)["auc"], flush=True)
