"""Dense parameters of Fleet's folders: their names and order, and their values as our blocks."""

import gzip
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from trireme.errors import BadRequest, DataError
from trireme.interchange.formats import fleet_dense
from trireme.interchange.formats.file_lists import list_files
from trireme.interchange.formats.fleet_dense import Column
from trireme.interchange.worker_side.dense_blocks import SCALARS, read_blocks
from trireme.protocol.block_messages import BlockTensors
from trireme.protocol.wire import Array
from trireme.train.optimizer import DistributedOptimizer

DENSE_FILE = re.compile(r"part-\d{3}(\.gz)?")
VARIABLES = "dnn_plugin"  # folder of Paddle's save_inference_model


class FleetParameter(NamedTuple):
    """A dense parameter by Paddle's name and ours. Paddle keeps weights of linear layers as
    (in, out), torch as (out, in): these are transposed. `shape` is ours.
    """

    paddle_name: str
    name: str
    shape: tuple[int, ...]
    is_transposed: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def from_paddle(self, values: Array) -> Array:
        """(size, columns) in Paddle's order of elements -> the same in ours."""
        return self._reordered(values, self.shape[::-1])

    def to_paddle(self, values: Array) -> Array:
        return self._reordered(values, self.shape)

    def _reordered(self, values: Array, shape: tuple[int, ...]) -> Array:
        if not self.is_transposed:
            return values
        reordered: Array = values.reshape(*shape, -1).swapaxes(0, 1).reshape(self.size, -1)
        return reordered


def fleet_parameters(
    optimizer: DistributedOptimizer, names: Mapping[str, str] | None
) -> tuple[FleetParameter, ...]:
    """All dense parameters, by Paddle's name: the order in which Fleet lays them end to end.

    names: ours by Paddle's; None: the n-th torch.nn.Linear of the model is Paddle's linear_n, as in
    models of linear layers alone. Raises BadRequest: a parameter without a name, or a name without
    a parameter.
    """
    model, specs = optimizer.model, optimizer.replica.dense.specs
    on_servers = {spec.param for spec in specs}
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if n in on_servers}
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    if names is None:
        names = {
            f"linear_{i}.{paddle_name}": f"{linear}.{name}"
            for i, linear in enumerate(linears)
            for paddle_name, name in (("w_0", "weight"), ("b_0", "bias"))
            if f"{linear}.{name}" in shapes
        }
    if sorted(names.values()) != sorted(shapes):
        raise BadRequest(
            f"dense: expected each of {sorted(shapes)} once as a value of"
            f" dense={{Paddle's name: ours}}, found {sorted(names.values())}"
        )
    weights = {f"{linear}.weight" for linear in linears}
    return tuple(
        FleetParameter(paddle_name, name, shapes[name], name in weights)
        for paddle_name, name in sorted(names.items())
    )


# ---- reading ----


def read_parameters(
    optimizer: DistributedOptimizer,
    path: str,
    parameters: Sequence[FleetParameter],
    steps: int,
    storage_options: Mapping[str, Any] | None,
) -> BlockTensors:
    """The tensors of all blocks: from save_inference_model's variables if there are any, else from
    the first dense table.
    """
    kind, _ = read_blocks(optimizer.cluster.client)
    state: tuple[Column, ...] = ()
    if _exists(f"{path}/{VARIABLES}", storage_options):
        columns = _read_variables(parameters, f"{path}/{VARIABLES}", storage_options)
    else:
        state = fleet_dense.COLUMNS.get(str(kind), ())
        columns = _read_table(parameters, path, str(kind), state, storage_options)
    tensors = BlockTensors()
    for spec in optimizer.replica.dense.specs:
        block = columns[spec.param][spec.start : spec.start + spec.size]
        tensors[spec.id] = {"weights": block[:, 0]}
        for number, column in enumerate(state, 1):
            if column.name:
                values = block[:1, number] if column.name in SCALARS else block[:, number]
                tensors[spec.id][column.name] = values * np.float32(column.sign)
        if kind == "Adam" and state:
            tensors[spec.id]["step"] = np.array([steps], np.float32)
    return tensors


def _exists(folder: str, storage_options: Mapping[str, Any] | None) -> bool:
    try:
        return bool(list_files(folder, storage_options))
    except DataError:
        return False


def _read_variables(
    parameters: Sequence[FleetParameter], folder: str, storage_options: Mapping[str, Any] | None
) -> dict[str, Array]:
    """Each parameter's elements in our order, (elements, 1), from files by Paddle's names."""
    columns = dict[str, Array]()
    for parameter in parameters:
        file = f"{folder}/{parameter.paddle_name}"
        values = fleet_dense.read_variable(file, storage_options)
        values = values.T if parameter.is_transposed else values
        if values.shape != parameter.shape:
            raise DataError(
                f"{file}: expected the shape of {parameter.name}, {parameter.shape}, found"
                f" {values.shape}"
            )
        columns[parameter.name] = values.reshape(-1, 1)
    return columns


def _read_table(
    parameters: Sequence[FleetParameter],
    path: str,
    kind: str,
    state: Sequence[Column],
    storage_options: Mapping[str, Any] | None,
) -> dict[str, Array]:
    """Each parameter's elements in our order, (elements, weight and state)."""
    files = _dense_files(path, storage_options)
    lines = fleet_dense.read_text(files, storage_options)
    if lines.shape[1] != 1 + len(state):
        raise DataError(
            f"{files[0]}: expected a weight and {len(state)} numbers of {kind} in each line,"
            f" found {lines.shape[1]} numbers"
        )
    expected = sum(parameter.size for parameter in parameters)
    if len(lines) != expected:
        raise DataError(f"{files[0]}: expected {expected} elements in all, found {len(lines)}")
    ends = np.cumsum([parameter.size for parameter in parameters])
    parts = np.split(lines, ends[:-1])
    return {
        parameter.name: parameter.from_paddle(part)
        for parameter, part in zip(parameters, parts, strict=True)
    }


def _dense_files(path: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    """Those of the first table whose files have a server's number alone."""
    for number in range(1000):
        files = list_files(f"{path}/{number:03d}", storage_options)
        if all(DENSE_FILE.fullmatch(file.rpartition("/")[2]) for file in files):
            return files
    raise DataError(f"{path}: expected a dense table, found none")


# ---- writing ----


def write_parameters(
    optimizer: DistributedOptimizer,
    folder: Path,
    parameters: Sequence[FleetParameter],
    compress: bool,
) -> None:
    """Write a dense table into a new folder."""
    optimizer.mode.publish()
    kind, blocks = read_blocks(optimizer.cluster.client)
    state = fleet_dense.COLUMNS.get(str(kind))
    if state is None:
        raise BadRequest(
            f"export_fleet: expected one of {sorted(fleet_dense.COLUMNS)} as the dense optimizer,"
            f" whose state Fleet has too, found {kind}; pass dense={{}} to leave the dense part out"
        )
    columns = {p.name: np.zeros((p.size, 1 + len(state)), np.float32) for p in parameters}
    for spec in optimizer.replica.dense.specs:
        block = columns[spec.param][spec.start : spec.start + spec.size]
        for number, column in enumerate((Column("weights"), *state)):
            if column.name in blocks[spec.id]:  # no state before the first step
                block[:, number] = blocks[spec.id][column.name] * np.float32(column.sign)
    lines = np.concatenate([p.to_paddle(columns[p.name]) for p in parameters])
    text = fleet_dense.write_text(lines)
    folder.mkdir()
    file = folder / f"part-000{'.gz' if compress else ''}"
    file.write_bytes(gzip.compress(text, mtime=0) if compress else text)
