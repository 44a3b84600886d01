"""Train on a Dataset of Hugging Face: its Arrow columns are read without a copy in between."""

import sys

import datasets
import torch
from torch import nn

import trireme as tr


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        table = tr.Table("ids", dim=8, optimizer=tr.optim.Adagrad(lr=0.1), salt=True)
        self.ids = tr.nn.EmbeddingBag(table, features=["user", "genres"], mode="mean")
        self.head = nn.Linear(16, 1)

    def forward(self, batch):
        return self.head(self.ids(batch).flatten(1)).squeeze(1)


folder = sys.argv[1]  # written here; datasets.load_dataset("...") gives one from the hub
generator = torch.Generator().manual_seed(0)
genres = torch.randint(0, 6, (4000, 2), generator=generator)
names = ["drama", "comedy", "crime", "horror", "war", "family"]
datasets.Dataset.from_dict(
    {
        "user": [f"u{number % 40}" for number in range(4000)],
        "genres": [[names[genre] for genre in pair] for pair in genres.tolist()],
        "label": (genres % 2).float().mean(1).round().tolist(),
    }
).save_to_disk(folder)
parts = datasets.load_from_disk(folder).train_test_split(test_size=0.2, seed=0)

tr.init()
torch.manual_seed(0)
model = Model()
trainer = tr.Trainer(
    model,
    torch.optim.Adam(model.parameters(), lr=0.01),
    loss=nn.functional.binary_cross_entropy_with_logits,
    metrics=["auc"],
)
print(trainer.fit(parts["train"], epochs=3, valid=parts["test"])["valid_auc"])
print(trainer.predict(parts["test"].select(range(5)))["output"].sigmoid())
