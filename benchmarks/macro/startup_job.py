"""The small model of `startup`: a script, startup_job.py FILE, and a module for `trireme run`."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import trireme as tr


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = tr.Table("ctr", dim=8, optimizer=tr.optim.Adagrad(lr=0.05))
        self.emb = tr.nn.EmbeddingBag(rows, features=[f"C{i}" for i in range(1, 27)])
        self.mlp = nn.Linear(26 * 8 + 13, 1)

    def forward(self, batch: tr.data.Batch) -> Tensor:
        return self.mlp(torch.cat([self.emb(batch).flatten(1), batch["dense"]], 1)).squeeze(1)


def create(config: tr.Config) -> tr.Recipe:
    """What `trireme run` trains."""
    del config
    model = Model()
    return tr.Recipe(
        model=model,
        loss=nn.functional.binary_cross_entropy_with_logits,
        optimizer=torch.optim.Adam(model.parameters()),
        schema=tr.data.criteo(),
    )


def main() -> None:
    tr.init()
    model = Model()
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters()),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=tr.Strategy("async"),
    )
    trainer.fit(tr.data.QueueDataset(sys.argv[1:], schema=tr.data.criteo(), batch_size=64))


if __name__ == "__main__":
    main()
