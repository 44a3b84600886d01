"""Losses that several models share."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trireme.data.batch import Batch
from trireme.models.columns import tensor_of


@dataclass(frozen=True)
class MarginLoss:
    """By how much the nearest other tag comes closer than the right one less the margin."""

    margin: float

    def __call__(self, cosines: Tensor, _: Batch) -> Tensor:
        nearest = cosines[:, 1:].amax(1)
        return torch.relu(self.margin - cosines[:, 0] + nearest).mean()


@dataclass(frozen=True)
class ClickAndAuxiliaryLoss:
    """The log loss of the click, plus `share` times the auxiliary loss."""

    share: float

    def __call__(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        label = tensor_of(batch, "label")
        loss = nn.functional.binary_cross_entropy_with_logits(outputs["click"], label)
        return loss + self.share * outputs["auxiliary"].mean()
