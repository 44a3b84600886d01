"""A small training script, used by tests of failures, metrics and keys.

It prints `batch N` for each batch it reads. Its data ends after `--batches`, or when a line comes
on its standard input.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
from collections.abc import Iterator

import torch
from torch import nn

import trireme as tr

FEATURES = ("a", "b")


class Data:
    """Endless random batches; a new iterator continues after the last batch."""

    def __init__(self, batches: int | None, *, listens: bool) -> None:
        self._batches = batches
        self._stopped = threading.Event()
        if listens:
            threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        wait_told()
        self._stopped.set()

    def stream(self, index: int, num_streams: int, *, epoch: int) -> Iterator[dict]:
        del num_streams, epoch
        generator = torch.Generator().manual_seed(index)
        for number in itertools.count(1):
            if self._stopped.is_set() or number - 1 == self._batches:
                return
            print(f"batch {number}", flush=True)
            yield some_batch(generator)


def wait_told() -> None:
    # Not through sys.stdin: processes that a DataLoader forks would wait for its lock.
    if not os.read(sys.stdin.fileno(), 1):
        threading.Event().wait()  # standard input has ended


def some_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    batch = {f: torch.randint(0, 1000, (64,), generator=generator) for f in FEATURES}
    batch["dense"] = torch.randn(64, 3, generator=generator)
    batch["label"] = torch.randint(0, 2, (64,), generator=generator).float()
    return batch


class Loaded(torch.utils.data.Dataset):
    """The same batches as a map-style dataset, for a DataLoader."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return self._batches

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return some_batch(torch.Generator().manual_seed(index))


class Model(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        table = tr.Table("rows", dim=dim, optimizer=tr.optim.Adagrad(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(table, features=FEATURES)
        self.mlp = nn.Sequential(nn.Linear(len(FEATURES) * dim + 3, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: tr.data.Batch) -> torch.Tensor:
        return self.mlp(torch.cat([self.rows(batch).flatten(1), batch["dense"]], 1)).squeeze(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="async")
    parser.add_argument("--dim", type=int, default=4)
    parser.add_argument("--batches", type=int)
    parser.add_argument("--raise_at", type=int, help="raise in the loop after this many steps")
    parser.add_argument("--leave_at", type=int, help="leave the loop after this many steps")
    parser.add_argument("--loader", action="store_true", help="batches from a DataLoader")
    parser.add_argument("--trainer", action="store_true", help="Trainer.fit instead of a loop")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    tr.init()
    torch.manual_seed(7)
    model = Model(arguments.dim)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    strategy, loss = tr.Strategy(arguments.mode), nn.functional.binary_cross_entropy_with_logits
    if arguments.loader:
        data = torch.utils.data.DataLoader(
            Loaded(arguments.batches), batch_size=None, num_workers=4
        )
    else:
        data = Data(arguments.batches, listens=arguments.leave_at is None)
    if arguments.trainer:
        figures = tr.Trainer(model, adam, strategy=strategy, loss=loss).fit(data)
        print(f"loss {figures['loss']!r}")
        print(f"trained on {figures['examples']} examples")
        return
    optimizer = tr.DistributedOptimizer(adam, model, strategy=strategy)
    for batch in tr.prefetch(data, model):
        loss(model(batch), batch["label"]).backward()
        optimizer.step()
        if optimizer.num_steps == arguments.raise_at:
            raise ValueError("a mistake in the training loop")
        if optimizer.num_steps == arguments.leave_at:
            print("left the loop", flush=True)
            wait_told()
            return
    print(f"trained {optimizer.num_steps} steps", flush=True)


if __name__ == "__main__":
    main()
