"""Batches of other libraries: mappings, dataclasses, KeyedJaggedTensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.keyed_jagged import KINDS
from trireme.data import Strings
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request) -> Any:
    return request.param


def test_a_keyed_jagged_tensor_becomes_bags_without_a_copy(kind):
    values = torch.arange(7)
    jagged = kind(["a", "b"], values, lengths=torch.tensor([1, 2, 0, 1, 1, 2]))
    batch = as_batch(jagged)
    assert batch.num_examples == 3
    assert batch.bags.names == ("a", "b")
    assert batch.bags.offsets.tolist() == [0, 1, 3, 3, 4, 5, 7]
    assert batch.bags.values.data_ptr() == values.data_ptr()
    assert batch["b"].offsets.tolist() == [0, 1, 2, 4]
    assert batch["b"].values.tolist() == [3, 4, 5, 6]


def test_weights_and_narrow_integers_are_kept(kind):
    values, lengths = torch.arange(3, dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    weights = torch.tensor([0.5, 1.0, 2.0])
    bags = as_batch(kind(["a"], values, weights, lengths=lengths)).bags
    assert bags.values.dtype == bags.offsets.dtype == torch.int64
    assert bags.offsets.tolist() == [0, 1, 3]
    assert bags.weights.tolist() == [0.5, 1.0, 2.0]


@dataclass
class TorchRecBatch:
    """As torchrec.datasets.utils.Batch."""

    dense_features: Tensor
    sparse_features: Any
    labels: Tensor


def test_values_of_a_mapping_and_of_a_dataclass_are_columns_or_bags(kind):
    dense, labels = torch.ones(2, 3), torch.zeros(2)
    jagged = kind(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    other = kind(["b"], torch.arange(9, 11), torch.ones(2), lengths=torch.tensor([2, 0]))
    batch = as_batch(TorchRecBatch(dense, jagged, labels))
    assert set(batch.columns) == {"dense_features", "labels"}
    assert batch.bags.names == ("a",)
    batch = as_batch({"x": dense, "first": jagged, "second": other, "id": ["i", "jk"]})
    assert set(batch.columns) == {"x", "id"}
    assert isinstance(batch["id"], Strings)
    assert batch["id"].decode() == ["i", "jk"]
    assert batch.bags.names == ("a", "b")
    assert batch.bags.values.tolist() == [0, 1, 2, 9, 10]
    assert batch.bags.offsets.tolist() == [0, 1, 3, 5, 5]
    assert batch.bags.weights.tolist() == [1.0] * 5


def test_strings_may_all_be_empty():
    assert as_batch({"id": ["", ""]})["id"].decode() == ["", ""]


def test_values_that_are_no_batch_are_refused(kind):
    for source in ((torch.ones(2), torch.ones(2)), torch.ones(2), None, TorchRecBatch):
        with pytest.raises(BadRequest, match="expected a Batch, a mapping or dataclass"):
            as_batch(source)
    one = kind(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    three = kind(["b"], torch.arange(3), lengths=torch.tensor([1, 1, 1]))
    with pytest.raises(BadRequest, match=r"of the same examples .*found 2, 3 examples of a, b"):
        as_batch({"one": one, "three": three})
    with pytest.raises(BadRequest, match="distinct names, found twice: a"):
        as_batch({"a": torch.ones(2), "one": one})
    with pytest.raises(BadRequest, match="the same number of examples of every feature, found 3"):
        as_batch(kind(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 1, 1])))
