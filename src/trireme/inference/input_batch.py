"""Batches from the inputs of a Predictor: tensors, NumPy arrays, lists."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.data.batch import Batch, Ragged
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest


def batch_of(source: Any) -> Batch:
    """Make a batch of what `as_batch` takes; in a mapping also of NumPy arrays (uint64 keys become
    int64 of the same bits), pairs (values, offsets) or triples (values, offsets, weights) of
    arrays, and lists of lists of ids, one per example. Raises BadRequest: a column of another form;
    names it.
    """
    if isinstance(source, Mapping):
        source = {name: _column(name, value) for name, value in source.items()}
    return as_batch(source)


def _column(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _tensor(name, value)
    if type(value) is tuple and len(value) in (2, 3):
        return Ragged(*(_tensor(name, part) for part in value))
    if isinstance(value, list) and all(isinstance(ids, list) for ids in value):
        return _ragged(name, value)
    return value


def _tensor(name: str, array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array
    array = np.asarray(array)
    if array.dtype == np.uint64:
        array = array.view(np.int64)
    if array.dtype.kind not in "biuf":
        raise BadRequest(f"Predictor: expected numbers in column {name!r}, found {array.dtype}")
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _ragged(name: str, bags: list[list[int]]) -> Ragged:
    try:
        flat = np.array([key % 2**64 for bag in bags for key in bag], np.uint64)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"Predictor: expected lists of ids in column {name!r}: {error}") from error
    offsets = np.cumsum([0, *(len(bag) for bag in bags)])
    return Ragged(torch.from_numpy(flat.view(np.int64)), torch.from_numpy(offsets))
