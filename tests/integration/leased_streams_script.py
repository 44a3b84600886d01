"""A training script for jobs with leased streams.

It prints `reads stream S` when it opens one, `step N of S` after the N-th batch of its process,
which is of stream S, and at the end its metrics and `done`. At the steps of --hold it prints `held`
and waits for a line on its standard input.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import trireme as tr
from trireme.job.cluster import Cluster

BATCH, NUM_KEYS, NUM_STREAMS, EPOCHS = 8, 60, 4, 2
LENGTHS = (5, 3, 0, 4)  # batches of the streams
SCHEMA = tr.data.Schema([tr.data.Sparse("a"), tr.data.Dense("of"), tr.data.Label()])


def examples(stream: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([7, stream])
    num = LENGTHS[stream] * BATCH
    keys, labels = rng.integers(0, NUM_KEYS, num), rng.integers(0, 2, num)
    streams = np.full(num, stream, np.float32)
    return {"a": keys, "of": streams, "label": labels.astype(np.float32)}


class Data:
    """Streams of unlike lengths, one of them empty."""

    def stream(
        self, index: int, num_streams: int, *, start: tuple[int, ...] | None = None, epoch: int = 0
    ) -> Iterator[Any]:
        assert num_streams == NUM_STREAMS
        print(f"reads stream {index}", flush=True)
        dataset = tr.data.ArrayDataset(
            examples(index), schema=SCHEMA, batch_size=BATCH, shuffle=True, seed=index
        )
        return dataset.stream(0, 1, start=start, epoch=epoch)


class All:
    """The same examples for an evaluation, dealt to the workers that are there."""

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[Any]:
        parts = [examples(stream) for stream in range(NUM_STREAMS)]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        dataset = tr.data.ArrayDataset(columns, schema=SCHEMA, batch_size=BATCH)
        return dataset.stream(index, num_streams, epoch=epoch)


class Model(nn.Module):
    def __init__(self, dim: int = 2, holds: tuple[int, ...] = ()) -> None:
        super().__init__()
        start = tr.initializer.Constant(0.0)
        table = tr.Table("t", dim=dim, optimizer=tr.optim.Count(), initializer=start)
        self.rows = tr.nn.EmbeddingBag(table, features=["a"])
        self.head = nn.Linear(dim, 1)
        for parameter in self.head.parameters():
            nn.init.constant_(parameter, 0.1)
        self.num_steps, self._holds = 0, holds

    def forward(self, batch: Any) -> torch.Tensor:
        if self.training:
            self.num_steps += 1
            print(f"step {self.num_steps} of {int(batch['of'][0])}", flush=True)
            if self.num_steps in self._holds:
                print("held", flush=True)
                os.read(sys.stdin.fileno(), 1)
        return self.head(self.rows(batch).flatten(1)).squeeze(1)


def make_trainer(model: Model, cluster: Cluster | None = None) -> tr.Trainer:
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        strategy=tr.Strategy("async"),
        loss=nn.functional.binary_cross_entropy_with_logits,
        metrics=[tr.metrics.AUC(num_buckets=64)],
        progress=False,
        cluster=cluster,
    )


def say(name: str, figures: dict[str, float]) -> None:
    print(f"{name} {figures['loss']!r} {figures['auc']!r} {figures['examples']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--hold", type=int, nargs="*", default=[])
    parser.add_argument("--dim", type=int, default=2)
    arguments = parser.parse_args()
    with tr.init():
        trainer = make_trainer(Model(arguments.dim, tuple(arguments.hold)))
        say("first", trainer.fit(Data()))
        checkpoints = tr.Checkpoints(f"{arguments.path}/steps", every_steps=3, keep=2)
        say("rest", trainer.fit(Data(), epochs=EPOCHS - 1, checkpoints=checkpoints))
        say("evaluated", trainer.evaluate(All()))
        trainer.save(f"{arguments.path}/last")
    print("done", flush=True)


if __name__ == "__main__":
    main()
