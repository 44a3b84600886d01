"""The dense part of a model as a torch.export program over plain tensors.

What the embedding modules return are inputs of the program, so that it needs nothing but torch
where it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from trireme.data.batch import Batch, Column, Ragged, Strings
from trireme.errors import BadRequest
from trireme.inference.graph import describe, input_tensor
from trireme.inference.manifest import Input
from trireme.nn.planner import LookupSpec
from trireme.train.loop.scoring import outputs_by_name

RAGGED = ("values", "offsets", "weights")


def export_graph(
    model: nn.Module, batch: Batch, specs: Sequence[LookupSpec], gathered: Mapping[str, Tensor]
) -> tuple[ExportedProgram, tuple[Input, ...], dict[str, Tensor]]:
    """The program, what it takes, and the outputs for the batch.

    Args:
        model: in evaluation mode.
        batch: an example of what it will be given; see `widened`.
        specs: of its embedding modules. gathered: what these return for the batch.

    Raises:
        BadRequest: torch cannot export the model, or only for batches of this size.
    """
    recorded = _RecordedBatch(batch, gathered)
    with torch.no_grad():
        outputs = outputs_by_name(model(recorded))
    inputs = [describe("lookup", spec.name, gathered[spec.name]) for spec in specs]
    for name in recorded.used:
        inputs += _column_inputs(name, batch[name])
    tensors = tuple(input_tensor(one, batch, gathered) for one in inputs)
    _expect_ids(inputs, tensors)
    bags = {spec.name for spec in specs if spec.mode != "none"}
    shapes = tuple(
        dict.fromkeys(_varying_axes(one, tensor, bags), Dim.AUTO)
        for one, tensor in zip(inputs, tensors, strict=True)
    )
    try:
        with torch.no_grad():
            dense = _Dense(model, inputs, _sized_by_example(specs, batch))
            program = torch.export.export(dense, tensors, dynamic_shapes=(shapes,), strict=False)
    except Exception as error:
        raise BadRequest(
            f"save_inference_model: expected a model that torch.export takes, found {error}"
        ) from error
    return program, _with_sizes(inputs, program, batch.num_examples), outputs


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of the program that `export_graph` makes of the model, by name."""
    dense = _Dense(model, (), None)
    named = (
        *dense.named_parameters(remove_duplicate=False),
        *dense.named_buffers(remove_duplicate=False),
    )
    # Copies: safetensors refuses tensors that share their memory.
    return {name: tensor.detach().clone() for name, tensor in named}


def widened(batch: Batch) -> Batch:
    """The batch, with each example twice where there would be a size of 1: torch.export takes that
    for a size that never varies.
    """
    sizes = [batch.num_examples]
    sizes += [len(column.values) for _, column in batch.items() if isinstance(column, Ragged)]
    return batch if min(sizes) > 1 else Batch({n: _twice(c) for n, c in batch.items()})


def _twice(column: Column) -> Column:
    if isinstance(column, Tensor):
        return torch.cat([column, column])
    if isinstance(column, Strings):
        return Strings(*_twice_ragged(column.data, column.offsets))
    values, offsets = _twice_ragged(column.values, column.offsets)
    weights = column.weights
    if weights is not None:
        weights, _ = _twice_ragged(weights, column.offsets)
    return Ragged(values, offsets, weights)


def _twice_ragged(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    values = values[int(offsets[0]) : int(offsets[-1])]
    offsets = offsets - offsets[0]
    return torch.cat([values, values]), torch.cat([offsets, offsets[1:] + offsets[-1]])


def _expect_ids(inputs: Sequence[Input], tensors: Sequence[Tensor]) -> None:
    for one, tensor in zip(inputs, tensors, strict=True):
        if len(tensor) == 0:
            raise BadRequest(
                f"save_inference_model: expected an example batch with ids of {one.role}"
                f" {one.name!r}, found none"
            )


class _Dense(nn.Module):
    """The model as a function of plain tensors.

    sized: the lookup that has one row per example, if there is one.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Input], sized: str | None) -> None:
        super().__init__()
        self.model, self.inputs, self.sized = model, inputs, sized

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        batch = _GraphBatch({})
        parts: dict[str, dict[str, Tensor]] = {}
        for one, tensor in zip(self.inputs, tensors, strict=True):
            if one.role == "lookup":
                batch.lookups[one.name] = tensor
            elif one.role == "column":
                batch.columns[one.name] = tensor
            else:
                parts.setdefault(one.name, {})[one.role] = tensor
        batch.columns.update({name: Ragged(**part) for name, part in parts.items()})
        batch.sized = self.sized
        return outputs_by_name(self.model(batch))


class _GraphBatch(Batch):
    """A batch of those columns that a model reads; maybe none."""

    sized: str | None = None

    @property
    def num_examples(self) -> int:
        if self.columns or self.sized is None:
            return super().num_examples
        tensor: Tensor = self.lookups[self.sized]
        return tensor.shape[0]


class _RecordedBatch(Batch):
    """A batch that remembers which columns have been read."""

    def __init__(self, batch: Batch, gathered: Mapping[str, Tensor]) -> None:
        super().__init__(dict(batch.items()), None, dict(gathered))
        self.used: dict[str, None] = {}

    def __getitem__(self, name: str) -> Column:
        column = super().__getitem__(name)
        self.used[name] = None
        return column


def _sized_by_example(specs: Sequence[LookupSpec], batch: Batch) -> str | None:
    for spec in specs:
        if spec.mode != "none" or isinstance(batch[spec.features[0]], Tensor):
            return spec.name
    return None


def _column_inputs(name: str, column: Column) -> list[Input]:
    if isinstance(column, Tensor):
        return [describe("column", name, column)]
    if not isinstance(column, Ragged):
        raise BadRequest(
            f"save_inference_model: expected a model that reads tensors or ragged columns, found"
            f" {name!r} of {type(column).__name__}"
        )
    given = [(role, getattr(column, role)) for role in RAGGED]
    return [describe(role, name, part) for role, part in given if part is not None]


def _varying_axes(one: Input, tensor: Tensor, bags: Collection[str]) -> range:
    """Axes whose size may differ from batch to batch: examples, and ids of each where they are as
    many as the batch says. Dense numbers and rows are as wide as in the example.
    """
    if one.role == "lookup" and one.name not in bags:
        return range(tensor.dim() - 1)
    return range(1 if tensor.is_floating_point() else tensor.dim())


def _with_sizes(
    inputs: Sequence[Input], program: ExportedProgram, num_examples: int
) -> tuple[Input, ...]:
    """The inputs with the sizes that the program fixes.

    Raises:
        BadRequest: the program is of the example's number of examples alone.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    found = []
    for one, name in zip(inputs, program.graph_signature.user_inputs, strict=True):
        sizes = nodes[name].meta["val"].shape
        shape = tuple(int(size) if is_concrete_int(size) else None for size in sizes)
        found.append(replace(one, shape=shape))
        if shape[0] is not None and one.shape[0] == num_examples:
            raise BadRequest(
                f"save_inference_model: expected a model for any number of examples, found that"
                f" {one.role} {one.name!r} must have {shape[0]}: a size taken as a number, by"
                " len(), say; x.shape[0] varies"
            )
    return tuple(found)
