"""A model with all that a trainer needs to know of it: what a model file's `create` returns."""

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

    model: takes a batch; returns (B,) or (B, C) outputs, or a dict of such outputs by name.
    loss: (outputs, labels) -> scalar, the mean over the examples. `labels` is the label column, or
        the batch itself where `label` is None.
    optimizer: of the dense parameters; None if the model has none.
    label: name of the label column; None: the loss and the metrics read columns themselves.
    schema: of the model's inputs, in their order; None: any data.
    metrics: each names its output and its label if the model has several.
    """

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer | None
    label: str | None = "label"
    schema: Schema | None = None
    metrics: Sequence[Metric] = ()
