"""A small model whose best weights are known, its data, and trainers for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trireme as tr
from trireme.data.batch import Batch, Strings
from trireme.job.cluster import Cluster

NUM_KEYS = 200
bce = nn.functional.binary_cross_entropy_with_logits
WEIGHTS = np.random.default_rng(11).normal(size=NUM_KEYS)


class Examples(Dataset[dict[str, Any]]):
    """A map-style dataset of a planted model: logit = w[a] + w[b]."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.ids = generator.integers(0, NUM_KEYS, (count, 2))
        probability = 1 / (1 + np.exp(-2 * WEIGHTS[self.ids].sum(1)))
        self.labels = (generator.random(count) < probability).astype(np.float32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        a, b = self.ids[i]
        return {"a": int(a), "b": int(b), "label": self.labels[i]}


OFFSETS = torch.arange(51)  # one id per example


class Named:
    """The same examples with an ins_id each, in batches of 50 (at a stream's end fewer), cut into
    streams of equal length.
    """

    def __init__(self, count: int, seed: int = 0, **columns: Any) -> None:
        self.examples, self.columns = Examples(count, seed), columns
        self.ids = [f"id{number}" for number in range(count)]

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[Batch]:
        count = len(self.examples)
        begin, end = (count * i // num_streams for i in (index, index + 1))
        for first in range(begin, end, 50):
            rows = slice(first, min(first + 50, end))
            ids, labels = (torch.from_numpy(x[rows]) for x in vars(self.examples).values())
            columns = {"a": ids[:, 0], "b": ids[:, 1], "label": labels}
            columns |= {name: column[rows] for name, column in self.columns.items()}
            columns["ins_id"] = strings(self.ids[rows])
            yield Batch(columns, stream=index, position=(rows.stop - begin,))


def strings(texts: list[str]) -> Strings:
    encoded = [text.encode() for text in texts]
    data = np.frombuffer(b"".join(encoded), np.uint8).copy()
    ends = np.cumsum([0, *map(len, encoded)])
    return Strings(torch.from_numpy(data), torch.from_numpy(ends))


class Linear(nn.Module):
    """One weight per id and a bias."""

    def __init__(self, lr: float = 0.5, initializer: Any = None) -> None:
        super().__init__()
        table = tr.Table(
            "w",
            dim=1,
            optimizer=tr.optim.SGD(lr=lr),
            initializer=initializer or tr.initializer.Constant(0.0),
        )
        self.rows = tr.nn.EmbeddingBag(table, features=["a", "b"])
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.rows(batch).sum((1, 2)) + self.bias


def loader(count: int = 4000, seed: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(Examples(count, seed), batch_size=50, **options)


def trainer_for(
    cluster: Cluster, mode: str = "async", threads: int = 1, **options: Any
) -> tr.Trainer:
    model = Linear(lr=20.0)
    return tr.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=tr.Strategy(mode),
        loss=bce,
        metrics=[tr.metrics.AUC(), tr.metrics.LogLoss()],
        threads=threads,
        progress=False,
        cluster=cluster,
        **options,
    )


def rows_of(cluster: Cluster, model: Linear) -> np.ndarray:
    model.eval()
    ids = torch.arange(NUM_KEYS)
    with torch.no_grad():
        return model.rows({"a": ids, "b": ids})[:, 0, 0].numpy()
