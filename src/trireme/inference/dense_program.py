"""The dense part of an exported model: a torch.export program over plain tensors."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trireme.data.batch import Batch, Ragged
from trireme.errors import BadRequest, Corruption, DataError
from trireme.inference.export_manifest import ExportManifest, ProgramInput, located
from trireme.nn.onednn import linear


class DenseProgram:
    """Runs the dense part on a batch and the results of its lookups. Immutable: any thread may use
    it.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        module: nn.Module,
        inputs: Sequence[ProgramInput],
    ) -> None:
        self.program, self._module, self._inputs = program, module, inputs

    def __call__(
        self, batch: Batch, gathered: Mapping[str, Tensor], *, is_checked: bool
    ) -> dict[str, Tensor]:
        """Outputs by name. is_checked: whoever made the batch has seen to its numbers. Raises
        BadRequest: a column is missing or has another form. DataError: one has NaN or infinity.
        """
        tensors = [input_tensor(one, batch, gathered) for one in self._inputs]
        if not is_checked:
            for one, tensor in zip(self._inputs, tensors, strict=True):
                if one.role == "column":
                    _check_finite(one.name, tensor)
        try:
            outputs: dict[str, Tensor] = self._module(*tensors)
        except Exception as error:
            if batch.num_examples == 0:
                raise BadRequest(
                    "Predictor: expected examples, or a model that takes a batch without any, found"
                    f" none: {error}"
                ) from error
            shapes = {
                one.name: tuple(t.shape) for one, t in zip(self._inputs, tensors, strict=True)
            }
            raise BadRequest(
                f"Predictor: expected columns of the same examples, found {shapes}: {error}"
            ) from error
        return outputs


def load_program(
    folder: Path, manifest: ExportManifest, *, verify: bool, use_onednn: bool
) -> DenseProgram:
    """The dense part of a base. Raises Corruption: the file is missing or damaged. BadRequest: it
    has nothing for oneDNN.
    """
    path = located(folder, manifest.dense, verify=verify)
    try:
        program = torch.export.load(path)
        # A block with another autocast, and a branch of torch.cond, have graphs of their own.
        graphs = [m.graph for m in program.graph_module.modules() if hasattr(m, "graph")]
        nodes = [node for graph in graphs for node in graph.nodes]
        layers = [node for node in nodes if node.target is torch.ops.aten.linear.default]
        for layer in layers if use_onednn else ():
            layer.target = linear
        loaded = DenseProgram(program, program.module(), manifest.inputs)
    except Exception as error:
        raise Corruption(f"{path}: expected a program of torch.export, found {error!r}") from error
    if use_onednn and not layers:
        what = "a model with layers torch.nn.Linear for use_onednn"
        raise BadRequest(f"Predictor: expected {what}, found none in {path}")
    return loaded


def update_program(
    old: DenseProgram, folder: Path, delta: ExportManifest, *, verify: bool
) -> DenseProgram:
    """The same program with the parameters and buffers of a delta; `old` is not changed. Raises
    Corruption: the file is missing or damaged, or its tensors are not those of the program.
    """
    path = located(folder, delta.dense, verify=verify)
    try:
        weights = load_file(path)
    except Exception as error:
        raise Corruption(f"{path}: expected safetensors, found {error!r}") from error
    module = old.program.module()
    for name, own in (*module.named_parameters(), *module.named_buffers()):
        tensor = weights.get(name)
        if tensor is None or (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
            actual = "none" if tensor is None else f"{tensor.dtype} of {tuple(tensor.shape)}"
            raise Corruption(
                f"{path}: expected {name} as {own.dtype} of {tuple(own.shape)}, found {actual}"
            )
        # A new tensor in place of the old one, which other programs may use.
        prefix, _, leaf = name.rpartition(".")
        owner = module.get_submodule(prefix)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[leaf] = tensor
    return DenseProgram(old.program, module, delta.inputs)


def input_tensor(one: ProgramInput, batch: Batch, gathered: Mapping[str, Tensor]) -> Tensor:
    """The tensor of one input. Raises BadRequest: the column is missing, or has another dtype or
    shape.
    """
    if one.role == "lookup":
        tensor = gathered[one.name]
    elif one.name in batch:
        tensor = _part(batch, one)
    else:
        raise BadRequest(
            f"Predictor: expected column {one.name!r} in the batch, found {', '.join(batch.keys())}"
        )
    if one.role == "column":
        tensor = _as_exported(tensor, getattr(torch, one.dtype))
        if tensor.dim() == 1 and one.shape == (None, 1):  # a DataFrame's column, and a file's Dense
            tensor = tensor[:, None]
    dtype = _dtype_name(tensor)
    is_shape = len(one.shape) == tensor.dim() and all(
        size in (None, actual) for size, actual in zip(one.shape, tensor.shape, strict=True)
    )
    if dtype != one.dtype or not is_shape:
        shape = ", ".join("any" if size is None else str(size) for size in one.shape)
        raise BadRequest(
            f"Predictor: expected {one.role} {one.name!r} as {one.dtype} of shape ({shape}), found"
            f" {dtype} of shape {tuple(tensor.shape)}{_unequal(tensor, one.dtype)}"
        )
    return tensor


def _check_finite(name: str, tensor: Tensor) -> None:
    is_finite = torch.isfinite(tensor)
    if not is_finite.all():
        place = tuple(torch.nonzero(~is_finite)[0].tolist())
        raise DataError(
            f"Predictor: expected finite numbers in {name!r}, found {tensor[place].item()} at"
            f" {place}"
        )


def _part(batch: Batch, one: ProgramInput) -> Tensor:
    column = batch[one.name]
    if one.role == "column" and isinstance(column, Tensor):
        return column
    if isinstance(column, Ragged):  # a program cannot cut out the ids that it needs
        column = column.cut(0, len(column.offsets) - 1)
    part = getattr(column, one.role, None) if isinstance(column, Ragged) else None
    if not isinstance(part, Tensor):
        wanted = "a tensor" if one.role == "column" else f"Ragged with {one.role}"
        raise BadRequest(
            f"Predictor: expected column {one.name!r} as {wanted} of {one.dtype}, found"
            f" {batch.shown_without_numbers(one.name)}"
        )
    return part


def _as_exported(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of another type as the program takes them, as Python promotes them for a Trainer's
    model: 1 and True as 1.0, 1.0 as 1. Unchanged: one has no equal of that type. Fractions are
    rounded, as those of a Trainer's data are.
    """
    if tensor.dtype == dtype or tensor.is_complex() or dtype.is_complex:
        return tensor
    is_both_fractions = tensor.is_floating_point() and dtype.is_floating_point
    return tensor.to(dtype) if is_both_fractions or _has_equals(tensor, dtype).all() else tensor


def _has_equals(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Which numbers are whole ones that both types hold exactly."""
    is_exact = torch.ones(tensor.shape, dtype=torch.bool)
    for kind in (tensor.dtype, dtype):
        low, high = _whole_range(kind)
        is_exact &= (tensor >= low) & (tensor <= high)
    if tensor.is_floating_point():
        # The integer above the largest one may have been rounded to it.
        is_exact &= (tensor == tensor.round()) & (tensor.abs() < _whole_range(tensor.dtype)[1])
    return is_exact


def _unequal(tensor: Tensor, dtype: str) -> str:
    """Which number kept a column from becoming one of that type, for an error."""
    kind = getattr(torch, dtype)
    if tensor.dtype == kind or tensor.is_complex() or kind.is_complex:
        return ""
    places = torch.nonzero(~_has_equals(tensor, kind))
    if not len(places):
        return ""
    place = tuple(places[0].tolist())
    return f": {tensor[place].item()} at {place} is no whole number that both types hold exactly"


def _whole_range(dtype: torch.dtype) -> tuple[int, int]:
    """The integers that a type holds exactly, at most those of int64."""
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point:
        return -int(2 / torch.finfo(dtype).eps), int(2 / torch.finfo(dtype).eps)
    info = torch.iinfo(dtype)
    return info.min, min(info.max, 2**63 - 1)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def program_input(role: str, name: str, tensor: Tensor) -> ProgramInput:
    """The description of an input that takes tensors of this dtype and shape."""
    return ProgramInput(role, name, _dtype_name(tensor), tuple(tensor.shape))
