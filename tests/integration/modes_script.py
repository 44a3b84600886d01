"""Training script of test_modes: takes MODE as JSON, then the batch count of each worker."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import trireme as tr

NUM_KEYS = 64
STRATEGY = tr.Strategy(**json.loads(sys.argv[1]))
LENGTHS = [int(length) for length in sys.argv[2].split(",")]


class Parity:
    """Whether a key is odd: what rows can learn, and a dense part of it."""

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[dict[str, Any]]:
        del num_streams
        generator = torch.Generator().manual_seed(100 * epoch + index)
        for number in range(LENGTHS[index]):
            keys = torch.randint(0, NUM_KEYS, (8 + number % 3,), generator=generator)
            yield {"key": keys, "label": (keys % 2).float()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("t", dim=4, optimizer=tr.optim.Adagrad(lr=0.2))
        self.rows = tr.nn.EmbeddingBag(table, features=["key"])
        self.top = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(self.rows(batch).flatten(1)).squeeze(1)


def main() -> None:
    torch.manual_seed(0)
    cluster = tr.init()
    model = Model()
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=STRATEGY,
        metrics=[tr.metrics.AUC()],
        progress=False,
    )
    trained = trainer.fit(Parity(), epochs=2)
    figures = trainer.evaluate(Parity())
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ahead = [int(steps) for server in cluster.client.stats() for steps in server["ahead"]]
    result = {
        "auc": figures["auc"],
        "trained": trained["examples"],
        "weights": hashlib.sha256(weights).hexdigest(),
        "ahead": max(ahead, default=0),
    }
    print("RESULT", json.dumps(result))


main()
