"""What a model makes of a batch: its outputs by name, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from trireme.data.batch import Batch, Column
from trireme.errors import BadRequest

OUTPUT = "output"
"""The name of the output of a model that returns one tensor."""

Loss: TypeAlias = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Scored:
    """A batch and what came of it.

    outputs: by name, without gradients, each (B, ...).
    loss: scalar, with its gradient; None where none was asked for.
    """

    batch: Batch
    outputs: dict[str, Tensor]
    loss: Tensor | None


class Scorer:
    """Runs a model on batches, and the loss on what it returns.

    Args:
        loss: (outputs as the model returned them, label column) -> scalar; with `label` None:
            (outputs, batch) -> scalar. None: no loss is computed.
        label: name of the label column.
    """

    def __init__(self, loss: Loss | None, label: str | None) -> None:
        self._loss, self._label = loss, label

    def __call__(self, model: nn.Module, batch: Batch) -> Scored:
        """Raises BadRequest: outputs that are neither a tensor nor tensors by name, or no such
        label column.
        """
        outputs = model(batch)
        scored = _by_name(outputs)
        if self._loss is None:
            return Scored(batch, scored, None)
        labels = batch if self._label is None else _labels(batch, self._label)
        return Scored(batch, scored, self._loss(outputs, labels))


def column_of(batch: Batch, name: str, reader: str) -> Column:
    """A column of the batch. Raises BadRequest, which says who reads it and what there is."""
    if name not in batch:
        raise BadRequest(
            f"{reader}: expected column {name!r} in the batch, found {', '.join(batch.keys())}"
        )
    return batch[name]


def _labels(batch: Batch, name: str) -> Tensor:
    labels = column_of(batch, name, "Trainer(label=)")
    if not isinstance(labels, Tensor):
        raise BadRequest(
            f"Trainer: expected column {name!r} as a tensor, found {type(labels).__name__}"
        )
    return labels


def _by_name(outputs: Any) -> dict[str, Tensor]:
    named = {OUTPUT: outputs} if isinstance(outputs, Tensor) else outputs
    if not isinstance(named, Mapping) or not named:
        raise _not_outputs(type(outputs).__name__)
    for name, output in named.items():
        if not isinstance(name, str) or not isinstance(output, Tensor):
            raise _not_outputs(f"{name!r}: {type(output).__name__}")
    return {name: output.detach() for name, output in named.items()}


def _not_outputs(found: str) -> BadRequest:
    return BadRequest(
        f"Trainer: expected the model to return a tensor or tensors by name, found {found}"
    )
