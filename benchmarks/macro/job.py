"""The training job that `ctr` and `service` measure. Runs alone (embedded) or under trireme launch.

It is the model of the rivals' scripts, read from Criteo's text. After a pass over the warm-up files
it times one `Trainer.fit`, which returns when every push has been applied, and writes one JSON
object to --out. Of the processes of a job only worker 0 gets that far.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trireme as tr

NUM_SPARSE, NUM_DENSE = 26, 13
FEATURES = [f"C{i}" for i in range(1, NUM_SPARSE + 1)]
HIDDEN = (512, 256, 128, 32)


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
    """Nothing but embeddings, summed: the parameter service alone. Its output is its own loss."""

    def __init__(self, rows: tr.Table) -> None:
        super().__init__()
        self.emb = tr.nn.EmbeddingBag(rows, features=FEATURES)
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, batch: Any) -> Tensor:
        return self.emb(batch).flatten(1).sum(1) * self.w


def cross_entropy(logits_B2: Tensor, labels_B: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits_B2, labels_B.long())


def mean_output(outputs_B: Tensor, labels_B: Tensor) -> Tensor:
    return outputs_B.mean()


def cpu_s() -> dict[str, float]:
    """CPU seconds so far of this process and of each other process of the job."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = {"worker": used.ru_utime + used.ru_stime}
    if "TRIREME_ROLE" not in os.environ:
        return seconds
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == os.getppid() and path.parent.name != str(os.getpid()):
            ticks = int(fields[11]) + int(fields[12])
            name = f"server_{len(seconds) - 1}"
            seconds[name] = ticks / os.sysconf("SC_CLK_TCK")
    return seconds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", choices=["ctr", "sum"], required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--warm", nargs="+", required=True)
    parser.add_argument("--timed", nargs="+", required=True)
    parser.add_argument("--test", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    tr.init()
    torch.manual_seed(args.seed)
    rows = tr.Table(
        "ctr",
        dim=args.dim,
        optimizer=tr.optim.Adam(lr=1e-3),
        initializer=tr.initializer.Uniform(-0.05, 0.05),
        seed=args.seed,
    )
    is_ctr = args.net == "ctr"
    model = CTR(rows) if is_ctr else Sum(rows)
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), 1e-3),
        loss=cross_entropy if is_ctr else mean_output,
        strategy=tr.Strategy("async"),
        metrics=[tr.metrics.AUC()] if is_ctr else [],
        threads=args.threads,
    )

    def dataset(files: list[str]) -> tr.data.QueueDataset:
        return tr.data.QueueDataset(files, schema=tr.data.criteo(), batch_size=args.batch)

    trainer.fit(dataset(args.warm))
    started, cpu_before = time.monotonic(), cpu_s()
    figures = trainer.fit(dataset(args.timed))
    wall_s, cpu_after = time.monotonic() - started, cpu_s()
    result = {
        "examples": figures["examples"],
        "examples_per_s": figures["examples"] / wall_s,
        "wall_s": wall_s,
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
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
