"""A training script whose workers are killed anywhere and restarted with the same arguments.

With --hold METHOD:N:before (or after), a process stops at its N-th call of a client's method,
prints `held` and waits to be killed. It prints `step N` after its N-th forward pass, and at the end
its metrics and `done`.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

import trireme as tr
from trireme.job.cluster import Cluster
from trireme.train.checkpointing import save
from trireme.train.modes.device_ranks.steps_together import StepsTogether
from trireme.worker import passes
from trireme.worker.client import WorkerClient
from trireme.worker.coordinator_calls import CoordinatorCalls

BATCH, NUM_KEYS, DIM = 8, 120, 3
LENGTHS = (9, 6)  # of the workers' streams
EPOCHS, EVERY_STEPS = 3, 4
STRATEGIES = {
    "sync": tr.Strategy("sync"),
    "bounded": tr.Strategy("bounded", staleness=2),
    "async": tr.Strategy("async"),
    "geo": tr.Strategy("geo", k=2),
}
SCHEMA = tr.data.Schema([tr.data.Sparse("a"), tr.data.Sparse("b"), tr.data.Label()])


class Model(nn.Module):
    """Nothing in it is drawn at random."""

    def __init__(self, rule: tr.optim.Rule) -> None:
        super().__init__()
        start = tr.initializer.Constant(0.0)
        table = tr.Table("t", dim=DIM, optimizer=rule, initializer=start)
        self.rows = tr.nn.EmbeddingBag(table, features=["a", "b"])
        self.head = nn.Linear(2 * DIM, 1)
        for parameter in self.head.parameters():
            nn.init.constant_(parameter, 0.1)
        self.num_steps = 0

    def forward(self, batch: Any) -> torch.Tensor:
        if self.training:
            self.num_steps += 1
            print(f"step {self.num_steps}", flush=True)
        return self.head(self.rows(batch).flatten(1)).squeeze(1)


def examples(worker: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([5, worker])
    num = LENGTHS[worker] * BATCH
    keys = {name: rng.integers(0, NUM_KEYS, num) for name in ("a", "b")}
    return {**keys, "label": rng.integers(0, 2, num).astype(np.float32)}


class Data:
    """Each worker has data of its own, in another order in each epoch."""

    def stream(
        self, index: int, num_streams: int, *, start: tuple[int, ...] | None = None, epoch: int = 0
    ) -> Any:
        del num_streams
        mine = tr.data.ArrayDataset(
            examples(index), schema=SCHEMA, batch_size=BATCH, shuffle=True, seed=index
        )
        return mine.stream(0, 1, start=start, epoch=epoch)


def hold(where: str) -> None:
    """Wait to be killed at some call."""
    name, number, side = where.split(":")
    targets = {"save_checkpoint": save, "begin_pass": passes, "leave": passes}
    targets |= {"end_device_pass": passes, "meet_in_pass": passes, "answer": StepsTogether}
    targets |= dict.fromkeys(("gather", "say_goodbye"), CoordinatorCalls)
    target: Any = targets.get(name, WorkerClient)
    method, num_calls = getattr(target, name), 0

    @functools.wraps(method)
    def held(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if side == "before" and num_calls == int(number):
            wait_killed()
        result = method(*arguments, **options)
        if side == "after" and num_calls == int(number):
            wait_killed()
        return result

    setattr(target, name, held)


def wait_killed() -> None:
    print("held", flush=True)
    os.read(sys.stdin.fileno(), 1)


def make_trainer(mode: str, model: Model, cluster: Cluster) -> tr.Trainer:
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        strategy=STRATEGIES[mode],
        loss=nn.functional.binary_cross_entropy_with_logits,
        metrics=[tr.metrics.AUC(num_buckets=64)],
        progress=False,
        cluster=cluster,
    )


def one_stream(worker: int) -> tr.data.ArrayDataset:
    return tr.data.ArrayDataset(examples(worker), schema=SCHEMA, batch_size=BATCH)


def train_passes(trainer: tr.Trainer, *, on_device: bool = True) -> float:
    """Three passes of one worker, 18, 9 and 6 steps, the first and last of them on a device; the
    loss after them.
    """
    for worker, epochs, is_on_device in ((0, 2, on_device), (0, 1, False), (1, 1, on_device)):
        with trainer.on_device(one_stream(worker)) if is_on_device else nullcontext():
            trainer.fit(one_stream(worker), epochs=epochs)
    assert trainer.optimizer.num_steps == 33
    return trainer.evaluate(one_stream(0))["loss"]


def train_passes_together(trainer: tr.Trainer, how: str = "passes") -> list[float]:
    """Three epochs of two workers, 9 steps each; the figures of an evaluation after them. how: the
    first and last are in "passes" or "windows" on devices, or "plain"; or all are in passes, each
    of which reads for the one "following".
    """
    epochs = [Data(), Data(), Data(), None]
    for number, (data, following) in enumerate(pairwise(epochs)):
        within: AbstractContextManager[None] = nullcontext()
        if how == "following":
            within = trainer.on_device(data, following)
        elif how == "windows" and number != 1:
            within = trainer.in_window(2, "4KiB")
        elif how == "passes" and number != 1:
            within = trainer.on_device(data)
        with within:
            trainer.fit(data)
    figures = trainer.evaluate(Data())
    return [figures["loss"], figures["auc"], figures["examples"]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--hold")
    parser.add_argument("--passes", action="store_true", help="on devices")
    parser.add_argument("--windows", action="store_true", help="of several workers, there")
    parser.add_argument("--following", action="store_true", help="as --passes, read ahead")
    arguments = parser.parse_args()
    if arguments.hold:
        hold(arguments.hold)
    with tr.init() as cluster:
        for seed in (torch.manual_seed, np.random.seed, random.seed):  # a save has their states
            seed(cluster.worker)
        rule = tr.optim.Adam(lr=0.05) if arguments.mode == "sync" else tr.optim.Count()
        trainer = make_trainer(arguments.mode, Model(rule), cluster)
        chosen = [how for how in ("passes", "windows", "following") if getattr(arguments, how)]
        for how in chosen:
            if cluster.num_workers == 1:
                print(f"trained to {train_passes(trainer)!r}")
            else:
                print(f"trained to {train_passes_together(trainer, how)!r}")
            trainer.save(f"{arguments.path}/last")
            print("done", flush=True)
            return
        checkpoints = tr.Checkpoints(f"{arguments.path}/steps", every_steps=EVERY_STEPS, keep=2)
        trainer.fit(Data(), epochs=EPOCHS - 1, checkpoints=checkpoints)
        evaluated = trainer.evaluate(Data())
        trainer.save(f"{arguments.path}/between")
        trained = trainer.fit(Data())
        trainer.save(f"{arguments.path}/last")
    print(f"evaluated {evaluated['auc']} {evaluated['loss']} {evaluated['examples']}")
    print(f"trained {trained['auc']} {trained['examples']}")
    print("done", flush=True)


if __name__ == "__main__":
    main()
