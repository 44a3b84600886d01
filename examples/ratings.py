import numpy as np
import pandas as pd
import torch
from torch import nn

import trireme as tr

rng = np.random.default_rng(1)
users, movies, liking = rng.integers(0, 200, 6000), rng.integers(0, 50, 6000), rng.random(50) * 4
ratings = pd.DataFrame(
    {
        "user": [f"user {u}" for u in users],  # ids are strings or integers, new ones at any time
        "movie": movies,
        "genres": [["comedy", "drama", "war"][m % 3 :] for m in movies],
        "age": rng.integers(18, 80, 6000),
        "rating": (1 + liking[movies]).round(),
    }
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ids = tr.Table("ids", dim=8, salt=True, optimizer=tr.optim.Adagrad(lr=0.1))
        self.emb = tr.nn.EmbeddingBag(self.ids, features=["user", "movie", "genres"])
        self.mlp = nn.Sequential(nn.Linear(3 * 8 + 1, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch):
        x = torch.cat([self.emb(batch).flatten(1), batch["age"][:, None] / 100], 1)
        return self.mlp(x).squeeze(1)


tr.init()
torch.manual_seed(1)
model = Model()
adam = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = tr.Trainer(model, adam, loss=nn.functional.mse_loss, label="rating")
trainer.fit(ratings[:5000], epochs=5)
print(trainer.evaluate(ratings[5000:])["loss"])
print(trainer.predict(ratings[5000:])["output"][:5])
