"""Workers that train passes on devices together, are killed anywhere and started again.

Arguments: the FOLDER of the checkpoint; MODE; then METHOD:N:before (or after), where this process
stops at its N-th call, prints `held` and waits for a line of input or to be killed; or "none".
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch

import trireme as tr
from tests.integration.restarted_script import Data, Model, hold
from trireme.job.cluster import Cluster


def make_trainer(cluster: Cluster, mode: str) -> tr.Trainer:
    model = Model(tr.optim.Adam(lr=0.05))
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        strategy=tr.Strategy(mode),
        loss=torch.nn.functional.binary_cross_entropy_with_logits,
        metrics=[tr.metrics.AUC(num_buckets=64)],
        progress=False,
        cluster=cluster,
    )


def train(trainer: tr.Trainer, *, on_device: bool = True) -> list[float]:
    """Three passes, the first and last of them on devices; the figures of the last evaluation."""
    for is_on_device in (on_device, False, on_device):
        with trainer.on_device(Data()) if is_on_device else nullcontext():
            trainer.fit(Data())
    figures = trainer.evaluate(Data())
    return [figures["loss"], figures["auc"], figures["examples"]]


def main() -> None:
    folder, mode, where = sys.argv[1:]
    if where != "none":
        hold(where)
    with tr.init() as cluster:
        trainer = make_trainer(cluster, mode)
        print(f"trained to {train(trainer)!r}", flush=True)
        trainer.save(f"{folder}/last")
        print("done", flush=True)


if __name__ == "__main__":
    main()
