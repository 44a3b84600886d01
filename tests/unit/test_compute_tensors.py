"""Tensors as the arrays of a message to compute workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trireme.errors import BadRequest
from trireme.train.compute.tensors import DTYPES, SMALL_BYTES_MAX, pack, unpack


def received(tensors: list[Tensor]) -> list[Tensor]:
    specs, arrays = pack(tensors)
    for array in arrays:
        array.flags.writeable = False
    return unpack(specs, arrays)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (5, 3), (4, 4096)])
def test_tensors_of_every_dtype_and_size_come_back(name: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = (100 * torch.rand(shape, generator=generator)).to(DTYPES[name])
    before = torch.ones(1, dtype=torch.bool)  # what follows it must be aligned
    [_, result, _] = received([before, tensor, before])
    assert result.dtype == tensor.dtype
    assert result.shape == tensor.shape
    assert result.contiguous().view(torch.uint8).equal(tensor.view(torch.uint8)) if shape else True
    assert result.double().equal(tensor.double())


def test_a_tensor_that_is_not_contiguous_and_one_with_a_gradient_come_back() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    leaf = torch.ones(2, requires_grad=True)
    transposed, plain = received([matrix.T, leaf])
    assert transposed.equal(matrix.T)
    assert plain.equal(torch.ones(2))
    assert not plain.requires_grad


def test_large_tensors_are_not_copied() -> None:
    large = torch.zeros(SMALL_BYTES_MAX // 4 + 1)
    specs, arrays = pack([large])
    assert arrays[1].ctypes.data == large.data_ptr()
    [result] = unpack(specs, arrays)
    assert result.data_ptr() == large.data_ptr()


def test_a_tensor_that_does_not_travel_is_named() -> None:
    with pytest.raises(BadRequest, match=r"found torch.complex64, torch.strided, of shape \(2,\)"):
        pack([torch.zeros(2, dtype=torch.complex64)])
    with pytest.raises(BadRequest, match=r"found torch.float32, torch.sparse_coo, of shape \(2,\)"):
        pack([torch.zeros(2).to_sparse()])


SMALL = np.zeros(1, np.int64)


@pytest.mark.parametrize(
    ("specs", "arrays"),
    [
        (None, [SMALL]),
        ([["float32", [1]]], []),
        ([["float32", [1]]], [np.zeros(2, np.int64)]),
        ([["float32", [1]]], [np.zeros(1, np.float64)]),
        ([["float32", [1]]], [SMALL, SMALL]),
        ([["object", [1]]], [SMALL]),
        ([["float32", [-1]]], [SMALL]),
        ([["float32", [1.0]]], [SMALL]),
        ([["float32", 1]], [SMALL]),
        ([["float32"]], [SMALL]),
        ([[["float32"], [1]]], [SMALL]),
        ([["float32", [1 << 40, 1 << 40]]], [SMALL]),
        ([["float32", [1 << 40, 1 << 40, 0]]], [np.zeros(0, np.int64)]),
        ([["float32", [1 << 63, 0]]], [np.zeros(0, np.int64)]),
        ([["float32", [1] * 9]], [SMALL]),
        ([["float32", [4096]]], [np.zeros(0, np.int64), np.zeros(4096, np.float64)]),
        ([["float32", [4096]]], [np.zeros(0, np.int64), np.zeros((2, 2048), np.float32)]),
    ],
)
def test_arrays_that_are_not_those_of_the_specs_are_refused(
    specs: Any, arrays: list[np.ndarray[Any, Any]]
) -> None:
    with pytest.raises(BadRequest):
        unpack(specs, arrays)
