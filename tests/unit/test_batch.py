"""Batch: columns by name, views without copies, DataLoader, torch.compile and torch.export."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from trireme.data.batch import Bags, Batch, Ragged


def make_batch(first: int = 0, B: int = 3) -> Batch:
    """Two features: "A" with b ids in example b, "Z" with one id each."""
    a_ids = [first + b for b in range(B) for _ in range(b)]
    z_ids = [100 + first + b for b in range(B)]
    ends = [0]
    for length in [*range(B), *([1] * B)]:
        ends.append(ends[-1] + length)
    return Batch(
        columns={"label": torch.arange(float(B)), "dense": torch.ones(B, 4) * first},
        bags=Bags(("A", "Z"), torch.tensor(a_ids + z_ids), torch.tensor(ends)),
        stream=1,
        position=(0, first),
    )


class Batches(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        share = range(4) if worker is None else range(worker.id, 4, worker.num_workers)
        return (make_batch(first) for first in share)


class Model(nn.Module):
    def forward(self, batch: Batch) -> Tensor:
        ragged = batch["A"]
        assert isinstance(ragged, Ragged)
        sizes = (ragged.offsets[1:] - ragged.offsets[:-1]).float()
        return batch["dense"].sum(1) + sizes


def test_batch_reads_like_a_mapping_of_columns():
    batch = make_batch()
    assert batch.num_examples == 3
    assert batch.keys() == ("label", "dense", "A", "Z") == tuple(batch)
    assert len(batch) == 4
    assert "Z" in batch
    assert "dense" in batch
    assert "B" not in batch
    assert batch.get("B", 7) == 7
    assert dict(batch.items()).keys() == {"label", "dense", "A", "Z"}
    with pytest.raises(KeyError, match="no column 'B'; there are label, dense, A, Z"):
        batch["B"]
    assert "position=(0, 0)" in repr(batch)


def test_bags_on_their_own_are_columns_too():
    ragged = Ragged(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 3]))
    batch = Batch({"A": ragged})
    assert batch.num_examples == 2
    assert batch["A"] is ragged
    doubled = pytree.tree_map(lambda t: t * 2 if isinstance(t, Tensor) else t, batch)
    assert doubled["A"].values.tolist() == [10, 12, 14]


def test_bags_of_a_feature_are_its_ids_alone_without_a_copy():
    batch = make_batch()
    z = batch["Z"]
    assert z.values.data_ptr() == batch.bags.values[3:].data_ptr()
    assert z.values.tolist() == [100, 101, 102]
    bags = [z.values[z.offsets[b] : z.offsets[b + 1]].tolist() for b in range(3)]
    assert bags == [[100], [101], [102]]
    assert [len(batch["A"].offsets), batch["A"].offsets.tolist()] == [4, [0, 0, 1, 3]]
    second = batch[batch.bags.names[1]]
    assert second.offsets[0] == 0
    assert second.offsets[-1] == len(second.values)
    with pytest.raises(KeyError, match="no feature 'q'"):
        batch.bags["q"]
    assert [name in batch.bags for name in ("Z", "q")] == [True, False]
    assert tuple(batch.bags) == batch.bags.names


def test_pytree_maps_tensors_and_keeps_names():
    batch = pytree.tree_map(lambda t: t + 1 if isinstance(t, Tensor) else t, make_batch())
    assert isinstance(batch, Batch)
    assert batch.bags.names == ("A", "Z")
    assert batch["label"].tolist() == [1, 2, 3]
    spec = pytree.tree_structure(make_batch())
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    assert spec == pytree.tree_structure(make_batch(first=5)), "the position is not structure"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_passes_a_data_loader_unchanged(num_workers):
    loader = DataLoader(Batches(), batch_size=None, num_workers=num_workers)
    batches = list(loader)
    assert all(isinstance(b, Batch) and b.stream == 1 for b in batches)
    assert sorted(b.position for b in batches) == [(0, first) for first in range(4)]
    by_first = {b.position[1]: b for b in batches}
    assert by_first[3]["Z"].values.tolist() == make_batch(3)["Z"].values.tolist()


def test_pin_memory_keeps_everything_else(monkeypatch):
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self + 1)  # no accelerator needed
    batch = make_batch().pin_memory()
    assert (batch.stream, batch.position) == (1, (0, 0))
    assert batch["label"].tolist() == [1, 2, 3]
    assert batch.bags.weights is None


def test_batch_is_an_argument_of_exported_and_compiled_models():
    batch = make_batch(2)
    exported = torch.export.export(Model(), (batch,)).module()
    assert torch.equal(exported(make_batch(5)), Model()(make_batch(5)))
    compiled = torch.compile(Model(), fullgraph=True, backend="eager")
    assert torch.equal(compiled(batch), Model()(batch))
