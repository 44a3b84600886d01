"""Script of a worker that torchrun starts: it trains, says where it is, and prints its result.

Arguments: the mode; a folder. At batch 20 of the first epoch worker 1 is killed, once.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trireme as tr

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
NUM_KEYS, NUM_BATCHES = 50, 40


class Data:
    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[dict[str, Any]]:
        del num_streams
        random = torch.Generator().manual_seed(100 * epoch + index)
        for number in range(NUM_BATCHES):
            if (index, epoch, number) == (1, 0, 20) and (FOLDER / "dies").exists():
                (FOLDER / "dies").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            key = torch.randint(0, NUM_KEYS, (16,), generator=random)
            yield {"key": key, "label": (key % 2).float()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = tr.nn.EmbeddingBag(tr.Table("t", dim=4, seed=1), features=["key"])
        self.top = nn.Linear(4, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(self.rows(batch).flatten(1)).squeeze(1)


cluster = tr.init()
torch.manual_seed(1)
model = Model()
trainer = tr.Trainer(
    model,
    torch.optim.Adam(model.parameters(), lr=0.01),
    loss=nn.functional.binary_cross_entropy_with_logits,
    strategy=tr.Strategy(MODE),
    progress=False,
)
trainer.fit(Data(), epochs=2)
outputs = model({"key": torch.arange(NUM_KEYS)}).detach().numpy()
digest = hashlib.sha256(outputs.tobytes()).hexdigest()[:16]
print(f"RESULT {cluster.worker} {trainer.optimizer.num_steps} {digest}", flush=True)
