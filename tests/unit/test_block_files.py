"""Files of dense blocks are valid safetensors files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from trireme.checkpoint.format.block_files import write_tensors
from trireme.errors import BadRequest
from trireme.storage.checked_file import written
from trireme.storage.local import LocalStorage

TENSORS = {
    "fc.bias@0/flag": torch.tensor([True, False, True]),
    "fc.bias@0/weights": torch.tensor([1.5, -0.0, float("inf")]),
    'a "name"\n, \u00e4@65536/step': torch.tensor(7.0),
    "fc.weight@0/matrix": torch.arange(6, dtype=torch.float64).reshape(2, 3).T,
    "fc.weight@0/none": torch.empty(0, 4),
    "fc.weight@0/count": torch.tensor(2**40),
}


def test_written_records_are_read_back_unchanged(tmp_path: Path) -> None:
    with written(LocalStorage(tmp_path), "x.safetensors") as (file, entry):
        write_tensors(file, TENSORS)
    path = tmp_path / "x.safetensors"
    assert entry["bytes"] == path.stat().st_size
    for tensors in (load(path.read_bytes()), load_file(path)):
        assert tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape), name
            assert tensors[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes(), name


def test_the_same_tensors_make_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for name, tensors in (("a", TENSORS), ("b", dict(reversed(TENSORS.items())))):
        with written(storage, name) as (file, _):
            write_tensors(file, tensors)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    with written(LocalStorage(tmp_path), "x.safetensors") as (file, _):
        write_tensors(file, {})
    assert load_file(tmp_path / "x.safetensors") == {}


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    message = r"found b@0/weights of torch.complex64"
    with (
        pytest.raises(BadRequest, match=message),
        written(LocalStorage(tmp_path), "x.safetensors") as (file, _),
    ):
        write_tensors(file, {"b@0/weights": torch.zeros(2, dtype=torch.complex64)})
