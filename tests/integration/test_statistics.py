"""Shows, clicks, features and data time travel from batches to the rows of servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import trireme as tr
from tests.jobs import Job
from tests.own_batches import OwnBatches
from tests.tables import T_ROWS, rows_of
from trireme import _core
from trireme.data import Ragged
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.nn import CVM, EmbeddingBag
from trireme.optim import values_of_group
from trireme.policy import CtrCommonAccessor, ScorePolicy, ShowClick, SparseAccessor
from trireme.rows.row_statistics import DAY_S as DAY
from trireme.rows.wide_rows import RowLayout
from trireme.server.state import ServerState
from trireme.worker.gradients import PushHeader, TableGradient

FEATURES = ["2", "17", "user"]
NUM_KEYS = 40
SHOW_CLICK = ShowClick("show", "click")

Rows = dict[int, tuple[float, ...]]


def table_with(policy: ScorePolicy, rule: tr.optim.Rule | None = None) -> tr.Table:
    return tr.Table(
        "t",
        dim=2,
        optimizer=tr.optim.SGD(lr=0.1) if rule is None else rule,
        initializer=tr.initializer.Constant(0.0),
        policy=policy,
    )


def batches_of(stream: int, number: int) -> list[dict[str, torch.Tensor]]:
    """Keys that repeat within a batch and across workers; bags of two for one feature."""
    rng = np.random.default_rng([11, stream])
    batches = []
    for _ in range(number):
        size = int(rng.integers(1, 9))
        batch = {f: torch.from_numpy(rng.integers(0, NUM_KEYS, size)) for f in FEATURES[:2]}
        batch["user"] = torch.from_numpy(rng.integers(0, NUM_KEYS, (size, 2)))
        batch["show"] = torch.from_numpy(rng.integers(0, 5, size))
        batch["click"] = torch.from_numpy(rng.integers(0, 2, size).astype(np.float32))
        batches.append(batch)
    return batches


def shows_of(
    batches: list[dict[str, torch.Tensor]], *, names: ShowClick | None
) -> dict[int, list[float]]:
    """What rows must have gathered, in plain Python."""
    rows: dict[int, list[float]] = {}
    for batch in batches:
        for name in FEATURES:
            for b, ids in enumerate(batch[name].reshape(len(batch["show"]), -1).tolist()):
                for key in ids:
                    row = rows.setdefault(key, [0.0, 0.0])
                    row[0] += float(batch[names.show][b]) if names and names.show else 1.0
                    row[1] += float(batch[names.click][b]) if names else 0.0
    return rows


def statistics(states: list[ServerState]) -> dict[int, Any]:
    """Key -> statistics of its row, over all servers."""
    actual = {}
    for state in states:
        table = state.tables["t"]
        layout = RowLayout.of(table.schema, table.rows)
        keys, rows = rows_of(table.rows)
        actual.update(zip(keys.tolist(), layout.statistics(rows), strict=True))
    return actual


def train(
    cluster: Cluster, table: tr.Table, batches: list[dict[str, torch.Tensor]], mode: str
) -> None:
    model = EmbeddingBag(table, features=FEATURES)
    optimizer = tr.DistributedOptimizer(None, model, strategy=tr.Strategy(mode), cluster=cluster)

    optimizer.set_time(3 * DAY)
    for batch in tr.prefetch(OwnBatches(batches), model, cluster=cluster):
        model(batch).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("names", [SHOW_CLICK, ShowClick(None, "click"), None])
@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize(("mode", "num_workers"), [("sync", 1), ("sync", 2), ("async", 2)])
def test_rows_gather_the_shows_and_clicks_of_all_workers(
    mode: str, num_workers: int, num_servers: int, names: ShowClick | None
) -> None:
    table = table_with(SparseAccessor(show_click=names))
    streams = [batches_of(worker, 12 - worker) for worker in range(num_workers)]
    with Job(num_servers) as job:
        job.run(num_workers, lambda c: train(c, table, streams[c.worker], mode))
        actual = statistics([server.state for server in job.servers])
    everything = [batch for batches in streams for batch in batches]
    expected = shows_of(everything, names=names)
    assert {key: [row["show"], row["click"]] for key, row in actual.items()} == expected
    assert {row["time"] for row in actual.values()} == {3 * DAY}
    for key, row in actual.items():
        policy, (show, click) = table.policy, expected[key]
        score = (show - click) * policy.nonclk_coeff + click * policy.click_coeff
        assert row["delta_score"] == pytest.approx(score, rel=1e-5)
        features = {f for f in FEATURES if any((batch[f] == key).any() for batch in everything)}
        assert row["feature"] in {{"2": 2, "17": 17, "user": 2}[f] for f in features}


@pytest.mark.parametrize("rule", [tr.optim.FleetAdagrad, tr.optim.FleetSGD])
def test_fleets_scale_in_sync_is_that_of_the_union_of_the_batches(
    rule: type[tr.optim.FleetRule],
) -> None:
    table = table_with(SparseAccessor(show_click=SHOW_CLICK), rule(lr=0.1))
    streams = [batches_of(worker, 10) for worker in range(2)]
    union = [
        {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        for parts in zip(*streams, strict=True)
    ]

    def rows(num_servers: int, data: list[list[dict[str, torch.Tensor]]]) -> np.ndarray:
        def work(cluster: Cluster) -> np.ndarray:
            train_on_means(cluster, table, data[cluster.worker])
            cluster.client.coordinator.gather({}, [])
            return cluster.client.pull({T_ROWS: keys_of(cluster)}).rows[T_ROWS].numpy()

        with Job(num_servers) as job:
            return job.run(len(data), work)[0]

    alone = rows(1, [union])
    assert np.abs(alone).max() > 0.01
    np.testing.assert_array_equal(rows(1, streams), rows(2, streams))
    np.testing.assert_allclose(rows(2, streams), alone, atol=1e-5)


def keys_of(cluster: Cluster) -> np.ndarray:
    keys: np.ndarray = _core.unique(np.arange(NUM_KEYS, dtype=np.uint64), cluster.pool)[0]
    return keys


def train_on_means(
    cluster: Cluster, table: tr.Table, batches: list[dict[str, torch.Tensor]]
) -> None:
    model = EmbeddingBag(table, features=FEATURES)
    optimizer = tr.DistributedOptimizer(None, model, strategy=tr.Strategy("sync"), cluster=cluster)
    weights = torch.linspace(-1, 1, 3)[:, None]

    for batch in tr.prefetch(OwnBatches(batches), model, cluster=cluster):
        loss = ((model(batch) * weights).sum((1, 2)) * (batch["show"] - 2.0)).mean()
        loss.backward()
        optimizer.step()


def test_a_resent_push_counts_once_and_time_never_decreases() -> None:
    table = table_with(ScorePolicy(decay_rate=0.5))
    values = values_of_group(table.optimizer.group(), 1)

    def work(cluster: Cluster) -> None:
        cluster.client.create_table(table.schema)
        keys = keys_of(cluster)
        gradient = torch.zeros(NUM_KEYS, 2)
        shows = np.full((NUM_KEYS, 2), [4, 1], np.float32)
        features = np.full(NUM_KEYS, 7, np.uint32)
        push = TableGradient(keys, gradient, values, {"show_click": shows, "feature": features})
        for sequence, time in enumerate((2 * DAY, 3 * DAY, 2 * DAY, 0), 1):
            for _ in range(3):
                cluster.client.push(
                    PushHeader(sequence, 0, [], examples=1, time=time), {T_ROWS: push}
                )

    with Job(2) as job:
        job.run(1, work)
        actual = statistics([server.state for server in job.servers])
    # Half of the first day's shows are left on the second; what comes late counts as of that day.
    assert len(actual) == NUM_KEYS
    for row in actual.values():
        assert (row["show"], row["click"], row["time"]) == (14.0, 3.5, 3 * DAY)
        assert row["feature"] == 7


@pytest.fixture
def home() -> Iterator[Cluster]:
    with embedded(threads=2) as cluster:
        set_default(cluster)
        yield cluster


BATCH = {
    "2": torch.tensor([5, 6, 5]),
    "show": torch.tensor([3, 2, 1]),
    "click": torch.tensor([1, 0, 1]),
}


def test_pulled_shows_and_clicks_come_first_and_are_not_learnt(home: Cluster) -> None:
    policy = CtrCommonAccessor(show_click=SHOW_CLICK, decay_rate=0.5, embedx_threshold=None)
    embedding = EmbeddingBag(table_with(policy), features=["2"])
    assert (embedding.table.dim, embedding.table.width) == (2, 4)
    optimizer = tr.DistributedOptimizer(None, embedding, cluster=home)
    counts = torch.stack([BATCH["show"], BATCH["click"]], 1).float()
    optimizer.set_time(DAY)
    for pulled in (0.0, 4.0):
        rows = embedding(BATCH)
        assert rows[0, 0, 0] == pulled
        CVM()(rows, counts).sum().backward()
        optimizer.step()
    optimizer.set_time(3 * DAY)
    rows = embedding.eval()(BATCH)[:, 0]
    assert rows[:, :2].tolist() == [[2.0, 1.0], [1.0, 0.0], [2.0, 1.0]]  # a quarter is left
    np.testing.assert_allclose(rows[:, 2:], [[-0.4, -0.4], [-0.2, -0.2], [-0.4, -0.4]], rtol=1e-6)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (None, "in the batch, found 2, click"),
        (torch.tensor([1.0, 2.0]), r"for each of 3 examples, found \(2,\)"),
        (torch.tensor([1.0, -2.0, 1.0]), "finite numbers >= 0, found -2.0"),
        (torch.tensor([1.0, torch.nan, 1.0]), "finite numbers >= 0, found nan"),
        (Ragged(torch.tensor([1, 2]), torch.tensor([0, 1, 2, 2])), "found Ragged"),
    ],
)
def test_a_column_of_shows_that_is_none_is_named(home: Cluster, column: Any, message: str) -> None:
    embedding = EmbeddingBag(table_with(SparseAccessor(show_click=SHOW_CLICK)), features=["2"])
    batch = {name: value for name, value in {**BATCH, "show": column}.items() if value is not None}
    with pytest.raises(BadRequest, match=f"column 'show' of its ShowClick .*{message}"):
        embedding(batch)
    embedding.eval()(batch)  # needs none


def test_expired_rows_are_removed_once(home: Cluster) -> None:
    policy = ScorePolicy(decay_rate=0.5, delete_threshold=0.2, show_click=SHOW_CLICK)
    model = EmbeddingBag(table_with(policy), features=["2"])
    trainer = tr.Trainer(model, None, loss=lambda x, _: x.sum(), label=None, progress=False)
    trainer.set_time(DAY)
    trainer.fit([BATCH])
    # Scores: key 5 has 4 shows, 2 of them clicked: 2.2; key 6 has 2 shows: 0.2.
    assert trainer.shrink(day_over=False) == {"t": {"expired": 0, "evicted": 0}}
    for expired in (1, 0):
        assert trainer.shrink() == {"t": {"expired": expired, "evicted": 0}}
    trainer.set_time(4 * DAY)
    assert trainer.shrink(day_over=False)["t"]["expired"] == 0  # 2.2 / 8
    assert trainer.shrink()["t"]["expired"] == 1
    counted = {"t": {"admitted": 2, "rejected": 0, "expired": 2, "evicted": 0}}
    assert trainer.counters() == counted
    rows = {"key": np.array([7], np.uint64), "weights": np.zeros((1, 2), np.float32)}
    for _ in range(2):  # other rows, of which nothing is counted
        tr.interchange.import_arrays(trainer, "t", rows, replace=True)
        assert trainer.counters() == counted


def test_the_clock_on_the_wall_is_time_only_if_asked_for(home: Cluster) -> None:
    model = EmbeddingBag(table_with(ScorePolicy(show_click=SHOW_CLICK)), features=["2"])
    trainer = tr.Trainer(model, None, loss=lambda x, _: x.sum(), label=None, progress=False)
    assert trainer.optimizer.data_time.seconds() == 0
    clock = iter([5.5, 7.0, 9.9])
    trainer.set_time(lambda: next(clock))
    assert [trainer.optimizer.data_time.seconds() for _ in range(2)] == [7, 9]
    for wrong in (-1, 2**32, True):
        with pytest.raises(BadRequest, match=r"seconds since 1970, 0 to 4294967295, .* found"):
            trainer.set_time(wrong)


def test_rows_that_cannot_age_without_data_time_are_warned_about(
    home: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    model = EmbeddingBag(table_with(SparseAccessor(show_click=SHOW_CLICK)), features=["2"])
    trainer = tr.Trainer(model, None, loss=lambda x, _: x.sum(), label=None, progress=False)
    trainer.shrink()
    assert "the data has no time, so rows of t do not decay or expire" in caplog.text
