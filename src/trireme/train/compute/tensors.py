"""Tensors as the arrays of a message.

Large ones are sent as they lie in memory and received as views of the message. Small ones travel
together in one array: each array of a message costs some microseconds at both ends, and a model has
many biases.

Threads: the functions have no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme import _core, accelerator
from trireme.errors import BadRequest
from trireme.protocol.wire import need_list

Array = NDArray[Any]

SMALL_BYTES_MAX = 8192
_WORD_BYTES = 8  # of the array of small tensors, each of which begins at a word
_NDIM_MAX = 8
_NUMEL_MAX = 1 << 48

# By name; those that NumPy lacks travel as integers of their size.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CARRIERS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    dtype: torch.empty(0, dtype=_CARRIERS.get(dtype, dtype)).numpy().dtype for dtype in _NAMES
}


def pack(tensors: Sequence[Tensor]) -> tuple[list[list[Any]], list[Array]]:
    """The dtype and shape of each tensor, and arrays: the small ones together, then each large one,
    over its own memory where that is on the CPU and contiguous.

    Raises BadRequest: a dtype that does not travel, or a sparse tensor.
    """
    specs, large, small = [], list[Array](), list[Array]()
    for tensor in accelerator.to_host([tensor.detach() for tensor in tensors]):
        name = _NAMES.get(tensor.dtype)
        if name is None or tensor.layout != torch.strided:
            raise BadRequest(
                f"compute workers: expected dense tensors of {', '.join(DTYPES)}, found"
                f" {tensor.dtype}, {tensor.layout}, of shape {tuple(tensor.shape)}"
            )
        specs.append([name, list(tensor.shape)])
        carried = tensor.contiguous().view(_CARRIERS.get(tensor.dtype, tensor.dtype)).numpy()
        (small if carried.nbytes <= SMALL_BYTES_MAX else large).append(carried)
    return specs, [_joined(small), *large]


def _joined(arrays: Sequence[Array]) -> Array:
    words = [_num_words(array.nbytes) for array in arrays]
    joined = np.zeros(sum(words), np.int64)
    start = 0
    for array, length in zip(arrays, words, strict=True):
        to = joined[start : start + length].view(np.uint8)
        to[: array.nbytes] = array.reshape(-1).view(np.uint8)
        start += length
    return joined


def unpack(specs: object, arrays: Sequence[Array]) -> list[Tensor]:
    """The inverse of `pack`: tensors over the memory of the arrays, which must be nobody else's.
    Raises BadRequest: the arrays are not those of the specs.
    """
    forms = [_form(spec) for spec in need_list({"tensors": specs}, "tensors", list)]
    words = sum(_num_words(n) for _, _, n in forms if n <= SMALL_BYTES_MAX)
    num_large = sum(n > SMALL_BYTES_MAX for _, _, n in forms)
    has_small = len(arrays) > 0 and arrays[0].dtype == np.int64 and arrays[0].shape == (words,)
    if not has_small or len(arrays) != 1 + num_large:
        raise BadRequest(
            f"compute workers: expected {words} words of small tensors and {num_large} large ones,"
            f" found arrays {[(str(a.dtype), a.shape) for a in arrays[:8]]}"
        )
    joined, large = _core.borrow(arrays[0]), iter(arrays[1:])
    tensors, start = [], 0
    for dtype, shape, num_bytes in forms:
        if num_bytes <= SMALL_BYTES_MAX:
            part = joined[start : start + _num_words(num_bytes)].view(np.uint8)
            start += _num_words(num_bytes)
            array = part[:num_bytes].view(_NUMPY[dtype]).reshape(shape)
        else:
            array = _core.borrow(_checked(next(large), dtype, shape))
        tensors.append(torch.from_numpy(array).view(dtype))
    return tensors


def _checked(array: Array, dtype: torch.dtype, shape: tuple[int, ...]) -> Array:
    if array.dtype != _NUMPY[dtype] or array.shape != shape:
        raise BadRequest(
            f"compute workers: expected a tensor {dtype} of shape {shape}, found {array.dtype} of"
            f" {array.shape}"
        )
    return array


def _form(spec: list[Any]) -> tuple[torch.dtype, tuple[int, ...], int]:
    """(dtype, shape, bytes) of a spec. Raises BadRequest."""
    name, shape = spec if len(spec) == 2 else ("", ())
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    is_shape = type(shape) is list and len(shape) <= _NDIM_MAX
    if dtype is None or not is_shape or not all(type(n) is int and n >= 0 for n in shape):
        raise BadRequest(f"compute workers: expected [dtype, shape] of a tensor, found {spec!r}")
    if math.prod(n or 1 for n in shape) > _NUMEL_MAX:  # NumPy's limit is one of empty ones too
        raise BadRequest(f"compute workers: expected <= {_NUMEL_MAX} elements, found {shape}")
    return dtype, tuple(shape), math.prod(shape) * dtype.itemsize


def _num_words(num_bytes: int) -> int:
    return -(-num_bytes // _WORD_BYTES)
