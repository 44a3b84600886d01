"""A notebook: cells, which a user runs again and again."""

# %%
import torch
from torch import nn

import trireme as tr

tr.init()
generator = torch.Generator().manual_seed(0)
user, item = torch.randint(0, 100, (2, 2000), generator=generator)
label = ((user * 7 + item * 3) % 5 < 2).float()
batches = list(zip(user.split(100), item.split(100), label.split(100), strict=True))
data = [{"user": u, "item": i, "label": y} for u, i, y in batches]


class Model(nn.Module):
    def __init__(self, dim):
        super().__init__()
        table = tr.Table("ids", dim=dim, optimizer=tr.optim.Adam(lr=0.05), salt=True)
        self.ids = tr.nn.EmbeddingBag(table, features=["user", "item"])
        self.head = nn.Sequential(nn.Linear(2 * dim, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch):
        return self.head(self.ids(batch).flatten(1)).squeeze(1)


def make_trainer(model, **options):
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.binary_cross_entropy_with_logits,
        metrics=["auc"],
        strategy=tr.Strategy("sync"),
        **options,
    )


# %%
torch.manual_seed(1)
model = Model(dim=8)
trainer = make_trainer(model)
untrained = trainer.evaluate(data)["auc"]
trained = trainer.fit(data, epochs=3)["auc"]

# %%
results = {}
for seed in (1, 2, 1):
    torch.manual_seed(seed)
    sweep = make_trainer(Model(dim=8))
    results.setdefault(seed, []).append(sweep.fit(data)["loss"])
