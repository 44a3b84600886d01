"""Fleet's scaling of gradients: by the batch's examples, and by shows for Adagrad."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import trireme as tr
from tests.tables import T_ROWS
from trireme.data import Bags, Batch
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.nn import EmbeddingBag
from trireme.table import RowClassId

KEYS = np.array([3, 5, 7, 9], np.uint64)
# Two features, four examples; key 3 occurs three times, in two features and twice in one bag.
BATCH = Batch(
    {"w": torch.tensor([1.0, -2.0, 0.5, 4.0])},
    Bags(("a", "b"), torch.tensor([3, 3, 5, 7, 3, 9]), torch.tensor([0, 2, 3, 3, 4, 5, 5, 6, 6])),
)


@pytest.fixture
def home():
    with embedded(threads=2) as cluster:
        set_default(cluster)
        yield cluster


def train(home: Cluster, rule: tr.optim.Rule, steps: int) -> np.ndarray:
    """The rows of KEYS after steps of the mean of w * (sum of all weights of both bags)."""
    table = tr.Table(
        "t",
        dim=2,
        optimizer=rule,
        initializer=tr.initializer.Constant(0.0),
        absent="zeros",
    )
    model = EmbeddingBag(table, features=["a", "b"])
    optimizer = tr.DistributedOptimizer(None, model, cluster=home)
    for _ in range(steps):
        loss = (model(BATCH).sum((1, 2)) * BATCH["w"]).mean()
        loss.backward()
        optimizer.step()
    return home.client.pull({T_ROWS: KEYS}).rows[T_ROWS].numpy()


# The sum of w over the occurrences of each key: bags of "a" are [3, 3], [5], [], [7], of "b" [3],
# [], [9], [].
SUMS = np.array([3.0, -2.0, 4.0, 0.5])
SHOWS = np.array([3, 1, 1, 1])


def test_fleets_sgd_undoes_the_mean_of_the_loss(home):
    rows = train(home, tr.optim.FleetSGD(lr=0.1), 1)
    np.testing.assert_allclose(rows[:, 0], -0.1 * SUMS, rtol=1e-6)
    np.testing.assert_array_equal(rows[:, 1], 0)  # the tail starts after the first update


def test_fleets_adagrad_divides_by_the_shows(home):
    rows = train(home, tr.optim.FleetAdagrad(lr=0.1, initial_g2sum=2.0), 2)
    g = SUMS / SHOWS
    np.testing.assert_allclose(rows[:, 0], -0.1 * g * (1 + np.sqrt(2.0 / (2.0 + g * g))), rtol=1e-6)
    np.testing.assert_allclose(rows[:, 1], -0.1 * g, rtol=1e-6)


@pytest.mark.parametrize("rule", [tr.optim.FleetSGD, tr.optim.FleetAdagrad])
def test_without_the_scale_a_gradient_is_that_of_the_loss(home, rule):
    rows = train(home, rule(lr=0.1, scale="loss"), 1)
    np.testing.assert_allclose(rows[:, 0], -0.1 * SUMS / 4, rtol=1e-6)


def test_several_workers_in_sync_cannot_have_the_scale(home):
    model = EmbeddingBag(tr.Table("t", dim=2, optimizer=tr.optim.FleetSGD()), features=["a", "b"])
    two = copy.copy(home)
    two.num_workers = 2
    with pytest.raises(BadRequest, match="expected scale='loss' for table 't' in sync with 2"):
        tr.DistributedOptimizer(None, model, strategy=tr.Strategy("sync"), cluster=two)


def test_workers_must_agree_on_the_scale():
    one, other = (
        tr.Table("t", dim=2, optimizer=tr.optim.FleetSGD(scale=s)) for s in ("loss", "fleet")
    )
    assert one.schema != other.schema


def test_absent_keys_answer_zeros_or_initial_weights_by_choice(home):
    for absent, expected in (("zeros", 0.0), ("initial", 0.5)):
        table = tr.Table(absent, dim=2, absent=absent, initializer=tr.initializer.Constant(0.5))
        home.client.create_table(table.schema)
        assert (
            home.client.pull({RowClassId(absent): KEYS}).rows[RowClassId(absent)].numpy()
            == expected
        ).all()
    with pytest.raises(BadRequest, match="expected absent as one of initial, zeros, found 'none'"):
        tr.Table("t", dim=1, absent="none")
