"""The training job that `ctr` and `service` measure. Runs alone (embedded) or under trireme launch.

The model is that of the rivals' scripts, and reads Criteo's text. After a pass over the warm-up
files the job times one `Trainer.fit`, which returns when every push has been applied, and worker 0
writes one JSON object to --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trireme as tr
import trireme.train.optimizer
from trireme.train.modes import Async
from trireme.train.modes.base import BeginPull, CompletePull
from trireme.worker.gradients import KeysByClass

NUM_SPARSE, NUM_DENSE = 26, 13
FEATURES = [f"C{i}" for i in range(1, NUM_SPARSE + 1)]
SLOT_NAMES = [str(number) for number in range(2, 302)]  # as slot_data.NAMES, not importable here
SHOWS = tr.policy.ShowClick("show", "click")
HIDDEN = (512, 256, 128, 32)
RULES = {"adam": tr.optim.Adam(lr=1e-3), "adagrad": tr.optim.Adagrad(lr=1e-2, shared=True)}


class CTR(nn.Module):
    """CTR-DNN: embeddings and dense values through an MLP to two logits."""

    def __init__(self, rows: tr.Table) -> None:
        super().__init__()
        self.emb = tr.nn.EmbeddingBag(rows, features=FEATURES)
        sizes = (NUM_SPARSE * rows.dim + NUM_DENSE, *HIDDEN, 2)
        layers: list[nn.Module] = []
        for size, next_size in itertools.pairwise(sizes):
            linear = nn.Linear(size, next_size)
            nn.init.normal_(linear.weight, std=1 / math.sqrt(size))
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.ReLU()]
        self.mlp = nn.Sequential(*layers[:-1])

    def forward(self, batch: Any) -> Tensor:
        return self.mlp(torch.cat([self.emb(batch).flatten(1), batch["dense"]], 1))


class Sum(nn.Module):
    """The sum of embeddings: the parameter service alone. The output is its own loss."""

    def __init__(
        self, rows: tr.Table, features: Sequence[str], padding_key: int | None = None
    ) -> None:
        super().__init__()
        self.emb = tr.nn.EmbeddingBag(rows, features=features, padding_key=padding_key)
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, batch: Any) -> Tensor:
        return self.emb(batch).flatten(1).sum(1) * self.w


class Blind(Async):
    """Mode async as if batches shared no rows and pushes changed no dense weights."""

    def pull_ahead(self, *, steps: bool) -> BeginPull:
        def begin(keys: KeysByClass, _: KeysByClass, number: int | None) -> CompletePull:
            pulled = self.pull(keys, blocks=True, number=number)
            return lambda: pulled

        return begin


def cross_entropy(logits_B2: Tensor, labels_B: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits_B2, labels_B.long())


def mean_output(outputs_B: Tensor, labels_B: Tensor) -> Tensor:
    return outputs_B.mean()


def cpu_s() -> dict[str, float]:
    """CPU seconds so far of each process of the job on this machine."""
    return {name: seconds for name, (_, seconds) in processes().items()}


def processes() -> dict[str, tuple[int, float]]:
    """Id and CPU seconds so far of this process and of each other process of the job."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    by_name = {"worker": (os.getpid(), used.ru_utime + used.ru_stime)}
    if "TRIREME_ROLE" not in os.environ:
        return by_name
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            environment = path.with_name("environ").read_text()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == os.getppid() and path.parent.name != str(os.getpid()):
            ticks = int(fields[11]) + int(fields[12])
            stated = dict(line.partition("=")[::2] for line in environment.split("\0"))
            name = f"{stated.get('TRIREME_ROLE')}_{stated.get('TRIREME_INDEX')}"
            by_name[name] = int(path.parent.name), ticks / os.sysconf("SC_CLK_TCK")
    return by_name


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", choices=["ctr", "sum", "slot_dnn"], required=True)
    parser.add_argument("--data", choices=["criteo", "slot"], required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--shows", action="store_true", help="rows count shows and clicks")
    parser.add_argument("--in_memory", action="store_true", help="load the data before it is timed")
    parser.add_argument("--in_pass", action="store_true", help="time a pass on a device")
    parser.add_argument(
        "--products",
        default="float32",
        choices=["float32", "onednn", "bf16"],
        help="matrix products: torch's in float32, those of oneDNN, or in bfloat16",
    )
    parser.add_argument("--blind", action="store_true", help="pull each batch ahead whole")
    parser.add_argument("--strategy", default="async", help="a consistency mode")
    parser.add_argument("--rule", choices=sorted(RULES), default="adam", help="of the rows")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--warm", nargs="+", required=True)
    parser.add_argument("--timed", nargs="+", required=True)
    parser.add_argument("--test", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def make_trainer(args: argparse.Namespace) -> tr.Trainer:
    """The model and optimizers, as the rivals have them."""
    is_slot = args.data == "slot"
    rule = tr.optim.FleetAdagrad(lr=0.05) if is_slot else RULES[args.rule]
    rows = tr.Table(
        "ctr",
        dim=args.dim,
        optimizer=rule,
        initializer=tr.initializer.Uniform(-0.05, 0.05),
        seed=args.seed,
        policy=tr.policy.ScorePolicy(show_click=SHOWS) if args.shows else None,
    )
    models: dict[str, Callable[[], nn.Module]] = {
        "ctr": lambda: CTR(rows),
        "sum": lambda: Sum(
            rows, SLOT_NAMES if is_slot else FEATURES, padding_key=0 if is_slot else None
        ),
        "slot_dnn": lambda: tr.models.SlotDnn(rows, features=SLOT_NAMES),
    }
    losses = {
        "ctr": cross_entropy,
        "sum": mean_output,
        "slot_dnn": nn.functional.binary_cross_entropy_with_logits,
    }
    model = models[args.net]()
    if args.products == "onednn":
        tr.nn.use_onednn(model)
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), 5e-6 if is_slot else 1e-3),
        loss=losses[args.net],
        strategy=tr.Strategy(args.strategy),
        metrics=[] if args.net == "sum" else [tr.metrics.AUC()],
        label="click" if is_slot else "label",
        threads=args.threads,
        autocast=torch.bfloat16 if args.products == "bf16" else None,
    )


def schema_of(data: str) -> tr.data.Schema:
    if data == "criteo":
        return tr.data.criteo()
    fields = [tr.data.Show("show"), tr.data.Label("click"), *map(tr.data.Sparse, SLOT_NAMES)]
    return tr.data.multislot(fields)


def main() -> None:
    args = arguments()
    cluster = tr.init()
    torch.manual_seed(args.seed)
    if args.blind:
        trireme.train.optimizer.mode_class = lambda _: Blind
    trainer = make_trainer(args)
    schema = schema_of(args.data)

    def dataset(files: list[str]) -> Any:
        if not args.in_memory:
            return tr.data.QueueDataset(files, schema=schema, batch_size=args.batch)
        loaded = tr.data.InMemoryDataset(files, schema=schema, batch_size=args.batch)
        loaded.load_into_memory()
        return loaded

    trainer.fit(dataset(args.warm))
    timed = dataset(args.timed)
    started, cpu_before = time.monotonic(), cpu_s()
    with trainer.on_device(timed) if args.in_pass else nullcontext():
        figures = trainer.fit(timed)
    wall_s, cpu_after = time.monotonic() - started, cpu_s()
    result = {
        "examples": figures["examples"],
        "examples_per_s": figures["examples"] / wall_s,
        "wall_s": wall_s,
        "timed_s": (started, started + wall_s),
        "pids": {name: pid for name, (pid, _) in processes().items()},
        "train": {name: figures[name] for name in ("loss", "auc") if name in figures},
        "cpu_us_per_example": {
            name: round(1e6 * (after - cpu_before[name]) / figures["examples"], 2)
            for name, after in cpu_after.items()
        },
        "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "trainer_threads": args.threads,
    }
    if args.test:
        result["test_auc"] = trainer.evaluate(dataset(args.test))["auc"]
    if cluster.worker == 0:
        args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
