"""Strings from training to serving: the same values everywhere, and no table of ids to keep."""

import numpy as np
import pandas as pd
from torch import nn

import trireme as tr
from trireme.inference import Predictor
from trireme.inference.export import export_model

rng = np.random.default_rng(1)
clicks = pd.DataFrame({"user": rng.integers(0, 9, 900), "movie": rng.choice(["Heat", "Up"], 900)})
clicks["label"] = (clicks["movie"] == "Up") ^ (clicks["user"] % 2 == 0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        rows = tr.Table("ids", dim=4, salt=True, optimizer=tr.optim.Adagrad(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(rows, features=["user", "movie"])

    def forward(self, batch):
        user, movie = self.rows(batch).unbind(1)
        return (user * movie).sum(1)


tr.init()
trainer = tr.Trainer(Model(), None, loss=nn.functional.binary_cross_entropy_with_logits)
trainer.fit(clicks, epochs=30)
asked = pd.DataFrame({"user": [1, 2], "movie": ["Heat", "Up"]})
scores = trainer.predict(asked)["output"]
trainer.save("ckpt")
export_model(trainer, "export", batch=asked)
served = Predictor("export").predict(asked).outputs["output"]
print(scores.tolist() == served.tolist(), scores.sigmoid().round(decimals=2).tolist())
asked.to_csv("asked.csv", index=False)
