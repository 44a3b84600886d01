"""The dense part of a model as a torch.export program over plain tensors.

What the embedding modules return are inputs of the program, so it needs nothing but torch to run.
torch.export and what comes with it (sympy) are imported when a model is exported: that takes
seconds.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trireme.data.batch import Batch, Column, Ragged
from trireme.errors import BadRequest
from trireme.inference.dense_program import input_tensor, program_input
from trireme.inference.export_manifest import ProgramInput
from trireme.nn.lookup import LookupSpec
from trireme.train.loop.scoring import outputs_by_name

if TYPE_CHECKING:
    from torch.export import ExportedProgram

log = logging.getLogger("trireme")

RAGGED = ("values", "offsets", "weights")


def export_program(
    model: nn.Module, batch: Batch, specs: Sequence[LookupSpec], gathered: Mapping[str, Tensor]
) -> tuple[ExportedProgram, tuple[ProgramInput, ...], dict[str, Tensor]]:
    """The program, its inputs, and the outputs for the batch.

    model: in evaluation mode. specs: of its embedding modules.
    batch: an example without sizes of 1. gathered: what the embedding modules return for it.

    Raises BadRequest: torch cannot export the model, or only for batches of this size.
    """
    recorded = _RecordedBatch(batch, gathered)
    with torch.no_grad():
        outputs = outputs_by_name(model(recorded))
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
    dense = _DensePart(model, inputs, sized[0] if sized else None)
    try:
        program = _exported(dense, tensors, shapes)
        if _refuses_one_example(program):
            program = _exported_for_one_too(dense, tensors, shapes) or program
    except Exception as error:
        raise BadRequest(
            f"export_model: expected a model that torch.export takes, found {error}"
        ) from error
    return program, _with_sizes(inputs, program, batch.num_examples), outputs


def _exported(
    dense: nn.Module, tensors: tuple[Tensor, ...], shapes: tuple[Any, ...]
) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(dense, tensors, dynamic_shapes=(shapes,), strict=False)


def _refuses_one_example(program: ExportedProgram) -> bool:
    """Whether a size must be 3 or more: that of offsets, one more than the examples, of which
    torch.export took differences; it takes it for granted that no size is 1.
    """
    return any(size.lower > 2 for size in program.range_constraints.values())


def _exported_for_one_too(
    dense: nn.Module, tensors: tuple[Tensor, ...], shapes: tuple[Any, ...]
) -> ExportedProgram | None:
    """None, with a warning: torch.export cannot."""
    try:
        with _any_size():
            return _exported(dense, tensors, shapes)
    except Exception as error:  # noqa: BLE001 what torch.export raises is not documented
        log.warning("export_model: the model is exported for two examples and more: %s", error)
        return None


def _any_size() -> AbstractContextManager[None]:
    """While torch.export runs, sizes that vary may be 1, too, as far as it can tell."""
    config: Any = importlib.import_module("torch.fx.experimental._config")
    if not hasattr(config, "backed_size_oblivious"):  # before torch 2.8
        return nullcontext()
    changed: AbstractContextManager[None] = config.patch(backed_size_oblivious=True)
    return changed


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
