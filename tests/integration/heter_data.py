"""What the scripts of heterogeneous jobs under test share: their data, and what they tell."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import trireme as tr
from trireme.data.batch import Batch, Ragged, Strings

NUM_KEYS = 64


class Bags:
    """Bags with weights of one feature, single ids of another; the label is whether the single one
    is odd. Prints `read N` for batch N.

    lengths: batches of each stream. empty: how many of them, from the first on, have no examples.
    dtype: of the dense column.
    """

    def __init__(
        self, lengths: Sequence[int], empty: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self._lengths, self._empty, self._dtype = lengths, empty, dtype

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[Batch]:
        del num_streams
        generator = torch.Generator().manual_seed(100 * epoch + index)
        for number in range(self._lengths[index]):
            print(f"read {number}", flush=True)
            yield self._batch(0 if number < self._empty else 8 + number % 3, generator)

    def _batch(self, size: int, generator: torch.Generator) -> Batch:
        lengths = torch.randint(0, 4, (size,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        num = int(lengths.sum())
        values = torch.randint(0, NUM_KEYS, (num,), generator=generator)
        weights = torch.rand(num, generator=generator)
        one = torch.randint(0, NUM_KEYS, (size,), generator=generator)
        return Batch(
            {
                "bag": Ragged(values, offsets, weights),
                "one": one,
                "dense": torch.rand(size, 3, generator=generator).to(self._dtype),
                "name": Strings.encode([f"e{i}" for i in range(size)]),
                "label": (one % 2).float(),
            }
        )


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """0 for no examples."""
    losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return losses / max(len(labels), 1)


def digest(tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(tensors[name].detach().numpy().tobytes())
    return total.hexdigest()


def train_and_tell(trainer: tr.Trainer, data: Bags, tables: Sequence[tr.Table], **fit: Any) -> None:
    """Train, evaluate, and print `RESULT` with all that the job has then."""
    print("TRAINER", trainer.threads, flush=True)
    trained = trainer.fit(data, **fit)
    figures = trainer.evaluate(data)
    keys = np.arange(NUM_KEYS, dtype=np.uint64)
    client = trainer.cluster.client
    pulled = client.pull({table.class_id: keys for table in tables})
    pushes = [stats["pushes"] for stats in client.stats()]
    for figures_of in (trained, figures):
        del figures_of["examples_per_s"]
    result = {
        "trained": trained,
        "figures": figures,
        "weights": digest(dict(trainer.model.named_parameters())),
        "buffers": digest(dict(trainer.model.named_buffers())),
        "rows": digest({str(name): rows for name, rows in pulled.rows.items()}),
        "random": float(torch.rand(())),
        "pushes": pushes,
        "steps": trainer.optimizer.num_steps,
    }
    print("RESULT", json.dumps(result), flush=True)
