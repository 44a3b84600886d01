"""Other kinds of loaders divided among workers: IterableDataset, DataLoader, TorchRec's batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import trireme as tr
from tests.integration.planted_model import Examples, loader, trainer_for
from tests.jobs import Job
from tests.keyed_jagged import KINDS
from trireme.data import Batch, Ragged
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.train.loop.worker_batches import worker_batches


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request) -> Any:
    return request.param


def model() -> tuple[Any, Any]:
    sgd = tr.optim.SGD(lr=0.5)
    bags = tr.nn.EmbeddingBag(tr.Table("bags", dim=3, optimizer=sgd), features=["a", "b"])
    rows = tr.nn.Embedding(tr.Table("rows", dim=2, optimizer=sgd), features="b")
    return bags, rows


def test_modules_read_a_keyed_jagged_tensor_as_they_read_a_batch(kind, default_cluster):
    draw = np.random.default_rng(3)
    bags, rows = model()
    lengths = torch.from_numpy(draw.integers(0, 4, 20))
    values = torch.from_numpy(draw.integers(0, 50, int(lengths.sum())))
    jagged = kind(["b", "a"], values, lengths=lengths)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(lengths, 0)])
    mapping = {"b": Ragged(values, bounds[:11]), "a": Ragged(values, bounds[10:])}
    batch = as_batch(jagged)
    assert isinstance(batch, Batch)
    for module in (bags.eval(), rows.eval()):
        assert torch.equal(module(jagged), module(mapping))
        assert torch.equal(module(jagged), module(batch))
        assert torch.equal(module(jagged), module({"features": jagged}))


def keyed(batches: Any, kind: Any) -> Iterator[dict[str, Any]]:
    for batch in batches:
        values = torch.cat([batch["a"], batch["b"]])
        jagged = kind(["a", "b"], values, lengths=torch.ones(len(values), dtype=torch.int32))
        yield {"sparse_features": jagged, "label": batch["label"]}


def test_training_on_keyed_jagged_tensors_is_training_on_batches(kind):
    results = []
    for batches in (list(loader(500)), list(keyed(loader(500), kind))):
        with embedded() as cluster:
            torch.manual_seed(0)
            trainer = trainer_for(cluster, "sync")
            results.append(trainer.fit(batches) | trainer.evaluate(batches))
    assert results[0]["auc"] == results[1]["auc"]
    assert results[0]["log_loss"] == results[1]["log_loss"]


class Numbers(IterableDataset):
    """Examples one by one; each process of a DataLoader reads its part, as torch documents it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.count, step):
            yield {"a": number, "b": number, "label": np.float32(number % 2)}


@pytest.mark.parametrize("num_processes", [0, 2])
def test_an_iterable_dataset_is_divided_among_three_workers(num_processes):
    def work(cluster: Cluster) -> tuple[list[int], float]:
        batches = DataLoader(Numbers(1000), batch_size=10, num_workers=num_processes)
        seen = [int(a) for batch in worker_batches(batches, cluster) for a in batch["a"]]
        return seen, trainer_for(cluster, "sync").fit(batches)["examples"]

    with Job(1) as job:
        shares, counts = zip(*job.run(3, work), strict=True)
    assert sorted(number for share in shares for number in share) == list(range(1000))
    assert max(map(len, shares)) - min(map(len, shares)) <= 10
    assert set(counts) == {1000}


def test_loaders_that_would_not_yield_the_same_batches_everywhere_are_refused():
    examples = Examples(100)
    random = RandomSampler(examples)
    weighted = WeightedRandomSampler([1.0] * 100, 100)

    def work(cluster: Cluster) -> None:
        for options, message in [
            ({"shuffle": True}, r"found a random one \(RandomSampler\)"),
            ({"sampler": weighted}, r"found a random one \(WeightedRandomSampler\)"),
            ({"batch_sampler": BatchSampler(random, 10, False)}, r"\(RandomSampler\)"),
            ({"num_workers": 2, "in_order": False}, "expected in_order=True"),
            (
                {"sampler": DistributedSampler(examples, 3, (cluster.worker + 1) % 2)},
                "expected a DistributedSampler of rank",
            ),
        ]:
            with pytest.raises(BadRequest, match=message):
                worker_batches(DataLoader(examples, **options), cluster)

    with Job(1) as job:
        job.run(2, work)


def test_a_distributed_sampler_shares_by_itself_in_an_order_of_each_epoch():
    def work(cluster: Cluster) -> list[list[int]]:
        sampler = DistributedSampler(range(100), cluster.num_workers, cluster.worker)
        batches = DataLoader(
            range(100), batch_size=10, sampler=sampler, collate_fn=lambda rows: rows
        )
        return [
            [row for batch in worker_batches(batches, cluster, epoch) for row in batch]
            for epoch in (0, 1, 0)
        ]

    with Job(1) as job:
        first, second = job.run(2, work)
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == list(range(100))
    assert first[0] == first[2] != first[1]
