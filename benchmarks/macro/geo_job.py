"""A worker of the benchmark of geo: word2vec on text, epoch by epoch.

Worker 0 writes [seconds of training, held-out loss] to --out after each epoch.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import trireme as tr
from benchmarks.macro.zoo_cases import CASES, Place
from benchmarks.macro.zoo_job import scored, seeded


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", type=json.loads, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cluster = tr.init()
    case = CASES["word2vec_text"]
    data = case.data(Place(args.smoke, Path()), args.seed)
    model = seeded(case, args.seed)
    trainer = tr.Trainer(
        model,
        None,
        loss=case.loss,
        label=case.label,
        strategy=tr.Strategy(**args.strategy),
        progress=False,
    )
    curve, seconds = [], 0.0
    for _ in range(args.epochs):
        started = time.perf_counter()
        trainer.fit(data.train)
        seconds += time.perf_counter() - started
        if cluster.worker == 0:
            curve.append([seconds, scored(case, model, data)])
            model.train()
        cluster.client.coordinator.gather({}, [], purpose="scored", patient=True)
    if cluster.worker == 0:
        args.out.write_text(json.dumps(curve))


if __name__ == "__main__":
    main()
