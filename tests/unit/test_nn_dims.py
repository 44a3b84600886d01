"""Features of one table with different dims: values, gradients, rows, and refused settings.

Legend: B examples, D columns of a feature.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job
from trireme.data import Bags, Batch
from trireme.errors import BadRequest, SchemaMismatch
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.nn import Embedding, EmbeddingBag, Planner

DIMS = {"user": 8, "ad": 3, "site": 8, "hour": 1}
B = 6


@pytest.fixture
def home() -> Iterator[Cluster]:
    with embedded(threads=2) as cluster:
        set_default(cluster)
        yield cluster


def table(name: str = "t", **options: Any) -> tr.Table:
    dim: dict[str, Any] = {"dims": DIMS} if "dim" not in options else {}
    rule = tr.optim.Adagrad(lr=0.1)
    return tr.Table(name, salt=True, seed=3, optimizer=rule, **dim, **options)


def random_batch(seed: int) -> Batch:
    """Every feature a bag of 0 to 3 ids; equal ids in several features."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 4, (len(DIMS) * B,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    values = torch.randint(0, 9, (int(offsets[-1]),), generator=generator)
    targets = torch.randn(B, sum(DIMS.values()), generator=generator)
    return Batch({"target": targets}, Bags(tuple(DIMS), values, offsets))


class Apart(nn.Module):
    """What one module over a table with dims must equal: a table and a module for each feature."""

    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            EmbeddingBag(table(name, dim=dim), features=name, mode=mode)
            for name, dim in DIMS.items()
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        return torch.cat([bag(batch).squeeze(1) for bag in self.bags], dim=1)


def train(model: nn.Module, home: Cluster, num_steps: int = 4) -> list[torch.Tensor]:
    """What the model returns in each step; the loss depends on every column."""
    optimizer = tr.DistributedOptimizer(None, model, cluster=home)
    outputs = []
    for step in range(num_steps):
        batch = random_batch(step)
        out = model(batch)
        outputs.append(out.detach().clone())
        (out * batch["target"]).mean().backward()
        optimizer.step()
    optimizer.finish()
    return outputs


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_over_dims_is_the_bags_of_each_feature_side_by_side(home: Cluster, mode: str) -> None:
    bag = EmbeddingBag(table(), features=list(DIMS), mode=mode)
    assert bag.dims == (8, 3, 8, 1)
    actual = train(bag, home)
    assert actual[0].shape == (B, 20)
    for out, expected in zip(actual, train(Apart(mode), home), strict=True):
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert not torch.equal(actual[0], bag(random_batch(0)))
    parts = bag(random_batch(0)).split(bag.dims, 1)
    assert [part.shape[1] for part in parts] == [8, 3, 8, 1]


def test_features_of_one_dim_give_what_they_give_in_any_table(home: Cluster) -> None:
    of_dims = EmbeddingBag(table(), features=["site", "user"])
    plain = EmbeddingBag(table("plain", dim=8), features=["site", "user"])
    batch = random_batch(1)
    assert of_dims(batch).shape == (B, 2, 8)
    torch.testing.assert_close(of_dims(batch), plain(batch), rtol=0, atol=0)


def test_gradients_reach_the_rows_of_each_feature(home: Cluster) -> None:
    model = EmbeddingBag(table(), features=list(DIMS))
    batch = random_batch(2)
    plan = Planner(model, pool=home.pool).plan(batch)
    assert [part.table.dim for part in plan.tables] == [8, 3, 1]
    assert Planner(model, pool=home.pool).tables == (model.table,)
    rows = {
        part.table.class_id: torch.randn(len(part.keys), part.table.dim) for part in plan.tables
    }
    leaves = plan.attach(batch, rows, train=True)
    scale = torch.randn(20)
    (model(batch) * scale).sum().backward()
    for part in plan.tables:
        grad = leaves[part.table.class_id].grad
        assert grad is not None
        assert grad.shape == (len(part.keys), part.table.dim)
    # Each id of a bag of "ad" has the gradient of its columns.
    ad = next(part for part in plan.tables if part.table.dim == 3)
    actual, offsets = leaves[ad.table.class_id].grad, batch["ad"].offsets
    counts = (actual[:, 0] / scale[8]).round()
    torch.testing.assert_close(actual, counts[:, None] * scale[8:11])
    assert counts.sum() == offsets[-1] - offsets[0]


def test_an_embedding_answers_each_feature_in_its_dim(home: Cluster) -> None:
    module = Embedding(table(), features=["ad", "user"])
    ids = {"ad": torch.tensor([1, 2, 3]), "user": torch.tensor([[1, 2], [3, 4], [5, 6]])}
    ad, user = module(ids)
    assert (ad.shape, user.shape) == ((3, 3), (3, 2, 8))
    one = Embedding(table("one", dim=3), features="ad")
    torch.testing.assert_close(ad, one(ids), rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_and_servers_agree_on_dims(mode: str) -> None:
    """Two workers on two servers against one on one, on the same examples."""

    def work(home: Cluster) -> np.ndarray:
        model = EmbeddingBag(table(), features=list(DIMS))
        optimizer = tr.DistributedOptimizer(None, model, cluster=home, strategy=tr.Strategy(mode))
        batches = [random_batch(step) for step in range(4)]
        for batch in tr.prefetch(batches, model, cluster=home):
            (model(batch) * batch["target"]).sum().backward()
            optimizer.step()
        optimizer.finish()
        model.eval()
        plan = Planner(model, pool=home.pool).plan(batches[0])
        pulled = home.client.pull(plan.keys())
        assert sum(pulled.missing.values()) == 0
        return np.concatenate([rows.ravel() for rows in pulled.rows.values()])

    actual = []
    for num_servers in (1, 2):
        with Job(num_servers) as job:
            actual += job.run(1, work)
    np.testing.assert_array_equal(actual[0], actual[1])
    assert np.isfinite(actual[0]).all()


def test_row_classes_are_saved_and_loaded(home: Cluster, tmp_path: Any) -> None:
    model = EmbeddingBag(table(), features=list(DIMS))
    trainer = tr.Trainer(
        model,
        None,
        loss=lambda output, batch: (output * batch["target"]).mean(),
        label=None,
        progress=False,
        cluster=home,
    )
    trainer.fit([random_batch(step) for step in range(4)], epochs=1)
    model.eval()
    batch = random_batch(1)
    expected = model(batch).detach()
    trainer.save(tmp_path / "saved")
    trainer.fit([random_batch(step) for step in range(4)], epochs=1)
    model.eval()
    assert not torch.equal(model(batch), expected)
    trainer.load(tmp_path / "saved")
    torch.testing.assert_close(model(batch).detach(), expected, rtol=0, atol=0)


WRONG: list[tuple[Any, str]] = [
    (lambda: tr.Table("t"), "expected dim or dims, found None and None"),
    (lambda: tr.Table("t", dim=2, dims={"a": 2}), "expected dim or dims, found 2 and"),
    (lambda: tr.Table("t", dim=2.5), "expected dim as a whole number from 1 to 4096, found 2.5"),  # type: ignore[arg-type]
    (lambda: tr.Table("t", dims={}), r"expected dims \{feature: dim\}, each as a .*, found \{\}"),
    (lambda: tr.Table("t", dims={"a": 2.5}), "expected dims .*, found"),
    (lambda: tr.Table("t", dims={"a": 2, "b": 3}), "expected salt=True with different dims"),
    (lambda: tr.Table("t", dims={"a": 0}, salt=True), r"from 1 to 4096, found"),
    (
        lambda: tr.Table("t", dims={str(d): d + 1 for d in range(17)}, salt=True),
        "expected 1 to 16 row classes",
    ),
    (lambda: tr.Table("t\x1f1", dim=2), r"expected a name without '\\x1f'"),
    (lambda: EmbeddingBag(table(), features=["user", "age"]), "its dims, .*, found 'age'"),
    (lambda: Embedding(table(), features="age"), "expected a feature of its dims"),
    (
        lambda: Planner(
            EmbeddingBag(table(), features="ad"), EmbeddingBag(table(), features="user"), pool=None
        ),
        "expected one Table named 't', found two",
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        make()


def test_a_state_dict_knows_the_dims_of_its_features() -> None:
    state = EmbeddingBag(table(), features=["user", "ad"]).state_dict()
    EmbeddingBag(table(), features=["user", "ad"]).load_state_dict(state)
    with pytest.raises(SchemaMismatch, match=r"'dim': \[8, 8\]|'dim': 8"):
        EmbeddingBag(table(), features=["user", "site"]).load_state_dict(state)
