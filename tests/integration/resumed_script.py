"""A training script that takes checkpoints and resumes from the newest one.

It prints `step N` after the N-th forward pass of this process, and `done` when all is trained,
saved and closed. The model has what a resumed run could get wrong: dropout, BatchNorm, optimizers
with state, keys that wait for admission, shows and clicks. Streams are shuffled differently in each
epoch, and their lengths differ.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import numpy as np
import torch
from torch import nn

import trireme as tr

KNOBS: dict[str, dict[str, int]] = {"bounded": {"staleness": 2}}
EPOCHS, NUM_BATCHES, BATCH, NUM_KEYS, DIM = 2, 20, 16, 300, 3


class Model(nn.Module):
    def __init__(self, rule: tr.optim.Rule | None = None) -> None:
        super().__init__()
        table = tr.Table(
            "t",
            dim=DIM,
            optimizer=rule or tr.optim.Adam(lr=0.05),
            initializer=tr.initializer.Constant(0.0),
        )
        self.rows = tr.nn.EmbeddingBag(table, features=["a", "b"])
        scored = tr.Table(
            "scored",
            dim=2,
            optimizer=tr.optim.Adagrad(lr=0.05),
            policy=tr.policy.CtrCommonAccessor(),
            admit=None if rule else tr.policy.CountFilter(3),  # counts are of every push
        )
        self.scored = tr.nn.EmbeddingBag(scored, features=["a"])
        width = 2 * DIM + 2 + 2  # a scored row is read with its shows and clicks
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(width, 1)
        nn.init.constant_(self.head.weight, 0.1)
        self.num_steps = 0

    def forward(self, batch: Any) -> torch.Tensor:
        self.num_steps += 1
        rows = torch.cat([self.rows(batch).flatten(1), self.scored(batch).flatten(1)], 1)
        return self.head(self.dropout(self.norm(rows))).squeeze(1)


class LoudModel(Model):
    def forward(self, batch: Any) -> torch.Tensor:
        out = super().forward(batch)
        print(f"step {self.num_steps}", flush=True)
        return out


def columns(num_examples: int, seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    keys = {name: rng.integers(0, NUM_KEYS, num_examples) for name in ("a", "b")}
    return {**keys, "label": rng.integers(0, 2, num_examples).astype(np.float32)}


def model_of(rule: str, kind: type[Model] = Model) -> Model:
    return kind({"adam": tr.optim.Adam(lr=0.05), "count": tr.optim.Count()}[rule])


SCHEMA = tr.data.Schema([tr.data.Sparse("a"), tr.data.Sparse("b"), tr.data.Label()])


def array_dataset(num_batches: int, seed: int = 3) -> tr.data.ArrayDataset:
    return tr.data.ArrayDataset(
        columns(num_batches * BATCH, seed), schema=SCHEMA, batch_size=BATCH, shuffle=True, seed=seed
    )


class Unequal:
    """Each worker has data of its own, 20 batches, 14, 8."""

    def stream(
        self, index: int, num_streams: int, *, start: tuple[int, ...] | None = None, epoch: int = 0
    ) -> Any:
        del num_streams
        mine = array_dataset(NUM_BATCHES - 6 * index, seed=index)
        return mine.stream(0, 1, start=start, epoch=epoch)


def make_trainer(mode: str, model: Model, **options: Any) -> tr.Trainer:
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        strategy=tr.Strategy(mode, **KNOBS.get(mode, {})),
        loss=nn.functional.binary_cross_entropy_with_logits,
        progress=False,
        **options,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--rule", default="adam")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--every_steps", type=int)
    parser.add_argument("--every_s", type=float)
    arguments = parser.parse_args()
    checkpoints = tr.Checkpoints(
        arguments.path,
        every_steps=arguments.every_steps,
        every_s=arguments.every_s,
        keep=arguments.keep,
    )
    with tr.init() as cluster:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(cluster.worker)
        trainer = make_trainer(arguments.mode, model_of(arguments.rule, LoudModel))
        trainer.fit(Unequal(), epochs=arguments.epochs, checkpoints=checkpoints, resume=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
