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
_SIZE = r"L\['tensors'\]\[(\d+)\]\.size\(\)\[0\]"
_IS_ABOVE_ONE = re.compile(rf"\(?\(-1\) \+ {_SIZE}\)? (?:!= 1|>= 2)|{_SIZE} >= 3")
"""How torch.export writes that there are two examples, by the number of an input of offsets."""


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
    _let_one_example_in(program, described, example, dense.sized)
    return program, described, outputs


def _let_one_example_in(
    program: ExportedProgram,
    inputs: Sequence[ProgramInput],
    example: ExampleBatch,
    sized: str | None,
) -> None:
    """Have the program take a batch of one example, or refuse it, with a warning.

    torch.export takes it for granted that no size is 1. Where the number of examples is known as
    one less than the offsets, it makes that a condition. What was computed under it may hold
    without it, which the outputs for one example show. Sizes that they do not show, such as the
    number of ids, keep their conditions.
    """
    try:
        _expect_to_serve_one(program, inputs, example)
    except BadRequest:
        bounds, conditions = dict(program.range_constraints), _conditions(program)
        all_conditions = list(conditions)
        shapes = zip(inputs, _shapes_in(program), strict=True)
        sizes = {str(shape[0]) for one, shape in shapes if one.role == "offsets"}
        for size, allowed in bounds.items():
            if str(size) in sizes and allowed.lower == 3:
                program.range_constraints[size] = type(allowed)(2, allowed.upper)
        conditions[:] = [text for text in all_conditions if not _is_above_one(text, inputs)]
        try:
            _expect_to_serve_one(program, inputs, example)
        except BadRequest as error:
            program.range_constraints.update(bounds)
            conditions[:] = all_conditions + _not_one(inputs, example.batch, sized)
            log.warning("export_model: the model is exported for two examples and more: %s", error)


def _conditions(program: ExportedProgram) -> list[str]:
    """What the program expects of its inputs, as Python; torch has no public name for it."""
    conditions: list[str] = getattr(program, "_guards_code", [])  # torch before 2.9 has none
    return conditions


def _is_above_one(condition: str, inputs: Sequence[ProgramInput]) -> bool:
    match = _IS_ABOVE_ONE.fullmatch(condition)
    return match is not None and inputs[int(match[1] or match[2])].role == "offsets"


def _not_one(inputs: Sequence[ProgramInput], batch: Batch, sized: str | None) -> list[str]:
    """The conditions that a batch of one example does not meet. sized: a lookup with a row each."""

    def has_row_each(one: ProgramInput) -> bool:
        if one.role != "column":
            return one.role == "lookup" and one.name == sized
        column = batch[one.name]
        return isinstance(column, Tensor) and len(column) == batch.num_examples

    sizes = {i: 1 for i, one in enumerate(inputs) if has_row_each(one)}
    sizes |= {i: 2 for i, one in enumerate(inputs) if one.role == "offsets"}
    return [f"L['tensors'][{i}].size()[0] != {size}" for i, size in sizes.items()]


def _expect_to_serve_one(
    program: ExportedProgram, inputs: Sequence[ProgramInput], example: ExampleBatch
) -> None:
    """Raises BadRequest: the program or the model refuses one example alone, or their outputs for
    it differ.
    """
    batch, gathered = example.of_one()
    actual = DenseProgram(program, program.module(), inputs)(batch, gathered, is_checked=True)
    try:
        with torch.no_grad():
            expected = outputs_by_name(example.model(Batch(batch.columns, None, dict(gathered))))
    except Exception as error:
        raise BadRequest(f"expected a model that takes one example, found {error!r}") from error
    for name, output in expected.items():
        is_same = actual[name].shape == output.shape
        if not is_same or not torch.allclose(actual[name], output, 1e-3, 1e-5, equal_nan=True):
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

    sized = []
    for one, sizes in zip(inputs, _shapes_in(program), strict=True):
        shape = tuple(int(size) if is_concrete_int(size) else None for size in sizes)
        sized.append(replace(one, shape=shape))
        if shape[0] is not None and one.shape[0] == num_examples + (one.role == "offsets"):
            raise BadRequest(
                f"export_model: expected a model for any number of examples, found that {one.role}"
                f" {one.name!r} must have {shape[0]}: a size taken as a number, by len(), say;"
                " x.shape[0] varies"
            )
    return tuple(sized)


def _shapes_in(program: ExportedProgram) -> list[torch.Size]:
    """The shapes of the inputs; sizes that vary are symbols."""
    nodes = {node.name: node for node in program.graph.nodes}
    return [nodes[name].meta["val"].shape for name in program.graph_signature.user_inputs]
