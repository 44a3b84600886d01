"""The job that `startup` measures: one batch of a small model. startup_job.py FILE BATCH_SIZE OUT

It writes the time at which the first batch was trained on and its push applied.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

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


def main() -> None:
    file, batch_size, out = sys.argv[1:]
    tr.init()
    model = Model()
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters()),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=tr.Strategy("async"),
    )
    dataset = tr.data.QueueDataset([file], schema=tr.data.criteo(), batch_size=int(batch_size))
    trainer.fit(list(itertools.islice(dataset, 1)))
    Path(out).write_text(json.dumps({"first_batch": time.monotonic()}))


if __name__ == "__main__":
    main()
