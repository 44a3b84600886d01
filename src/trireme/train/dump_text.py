"""Columns and outputs as lines of text: `name:len:v0:v1:...`, a field per column.

Numbers have the fewest digits that read back as the same number.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme.data.batch import Column, Ragged, Strings
from trireme.errors import BadRequest

_ESCAPES = (("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))
_HALVES = (torch.bfloat16, torch.float16)


def field(name: str, column: Column) -> Any:
    """B strings `name:len:v0:v1:...`, `name:0` for an empty bag.

    Args:
        column: (B, ...) numbers, flattened per example; a bag of keys per example, without its
            weights; or a string per example.

    Raises:
        BadRequest: a tensor without a dimension of examples.
    """
    if isinstance(column, Strings):
        count, values = pa.array(["1"] * (len(column.offsets) - 1), pa.string()), texts(column)
    else:
        flat, offsets = _bags(name, column)
        sizes = np.diff(offsets)
        count, values = pa.array(sizes).cast(pa.string()), _numbers_joined(flat, offsets, ":")
        if (sizes == 0).any():
            colons = pc.if_else(pa.array(sizes == 0), "", ":")
            return _joined(pa.scalar(f"{name}:"), count, colons, values)
    return _joined(pa.scalar(f"{name}:"), count, pa.scalar(":"), values)


def numbers(values: Tensor) -> Any:
    """B strings: the numbers of each example, (B, ...), separated by commas."""
    return _numbers_joined(*_bags("output", values), ",")


def texts(column: Strings) -> Any:
    """B strings; tabs and line ends in them as backslash escapes."""
    strings = pa.array(column.decode(), pa.string())
    for character, escape in _ESCAPES:
        strings = pc.replace_substring(strings, character, escape)
    return strings


def lines(*columns: Any) -> memoryview:
    """The columns side by side, separated by tabs, as the bytes of B lines."""
    rows = pc.binary_join_element_wise(*columns, "\t")
    ended = _joined(rows, pa.scalar("\n"))
    _, offsets, data = ended.buffers()
    if data is None:
        return memoryview(b"")
    ends = np.frombuffer(offsets, np.int32)
    return memoryview(data)[: int(ends[len(ended)])]


def _joined(*columns: Any) -> Any:
    return pc.binary_join_element_wise(*columns, "")


def _bags(name: str, column: Tensor | Ragged) -> tuple[NDArray[Any], NDArray[np.int64]]:
    if isinstance(column, Ragged):
        offsets = column.offsets.cpu().numpy()
        values = column.values[int(offsets[0]) : int(offsets[-1])].cpu().numpy()
        keys = values.view(np.uint64) if values.dtype == np.int64 else values
        return keys, offsets - offsets[0]
    if column.dim() == 0:
        raise BadRequest(f"Dump: expected a value per example in {name!r}, found one for all")
    width = column.numel() // max(len(column), 1)
    return _array(column), np.arange(len(column) + 1) * width


def _array(tensor: Tensor) -> NDArray[Any]:
    readable = {torch.bool: torch.uint8, **dict.fromkeys(_HALVES, torch.float32)}
    flat = tensor.detach().flatten()
    array: NDArray[Any] = flat.to(readable.get(flat.dtype, flat.dtype)).cpu().numpy()
    return array


def _numbers_joined(flat: NDArray[Any], offsets: NDArray[np.int64], between: str) -> Any:
    strings = pa.array(flat).cast(pa.string())
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), strings)
    return pc.binary_join(lists, between)
