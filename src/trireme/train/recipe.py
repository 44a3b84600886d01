"""What a trainer needs to know of a model, in one value: what a model file's `create` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trireme.data.schema import Schema
from trireme.metrics import Metric


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model and how to train it.

    model: takes a batch; returns (B,) or (B, C) outputs, or a dict of such by name.
    loss: (outputs, labels) -> scalar, the mean over the examples. `labels` is the label column, or
        the batch itself where `label` is None.
    optimizer: of the dense parameters; None if the model has none.
    label: name of the label column; None: the loss and the metrics take what they need themselves.
    schema: of the data that the model reads: the inputs in their order; None if any will do.
    metrics: each names its output and its label where the model has several.
    """

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer | None
    label: str | None = "label"
    schema: Schema | None = None
    metrics: Sequence[Metric] = ()
