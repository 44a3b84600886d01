"""Trains one case of the zoo, embedded or under trireme launch, and writes its score to --out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trireme as tr
from benchmarks.macro.zoo_cases import CASES, Case, Data, Place


def seeded(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return case.make(seed)


def train(case: Case, model: nn.Module, data: Data, mode: str) -> float:
    """Train in the default cluster, and score."""
    parameters = list(model.parameters())
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(parameters, lr=case.lr) if parameters else None,
        loss=case.loss,
        label=case.label,
        strategy=tr.Strategy(mode),
        progress=False,
    )
    trainer.fit(data.train, epochs=case.epochs)
    trainer.optimizer.flush()
    trainer.optimizer.refresh()
    return scored(case, model, data)


def train_twin(
    case: Case, twin: nn.Module, optimizers: list[torch.optim.Optimizer], data: Data
) -> float:
    """Train the twin in plain torch, on the same batches."""
    for epoch in range(case.epochs):
        for batch in data.train.stream(0, 1, epoch=epoch):
            target: Any = batch if case.label is None else batch[case.label]
            case.loss(twin(batch), target).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return scored(case, twin, data)


def scored(case: Case, model: nn.Module, data: Data) -> float:
    model.eval()
    with torch.no_grad():
        return case.score(model, data)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=sorted(CASES), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--real", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tr.init()
    case = CASES[args.case]
    data = case.data(Place(args.smoke, args.real), args.seed)
    args.out.write_text(json.dumps({"score": train(case, seeded(case, args.seed), data, "async")}))


if __name__ == "__main__":
    main()
