"""Lines of dumps: numbers and keys are read back unchanged."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from trireme.data.batch import Ragged
from trireme.errors import BadRequest
from trireme.train import dump_text


def values_of(texts: list[str], name: str) -> list[list[str]]:
    actual = [text.split(":") for text in texts]
    assert all(part[0] == name and int(part[1]) == len(part) - 2 for part in actual)
    return [part[2:] for part in actual]


@pytest.mark.parametrize("seed", range(5))
def test_reading_back_gives_the_same_numbers(seed: int) -> None:
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    bits_BD = random.integers(0, 2**32, (40, 1 + seed), dtype=np.uint32)
    numbers_BD = torch.from_numpy(bits_BD.view(np.float32))  # of every size, NaN too
    actual = values_of(dump_text.field("x", numbers_BD).to_pylist(), "x")
    np.testing.assert_array_equal(np.array(actual, np.float32), numbers_BD.numpy())


@pytest.mark.parametrize("seed", range(5))
def test_reading_back_gives_the_same_keys(seed: int) -> None:
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    keys_N = random.integers(0, 2**64, 100, dtype=np.uint64)
    ends = np.sort(random.integers(0, 101, 31))
    column = Ragged(torch.from_numpy(keys_N.view(np.int64)), torch.from_numpy(ends))
    actual = values_of(dump_text.field("k", column).to_pylist(), "k")
    expected = [keys_N[a:b].tolist() for a, b in itertools.pairwise(ends)]
    assert [[int(key) for key in bag] for bag in actual] == expected


def test_other_kinds_of_numbers() -> None:
    for tensor, expected in (
        (torch.tensor([True, False]), ["x:1:1", "x:1:0"]),
        (torch.tensor([[1, -2]]), ["x:2:1:-2"]),
        (torch.tensor([[[1.5], [2]]], dtype=torch.bfloat16), ["x:2:1.5:2"]),
        (torch.zeros(2, 0), ["x:0", "x:0"]),
        (torch.zeros(0), []),
    ):
        assert dump_text.field("x", tensor).to_pylist() == expected
    assert bytes(dump_text.lines(dump_text.field("x", torch.zeros(0)))) == b""
    with pytest.raises(BadRequest, match="a value per example in 'x', found one for all"):
        dump_text.field("x", torch.tensor(1.0))
