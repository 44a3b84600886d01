"""A model file for runs on tests/damaged_files.py; the key `format` names the data format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trireme as tr

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.damaged_files import SCHEMAS


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = tr.Table("rows", dim=1, optimizer=tr.optim.Adagrad(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(rows, features=["C1"])
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> Tensor:
        outputs: Tensor = self.rows(batch).flatten(1).sum(1) + self.bias
        return outputs


def create(config: Any) -> tr.Recipe:
    model = Model()
    return tr.Recipe(
        model=model,
        loss=nn.functional.binary_cross_entropy_with_logits,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        schema=SCHEMAS[config["format"]],
    )
