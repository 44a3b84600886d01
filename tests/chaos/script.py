"""Training script of the chaos suite: its rows and parameters count their updates.

Called with a JSON object of `Options`. Every push of a batch with a key adds 1 to the key's row of
the table `counted`, and 1 to the dense parameter `pushes`; in sync all workers' pushes of a step
add 1 together, since a rule is applied once per step. Beside them rows and a dense layer learn
something, which in sync is to be the same to the last bit whatever happens.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import trireme as tr
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster

STRATEGIES = {
    "sync": tr.Strategy("sync"),
    "bounded": tr.Strategy("bounded", staleness=2),
    "async": tr.Strategy("async"),
    "geo": tr.Strategy("geo", k=3),
    "hybrid": tr.Strategy("hybrid"),
}
SCHEMA = tr.data.Schema(
    [tr.data.Sparse("a"), tr.data.Sparse("b"), tr.data.Dense("number"), tr.data.Label()]
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a worker.

    Attributes:
        folder: where checkpoints go; the last one is `last`. It is written when there is a file
            `go` beside it: when everything has happened that is to happen.
        data: seed of the examples.
        loads: a checkpoint to go on from; empty: none. Then each epoch ends with a delta on top of
            it: `delta-0`, `delta-1`, ...
        first_epoch: the number of epochs that this checkpoint has.
        batch, num_keys, dim: examples of a batch, keys of each feature, and weights of a row that
            learns.
        stages: names of the model's stages; empty: it has none.
        flaw: a mistake to make on purpose, so that tests can see it found: "lost", "twice",
            "hung", "bit"; "error": a worker fails; "code" and "stays": it ends with another code
            than 0, and not at all, after it was done.
    """

    folder: str
    mode: str
    data: str
    lengths: tuple[int, ...]
    num_epochs: int
    every_steps: int
    pause_per_batch_s: float
    loads: str = ""
    first_epoch: int = 0
    batch: int = 8
    num_keys: int = 150
    dim: int = 3
    stages: tuple[str, ...] = ()
    flaw: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Rows(nn.Module):
    """Gets the batch: the rows, and of each example the sum of what is counted."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        start = tr.initializer.Constant(0.0)
        counted = tr.Table("counted", dim=1, optimizer=tr.optim.Count(), initializer=start)
        learned = tr.Table(
            "learned", dim=dim, optimizer=tr.optim.Adagrad(lr=0.05), initializer=start
        )
        self.counted = tr.nn.EmbeddingBag(counted, features=["a", "b"])
        self.learned = tr.nn.EmbeddingBag(learned, features=["a", "b"])

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        counted = self.counted(batch).sum((1, 2))
        return {
            "rows": self.learned(batch).flatten(1),
            "counted": counted,
            "number": batch["number"],
        }


class Head(nn.Module):
    """A prediction of each example. It says which batch it computes in training."""

    def __init__(self, dim: int, pause_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2 * dim, 1)
        for parameter in self.layer.parameters():
            nn.init.constant_(parameter, 0.1)
        self._pause_s = pause_s

    def forward(self, values: Any) -> dict[str, torch.Tensor]:
        if self.training:
            print(f"step {int(values['number'][0])}", flush=True)
            threading.Event().wait(self._pause_s)
        return {"predicted": self.layer(values["rows"]).squeeze(1), "counted": values["counted"]}


class Pushes(nn.Module):
    """Two numbers per example: the prediction, and one whose gradient for `pushes` is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes = nn.Parameter(torch.zeros(1))

    def forward(self, values: Any) -> torch.Tensor:
        return torch.stack((values["predicted"], values["counted"] - self.pushes), 1)


def make_model(options: Options) -> tr.Stages | nn.Sequential:
    made = Rows(options.dim), Head(options.dim, options.pause_per_batch_s), Pushes()
    if options.stages:
        return tr.Stages(**dict(zip(options.stages, made, strict=True)))
    return nn.Sequential(*made)


def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    learning = nn.functional.binary_cross_entropy_with_logits(output[:, 0], label)
    return learning + output[:, 1].mean()


def make_trainer(mode: str, model: nn.Module, cluster: Cluster) -> tr.Trainer:
    _, head, pushes = model.children()
    groups = [
        {"params": list(pushes.parameters()), "lr": 1.0},
        {"params": list(head.parameters()), "lr": 0.05, "momentum": 0.9},
    ]
    return tr.Trainer(
        model,
        torch.optim.SGD(groups, lr=1.0),
        strategy=STRATEGIES[mode],
        loss=loss,
        progress=False,
        cluster=cluster,
    )


def examples(options: Options, worker: int, epoch: int) -> dict[str, Any]:
    """Of one worker in one epoch, in their order; `number` is that of the batch, from 1 on."""
    rng = np.random.default_rng([*options.data.encode(), worker, epoch])
    length = options.lengths[worker]
    num = length * options.batch
    keys = {name: rng.integers(0, options.num_keys, num) for name in ("a", "b")}
    number = 1 + epoch * length + np.arange(num) // options.batch
    label = rng.integers(0, 2, num).astype(np.float32)
    return {**keys, "number": number.astype(np.float32), "label": label}


class Data:
    """Each worker has its own, and other examples in each epoch."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def stream(
        self, index: int, num_streams: int, *, start: tuple[int, ...] | None = None, epoch: int = 0
    ) -> Any:
        del num_streams
        options = self._options
        columns = examples(options, index, epoch)
        if options.flaw in ("lost", "twice") and (index, epoch) == (0, 0):
            columns = _flawed(columns, options.batch, options.flaw)
        mine = tr.data.ArrayDataset(columns, schema=SCHEMA, batch_size=options.batch)
        return mine.stream(0, 1, start=start, epoch=epoch)


def _flawed(columns: dict[str, Any], batch: int, flaw: str) -> dict[str, Any]:
    """Batch 3 is not there, or twice."""
    cut = slice(3 * batch, None) if flaw == "lost" else slice(2 * batch, None)
    upto = 2 * batch if flaw == "lost" else 3 * batch
    return {name: np.concatenate((c[:upto], c[cut])) for name, c in columns.items()}


def _nudge(method: Any) -> Any:
    """After the first step the last bit of a weight is another."""
    num_calls = 0

    @functools.wraps(method)
    def nudged(self: Pushes, values: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        output: torch.Tensor = method(self, values)
        return output * (1 + 2**-23) if num_calls == 2 else output

    return nudged


def train(trainer: tr.Trainer, options: Options, saving: dict[str, Any]) -> None:
    if not options.loads:
        trainer.fit(Data(options), epochs=options.num_epochs, **saving)
        return
    trainer.load(options.loads)
    for epoch in range(options.num_epochs):
        trainer.fit(Data(options), epochs=1, **saving)
        trainer.save(f"{options.folder}/delta-{epoch}", mode="delta")


def _print_tiers(cluster: Cluster) -> None:
    """Where the rows lie, if servers have some on SSD; of each server since its process began."""
    total = Counter[str]()
    for stats in cluster.client.stats():
        for table in stats["tables"].values():
            if (tier := table["tier"]) is not None:
                total.update({"rows": table["rows"], "on_ssd": tier["rows"]})
                total.update({name: tier[name] for name in ("misses", "evicted", "cleaned")})
    if total:
        print("tiers", json.dumps(total), flush=True)


def main() -> None:
    settings = json.loads(sys.argv[1])
    lists = {name: tuple(settings[name]) for name in ("lengths", "stages")}
    options = Options(**{**settings, **lists})
    with tr.init() as cluster:
        for seed in (torch.manual_seed, np.random.seed, random.seed):  # a save has their states
            seed(cluster.worker)
        if options.flaw == "bit" and cluster.worker == 0:
            Pushes.forward = _nudge(Pushes.forward)  # type: ignore[method-assign]
        model = make_model(options)
        if options.flaw == "error":
            raise BadRequest("script: expected no error, found one that was asked for")
        trainer = make_trainer(options.mode, model, cluster)
        saving = {}
        if options.every_steps:
            where = f"{options.folder}/steps"
            saving["checkpoints"] = tr.Checkpoints(where, every_steps=options.every_steps, keep=2)
        train(trainer, options, saving)
        while options.flaw == "hung" or not Path(options.folder, "go").exists():
            threading.Event().wait(0.02)
        if cluster.worker == 0:
            _print_tiers(cluster)
        trainer.save(f"{options.folder}/last", mode="full" if options.loads else "base")
    print("done", flush=True)
    if options.flaw == "stays":
        threading.Event().wait()
    sys.exit(3 if options.flaw == "code" else 0)


if __name__ == "__main__":
    main()
