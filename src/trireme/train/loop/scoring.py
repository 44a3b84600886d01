"""The outputs of a model for a batch, by name, and the loss."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trireme import accelerator
from trireme.data.batch import Batch, Column, Strings
from trireme.data.schema import InsId, Schema
from trireme.errors import BadRequest, NotFinite
from trireme.nn.lookup import specs_of
from trireme.nn.on_device import devices_of

OUTPUT = "output"
"""The name of the output of a model that returns one tensor."""
SHOWN_MAX = 5
"""How many examples an error names."""

Loss: TypeAlias = Callable[[Any, Any], Tensor]
Compute: TypeAlias = "Callable[[nn.Module, Batch], Scored]"


@dataclass(frozen=True, eq=False)
class Scored:
    """A batch with the outputs and the loss of the model."""

    batch: Batch
    outputs: dict[str, Tensor]  # by name, without gradients, each (B, ...)
    loss: Tensor | None  # scalar, with its gradient; None: the scorer has no loss


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put the model into training or evaluation, and every module back into its state after."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


@dataclass(frozen=True)
class Scorer:
    """Runs a model on batches, and the loss on (outputs, label column); with `label` None on
    (outputs, batch). loss None: no loss is computed.

    autocast: what forward computes in, by `torch.autocast`. Its outputs are float32 then, and so
        are the loss, which is computed outside, and whatever reads outputs. None: as torch does,
        and outputs are as returned.
    """

    loss: Loss | None
    label: str | None
    autocast: torch.dtype | None = None

    def without_loss(self) -> Scorer:
        return Scorer(None, None, self.autocast)

    def __call__(self, model: nn.Module, batch: Batch) -> Scored:
        """Raises BadRequest: outputs that are not tensors, no such label column, strings or bags
        that the model reads as numbers, numbers of a type with which it does not compute, or no
        examples, which it does not take.
        """
        try:
            with self.autocasting(devices_of(model) if self.autocast is not None else ()):
                outputs = model(batch)
        except (TypeError, AttributeError) as error:
            if (wrong := _without_numbers(model, batch)) and _NOT_TENSORS.search(str(error)):
                raise BadRequest(f"{wrong}: {error}") from error
            raise
        except RuntimeError as error:
            if batch.num_examples == 0:
                raise BadRequest(
                    "Trainer: expected examples, or a model that takes a batch without any, found"
                    f" none: {error}"
                ) from error
            if (wrong := _not_float32(model, batch)) and _OTHER_DTYPE.search(str(error)):
                raise BadRequest(f"{wrong}: {error}") from error
            raise
        return self.scored(outputs, batch)

    def autocasting(self, devices: Iterable[torch.device]) -> AbstractContextManager[Any]:
        """The context of a forward pass, or of a part of one, on these devices."""
        return accelerator.autocast(self.autocast, devices)

    def scored(self, outputs: Any, batch: Batch) -> Scored:
        """What has been computed for the batch, with its loss. Raises as a call."""
        if self.autocast is not None:
            outputs = _widened(outputs, self.autocast)
        by_name = outputs_by_name(outputs)
        if self.loss is None:
            return Scored(batch, by_name, None)
        labels: Any = batch
        if self.label is not None:
            labels = column_of(batch, self.label, "Trainer(label=)")
            if not isinstance(labels, Tensor):
                raise BadRequest(
                    f"Trainer(label=): expected column {self.label!r} as a number per example,"
                    f" found {batch.shown_without_numbers(self.label)}"
                )
            if isinstance(outputs, Tensor):
                labels = _as_outputs(labels, outputs)
        return Scored(batch, by_name, _scalar(self.loss(outputs, labels)))


def _scalar(loss: Any) -> Tensor:
    """Raises BadRequest: a loss that is no single number."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    shown = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise BadRequest(
        "Trainer: expected the loss as a tensor of one number, the mean over the examples, found"
        f" {shown}"
    )


def _widened(outputs: Any, dtype: torch.dtype) -> Any:
    """The outputs of a model, with tensors of this dtype as float32."""
    if isinstance(outputs, Mapping):
        return {name: _widened(output, dtype) for name, output in outputs.items()}
    is_narrow = isinstance(outputs, Tensor) and outputs.dtype == dtype
    return outputs.float() if is_narrow else outputs


_NOT_TENSORS = re.compile("Strings|Ragged|tuple|sequence")
"""How Python and torch name a column without numbers that is used as a tensor."""


def _without_numbers(model: nn.Module, batch: Batch) -> str:
    """The columns of strings and bags that no module looks up; empty: there are none."""
    kinds = {
        name: batch.shown_without_numbers(name)
        for name, column in _not_looked_up(model, batch)
        if not isinstance(column, Tensor)
    }
    return _expected("numbers", kinds)


_OTHER_DTYPE = re.compile("dtype|scalar type|same type|data type")
"""How torch says that it does not compute with the type of a tensor beside another one."""


def _not_float32(model: nn.Module, batch: Batch) -> str:
    """The columns of numbers of other types that no module looks up; empty: there are none."""
    kinds = {
        name: str(column.dtype)
        for name, column in _not_looked_up(model, batch)
        if isinstance(column, Tensor) and column.dtype != torch.float32
    }
    return _expected("float32", kinds) + ("; .float() makes it" if kinds else "")


def _not_looked_up(model: nn.Module, batch: Batch) -> Iterator[tuple[str, Column]]:
    """The columns that no embedding module looks up, by name."""
    looked_up = {name for spec in specs_of([model]) for name in spec.features}
    return ((name, column) for name, column in batch.items() if name not in looked_up)


def _expected(what: str, kinds: Mapping[str, str]) -> str:
    """The sentence on columns of these kinds, by name; empty: there are none."""
    wrong = "; or with ".join(f"column {name!r}, found {kind}" for name, kind in kinds.items())
    return f"Trainer: expected {what} where the model computes with {wrong}" if kinds else ""


def _as_outputs(labels: Tensor, outputs: Tensor) -> Tensor:
    """Labels to compare with outputs one by one, as losses take them: integers, flags and float64
    as float32. Other labels, such as the number of a class per row of outputs, are unchanged.
    """
    is_one_each = labels.shape == outputs.shape and outputs.dtype != torch.float64
    is_other = not labels.is_floating_point() or labels.dtype == torch.float64
    if is_one_each and is_other and outputs.is_floating_point():
        return labels.to(torch.float32)
    return labels


class ExampleIds:
    """The names of a dataset's examples: its InsId column, or else the column ins_id. column: its
    name; None: the schema has none.
    """

    def __init__(self, dataset: object) -> None:
        schema = getattr(dataset, "schema", None)
        self.column: str | None = InsId().name
        if isinstance(schema, Schema):
            self.column = next((f.name for f in schema.fields if isinstance(f, InsId)), None)

    def of(self, batch: Batch) -> list[str] | None:
        """A name per example: strings, or integers of a (B,) tensor; None: there are none."""
        column = None if self.column is None else batch.get(self.column)
        if isinstance(column, Strings):
            return column.decode()
        if isinstance(column, Tensor) and column.dim() == 1 and not column.is_floating_point():
            return [str(value) for value in column.tolist()]
        return None


def check_finite(scored: Scored, ids: ExampleIds) -> None:
    """Raises NotFinite: an output or the loss is NaN or infinite; names the examples."""
    for name, output in scored.outputs.items():
        if math.isfinite(output.sum().item()):
            continue  # then all values are finite; the converse does not hold
        finite = torch.isfinite(output)
        if not finite.all():
            value = output[~finite].flatten()[0].item()
            raise _not_finite(f"{value} in output {name!r} of", scored.batch, _rows(~finite), ids)
    if scored.loss is not None and not math.isfinite(loss := float(scored.loss.detach())):
        raise _not_finite(f"a loss of {loss} over", scored.batch, [], ids)


def _rows(is_wrong: Tensor) -> list[int]:
    """The examples with a wrong value; empty for a scalar."""
    if is_wrong.dim() == 0:
        return []
    return torch.nonzero(is_wrong.reshape(len(is_wrong), -1).any(1)).flatten().tolist()


def _not_finite(wrong_value: str, batch: Batch, rows: list[int], ids: ExampleIds) -> NotFinite:
    names = ids.of(batch)
    wrong = rows if rows and rows[-1] < batch.num_examples else list(range(batch.num_examples))
    called = "examples" if names is None else "examples with ins_id"
    shown = ", ".join(str(i) if names is None else repr(names[i]) for i in wrong[:SHOWN_MAX])
    shown = shown or "(there is none: a mean over an empty batch is NaN)"
    more = f" and {len(wrong) - SHOWN_MAX} more" if len(wrong) > SHOWN_MAX else ""
    tensors = {name: column for name, column in batch.items() if isinstance(column, Tensor)}
    causes = [name for name, column in tensors.items() if not column.isfinite().all()]
    cause = f", whose column {causes[0]!r} has NaN or infinity," if causes else ""
    return NotFinite(
        f"Trainer: expected finite outputs and loss, found {wrong_value} {called} {shown}{more};"
        f" the batch of {batch.num_examples}{cause} before position {batch.position} of stream"
        f" {batch.stream}; nothing of it was pushed"
    )


def column_of(batch: Batch, name: str, reader: str) -> Column:
    """A column of the batch. Raises BadRequest: there is none; names the reader and all columns."""
    if name not in batch:
        raise BadRequest(
            f"{reader}: expected column {name!r} in the batch, found {', '.join(batch.keys())}"
        )
    return batch[name]


def outputs_by_name(outputs: Any) -> dict[str, Tensor]:
    named = {OUTPUT: outputs} if isinstance(outputs, Tensor) else outputs
    expected = "Trainer: expected the model to return a tensor or tensors by name, found"
    if not isinstance(named, Mapping) or not named:
        raise BadRequest(f"{expected} {type(outputs).__name__}")
    for name, output in named.items():
        if not isinstance(name, str) or not isinstance(output, Tensor):
            raise BadRequest(f"{expected} {name!r}: {type(output).__name__}")
    return {name: output.detach() for name, output in named.items()}
