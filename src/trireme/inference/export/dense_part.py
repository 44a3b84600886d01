"""The dense part of a model as a torch.export program over plain tensors.

What the embedding modules return are inputs of the program, so it needs nothing but torch to run.
torch.export and what comes with it (sympy) are imported when a model is exported: that takes
seconds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trireme.data.batch import Batch, Column, Ragged
from trireme.errors import BadRequest
from trireme.inference.dense_program import DenseProgram, input_tensor, program_input
from trireme.inference.export.example import ExampleBatch
from trireme.inference.export_manifest import ProgramInput
from trireme.train.loop.scoring import outputs_by_name

if TYPE_CHECKING:
    from torch.export import ExportedProgram

log = logging.getLogger("trireme")

RAGGED = ("values", "offsets", "weights")
_IS_ABOVE_ONE = re.compile("(!= 1|>= [23])$")
"""How torch.export writes that a size, or one that is one more, is not 1."""


def export_program(
    example: ExampleBatch,
) -> tuple[ExportedProgram, tuple[ProgramInput, ...], dict[str, Tensor]]:
    """The program, its inputs, and the outputs for the example batch, whose model is in evaluation
    mode.

    Raises BadRequest: torch cannot export the model, or only for batches of this size.
    """
    batch, specs, gathered = example.batch, example.planner.specs, example.gathered()
    recorded = _RecordedBatch(batch, gathered)
    with torch.no_grad():
        outputs = outputs_by_name(example.model(recorded))
    inputs = [program_input("lookup", spec.name, gathered[spec.name]) for spec in specs]
    for name in recorded.used:
        inputs += _column_inputs(name, batch[name])
    tensors = tuple(input_tensor(one, batch, gathered) for one in inputs)
    for one, tensor in zip(inputs, tensors, strict=True):
        if len(tensor) == 0:
            raise BadRequest(
                f"export_model: expected an example batch with ids of {one.role} {one.name!r},"
                " found none"
            )
    bags = {spec.name for spec in specs if spec.mode != "none"}
    axes = [_varying_axes(one, t, bags) for one, t in zip(inputs, tensors, strict=True)]
    shapes = tuple(dict.fromkeys(varying, torch.export.Dim.AUTO) for varying in axes)
    sized = [s.name for s in specs if s.mode != "none" or isinstance(batch[s.features[0]], Tensor)]
    dense = _DensePart(example.model, inputs, sized[0] if sized else None)
    try:
        with torch.no_grad():
            program = torch.export.export(dense, tensors, dynamic_shapes=(shapes,), strict=False)
    except Exception as error:
        raise BadRequest(
            f"export_model: expected a model that torch.export takes, found {error}"
        ) from error
    described = _with_sizes(inputs, program, batch.num_examples)
    _let_one_example_in(program, described, example)
    return program, described, outputs


def _let_one_example_in(
    program: ExportedProgram, inputs: Sequence[ProgramInput], example: ExampleBatch
) -> None:
    """Have the program take a batch of one example, or warn that it does not.

    torch.export takes it for granted that no size is 1. Where the number of examples is known as
    one less than the offsets, it makes that a condition. What was computed under it may hold
    without it, which the outputs for one example show.
    """
    try:
        _expect_to_serve_one(program, inputs, example)
    except BadRequest:
        bounds, conditions = dict(program.range_constraints), _conditions(program)
        all_conditions = list(conditions)
        for size, allowed in bounds.items():
            if allowed.lower == 3:
                program.range_constraints[size] = type(allowed)(2, allowed.upper)
        conditions[:] = [text for text in all_conditions if not _IS_ABOVE_ONE.search(text)]
        try:
            _expect_to_serve_one(program, inputs, example)
        except BadRequest as error:
            program.range_constraints.update(bounds)
            conditions[:] = all_conditions
            log.warning("export_model: the model is exported for two examples and more: %s", error)


def _conditions(program: ExportedProgram) -> list[str]:
    """What the program expects of its inputs, as Python; torch has no public name for it."""
    conditions: list[str] = getattr(program, "_guards_code", [])  # torch before 2.9 has none
    return conditions


def _expect_to_serve_one(
    program: ExportedProgram, inputs: Sequence[ProgramInput], example: ExampleBatch
) -> None:
    """Raises BadRequest: the program refuses the first example alone, or has other outputs for it
    than the model.
    """
    batch, gathered = example.of_one()
    actual = DenseProgram(program, program.module(), inputs)(batch, gathered, is_checked=True)
    with torch.no_grad():
        expected = outputs_by_name(example.model(Batch(batch.columns, None, dict(gathered))))
    for name, output in expected.items():
        if not torch.allclose(actual[name], output, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise BadRequest(f"expected output {name!r} of one example as the model's, found other")


def program_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of the model by their names in the program of `export_program`."""
    dense = _DensePart(model, (), None)
    named = (
        *dense.named_parameters(remove_duplicate=False),
        *dense.named_buffers(remove_duplicate=False),
    )
    # Copies: safetensors refuses tensors that share their memory.
    return {name: tensor.detach().clone() for name, tensor in named}


class _DensePart(nn.Module):
    """The model as a function of plain tensors. `sized` names a lookup with one row per example."""

    def __init__(self, model: nn.Module, inputs: Sequence[ProgramInput], sized: str | None) -> None:
        super().__init__()
        self.model, self.inputs, self.sized = model, inputs, sized

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        batch = _TensorBatch({})
        ragged: dict[str, dict[str, Tensor]] = {}
        for one, tensor in zip(self.inputs, tensors, strict=True):
            if one.role == "lookup":
                batch.lookups[one.name] = tensor
            elif one.role == "column":
                batch.columns[one.name] = tensor
            else:
                ragged.setdefault(one.name, {})[one.role] = tensor
        batch.columns.update({name: Ragged(**parts) for name, parts in ragged.items()})
        batch.sized = self.sized
        return outputs_by_name(self.model(batch))


class _TensorBatch(Batch):
    """A batch of the columns that a model reads, which may be none."""

    sized: str | None = None

    @property
    def num_examples(self) -> int:
        if self.columns or self.sized is None:
            return super().num_examples
        tensor: Tensor = self.lookups[self.sized]
        return tensor.shape[0]


class _RecordedBatch(Batch):
    """A batch that records which columns are read."""

    def __init__(self, batch: Batch, gathered: Mapping[str, Tensor]) -> None:
        super().__init__(dict(batch.items()), None, dict(gathered))
        self.used: dict[str, None] = {}

    def __getitem__(self, name: str) -> Column:
        column = super().__getitem__(name)
        self.used[name] = None
        return column


def _column_inputs(name: str, column: Column) -> list[ProgramInput]:
    if isinstance(column, Tensor):
        return [program_input("column", name, column)]
    if not isinstance(column, Ragged):
        raise BadRequest(
            f"export_model: expected a model that reads tensors or ragged columns, found {name!r}"
            f" of {type(column).__name__}"
        )
    parts = [(role, getattr(column, role)) for role in RAGGED]
    return [program_input(role, name, part) for role, part in parts if part is not None]


def _varying_axes(one: ProgramInput, tensor: Tensor, bags: Collection[str]) -> range:
    """Axes whose size may differ from batch to batch: examples, and ids per example where the batch
    decides their number. Dense columns and rows are as wide as in the example.
    """
    if one.role == "lookup" and one.name not in bags:
        return range(tensor.dim() - 1)
    return range(1 if tensor.is_floating_point() else tensor.dim())


def _with_sizes(
    inputs: Sequence[ProgramInput], program: ExportedProgram, num_examples: int
) -> tuple[ProgramInput, ...]:
    """The inputs with the sizes that the program fixes. Raises BadRequest: the program takes no
    other number of examples than the example batch has.
    """
    from torch.fx.experimental.symbolic_shapes import is_concrete_int

    nodes = {node.name: node for node in program.graph.nodes}
    sized = []
    for one, name in zip(inputs, program.graph_signature.user_inputs, strict=True):
        sizes = nodes[name].meta["val"].shape
        shape = tuple(int(size) if is_concrete_int(size) else None for size in sizes)
        sized.append(replace(one, shape=shape))
        if shape[0] is not None and one.shape[0] == num_examples:
            raise BadRequest(
                f"export_model: expected a model for any number of examples, found that {one.role}"
                f" {one.name!r} must have {shape[0]}: a size taken as a number, by len(), say;"
                " x.shape[0] varies"
            )
    return tuple(sized)
