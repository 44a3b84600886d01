"""Mode geo(k): workers train on a cache, and servers add each difference exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration import test_sync as exact
from tests.jobs import TIMEOUT_S, Job
from tests.own_batches import OwnBatches
from tests.tables import T_ROWS
from trireme import _core
from trireme.errors import BadRequest, ResourceExhausted
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.optim import rule_values, values_of_group
from trireme.strategy import Strategy
from trireme.train.modes.geo.window import RowCache
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import DenseGradient, PushHeader, TableGradient

DIM = 3
NUM_KEYS = 40


class Model(nn.Module):
    """The gradient of a row is the number of its occurrences; that of `top` the number of ids."""

    def __init__(self, rule: tr.optim.Rule | None = None, **options: Any) -> None:
        super().__init__()
        self.table = tr.Table("t", dim=DIM, optimizer=rule or tr.optim.SGD(lr=0.5), **options)
        self.rows = tr.nn.EmbeddingBag(self.table, features=["a"])
        self.top = nn.Parameter(torch.zeros(2))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.rows(batch).sum((1, 2)) + self.top.sum()


class Lists:
    """Per stream a list of batches, each of some keys."""

    def __init__(self, *streams: Sequence[Sequence[int]]) -> None:
        self.streams = streams

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[Any]:
        del num_streams, epoch
        for keys in self.streams[index]:
            yield {"a": torch.tensor(keys)}


def random_lists(seed: int, *lengths: int) -> Lists:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    sizes = [[rng.integers(1, 9) for _ in range(length)] for length in lengths]
    return Lists(*[[rng.integers(0, NUM_KEYS, n).tolist() for n in part] for part in sizes])


def make_optimizer(model: nn.Module, cluster: Cluster, k: int, **knobs: Any) -> Any:
    dense = torch.optim.SGD(model.parameters(), lr=0.25)
    strategy = Strategy("geo", k=k, **knobs)
    return tr.DistributedOptimizer(dense, model, strategy=strategy, cluster=cluster)


def train(
    cluster: Cluster, data: Lists, k: int, model: Model | None = None, **knobs: Any
) -> dict[str, Any]:
    """Sums as losses, so that gradients are known; returns what the servers have in the end."""
    model = model or Model()
    optimizer = make_optimizer(model, cluster, k, **knobs)
    for batch in tr.prefetch(data, model, cluster=cluster):
        model(batch).sum().backward()
        optimizer.step()
    cluster.client.coordinator.gather({}, [])
    optimizer.refresh()
    keys = np.arange(NUM_KEYS, dtype=np.uint64)
    rows = cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()
    counted = optimizer.mode.counters()
    cached = {"rows_cached": counted.pop("rows"), **counted}
    return {"rows": rows, "top": model.top.detach().numpy().copy(), **cached}


def initial_rows(model: Model) -> np.ndarray:
    with embedded(threads=1) as cluster:
        cluster.client.create_table(model.table.schema)
        return (
            cluster.client.pull({T_ROWS: np.arange(NUM_KEYS, dtype=np.uint64)}).rows[T_ROWS].numpy()
        )


def occurrences(data: Lists) -> np.ndarray:
    keys = [key for stream in data.streams for batch in stream for key in batch]
    return np.bincount(keys, minlength=NUM_KEYS)


@pytest.mark.parametrize(("name", "k"), [("sgd", 1), ("adagrad", 7), ("adam", 1), ("adam", 50)])
def test_one_worker_equals_training_without_servers(name: str, k: int) -> None:
    rule, strategy = exact.RULES[name], Strategy("geo", k=k)
    with Job(2) as job:
        [result] = job.run(1, lambda cluster: exact.train(cluster, rule, [0], strategy=strategy))
    before, after = exact.plain_torch(rule, streams=[0])
    for part, values in after.items():
        np.testing.assert_allclose(result[part], values, atol=exact.ATOL, rtol=0, err_msg=part)
        assert np.abs(values - before[part]).max() >= 100 * exact.ATOL


@pytest.mark.parametrize("lengths", [(30, 30), (31, 8), (0, 20), (20, 0)])
@pytest.mark.parametrize("k", [1, 4, 1000])
def test_all_gradients_of_two_workers_are_added_once(lengths: tuple[int, int], k: int) -> None:
    data = random_lists(k, *lengths)
    with Job(2) as job:
        results = job.run(2, lambda cluster: train(cluster, data, k))
    # SGD with gradients that do not depend on weights: the order of updates does not matter.
    counts = occurrences(data)
    expected = initial_rows(Model()) - 0.5 * counts[:, None]
    for result in results:
        np.testing.assert_allclose(result["rows"], expected, atol=1e-4, rtol=0)
        np.testing.assert_allclose(result["top"], -0.25 * counts.sum(), rtol=1e-5)


def test_a_row_is_fetched_again_in_every_window() -> None:
    """What the other worker does is seen within k steps, also of rows that stay in the cache."""
    data = Lists([[1], [2], [1], [2], [1]])
    model = Model()
    seen = []
    with Job(1) as job, job.join(0, 1) as cluster:
        optimizer = make_optimizer(model, cluster, 2)
        for number, batch in enumerate(tr.prefetch(data, model, cluster=cluster)):
            seen.append(first_weight(batch))
            step(optimizer, model, batch)
            if number == 1:
                add_as_another_worker(job, model, 1)
    first = initial_rows(model)[1, 0]
    np.testing.assert_allclose(seen[0::2], [first, first + 99.5, first + 99.0], rtol=1e-5)


def test_rows_of_the_next_batch_come_while_one_is_trained_on() -> None:
    [seen, first] = second_batch(lambda job, *_: add_as_another_worker(job, Model(), 2))
    assert seen == pytest.approx(first)


def test_rows_that_came_for_a_window_that_has_ended_come_again() -> None:
    def end_window(job: Job, optimizer: Any, model: Model, batch: Any) -> None:
        step(optimizer, model, batch)
        optimizer.flush()
        add_as_another_worker(job, model, 2)

    [seen, first] = second_batch(end_window)
    assert seen == pytest.approx(first + 100)


def test_rows_that_come_ahead_do_not_undo_a_step_made_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    with embedded(threads=1) as cluster:
        geo = make_optimizer(model, cluster, 10).mode.window
        pull = cluster.client.pull

        def pull_while_another_batch_is_trained_on(*arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(cluster.client, "pull", pull)
            pulled = pull(*arguments, **options)
            same = np.array([2], np.uint64)
            geo.touch({T_ROWS: same}, 0)
            values = values_of_group(model.table.optimizer.group(), 1)
            geo.step({T_ROWS: TableGradient(same, torch.ones(1, DIM), values)}, 1)
            return pulled

        one, two = ({T_ROWS: np.array([key], np.uint64)} for key in (1, 2))
        geo.touch(one, 0)
        monkeypatch.setattr(cluster.client, "pull", pull_while_another_batch_is_trained_on)
        geo.fetch(two, 0)
        geo.touch(two, 0)
        actual = geo.read(two).rows[T_ROWS][0, 0]
    assert actual == pytest.approx(initial_rows(model)[2, 0] - 0.5)


def second_batch(between: Callable[[Job, Any, Model, Any], None]) -> tuple[float, float]:
    """A weight of row 2 as its first batch sees it, the second of a window, and as it began.

    between: is called at the first batch, when row 2 has been fetched.
    """
    model, seen = Model(), []
    with Job(1) as job, job.join(0, 1) as cluster:
        optimizer = make_optimizer(model, cluster, 10)
        for batch in tr.prefetch(Lists([[1], [2]]), model, cluster=cluster):
            seen.append(first_weight(batch))
            if len(seen) == 1:
                deadline = time.monotonic() + TIMEOUT_S
                while not cluster.metrics.queues["pulled"]():
                    assert time.monotonic() < deadline
                between(job, optimizer, model, batch)
    return seen[1], initial_rows(model)[2, 0]


def first_weight(batch: Any) -> float:
    return float(next(iter(batch.lookups.values())).rows[0, 0].detach())


def step(optimizer: Any, model: Model, batch: Any) -> None:
    model(batch).sum().backward()
    optimizer.step()


def add_as_another_worker(job: Job, model: Model, key: int) -> None:
    delta = np.full((1, DIM), 100.0, np.float32)
    rows, values = job.servers[0].state.tables["t"].rows, values_of_model(model)
    keys, pool = np.array([key], np.uint64), _core.Pool(1)
    rows.update(keys, delta, [(9, 1)], values, pool, change="add")


def test_fresh_weights_before_a_windows_first_step_are_no_difference_of_it() -> None:
    """The batch is pulled before, and opens the window."""

    def work(cluster: Cluster) -> list[float]:
        model, data = Model(), Lists(*[[[1]] * 9] * 2)
        optimizer = make_optimizer(model, cluster, k=3)
        for number, batch in enumerate(tr.prefetch(data, model, cluster=cluster)):
            if number % 3 == 0:
                cluster.client.coordinator.gather({}, [])  # all pushes of the window before
                optimizer.refresh()
            model(batch).sum().backward()
            optimizer.step()
        cluster.client.coordinator.gather({}, [])
        optimizer.refresh()
        return model.top.tolist()

    with Job(1) as job:
        assert job.run(2, work) == [[-0.25 * 18] * 2] * 2


def test_one_worker_ends_with_the_same_bits_again() -> None:
    data = random_lists(7, 60)
    results = []
    for _ in range(2):
        with Job(2) as job:
            model = Model(tr.optim.Adam(lr=0.1))
            results += job.run(1, lambda cluster, model=model: train(cluster, data, 7, model))
    for part, values in results[0].items():
        np.testing.assert_array_equal(results[1][part], values, err_msg=part)


def values_of_model(model: Model) -> Any:
    return rule_values(values_of_group(model.table.optimizer.group(), 1))


def test_rows_leave_a_small_cache_and_nothing_of_them_is_lost_but_state() -> None:
    data = random_lists(3, 60)
    model = Model(tr.optim.Adagrad(lr=0.0, initial_accumulator_value=0.1))
    with Job(1) as job:
        row_bytes = 4 * (2 * DIM + DIM) + 160
        small = 12 * row_bytes
        [roomy] = job.run(1, lambda cluster: train(cluster, data, 5))
    with Job(1) as job:
        [tight] = job.run(1, lambda cluster: train(cluster, data, 5, cache_bytes=small))
    with Job(1) as job:
        [counted] = job.run(1, lambda cluster: train(cluster, data, 5, model, cache_bytes=small))
    np.testing.assert_allclose(tight["rows"], roomy["rows"], atol=1e-4)
    assert roomy["evicted"] == 0
    assert tight["evicted"] > 20
    assert tight["states_lost"] == 0  # of SGD there is none
    assert counted["states_lost"] == counted["evicted"] > 20
    assert tight["rows_cached"] <= 12


def test_the_least_recently_touched_leave_first() -> None:
    model = Model()
    with embedded(threads=1) as cluster:
        row_bytes = 4 * 2 * DIM + 160
        cache = RowCache([model.table], cluster.pool, 6 * row_bytes)

        def touch(*keys: int) -> None:
            actual = cache.find({T_ROWS: np.array(keys, np.uint64)})
            assert cache.make_room(actual)
            cache.touch(actual, {T_ROWS: np.zeros((len(actual[T_ROWS].missing), DIM), np.float32)})
            cache.end_window()

        for keys in [(1, 2, 3), (4, 5), (1,), (6, 7)]:
            touch(*keys)
        there = cache.tables[T_ROWS].touched_at(np.arange(8, dtype=np.uint64)) > 0
        assert there.tolist() == [False, True, False, True, True, True, True, True] or (
            there.sum() == 6 and there[[1, 4, 5, 6, 7]].all()
        )


def test_rows_that_leave_at_a_load_are_not_reported_as_too_many() -> None:
    model = Model(tr.optim.Adagrad(lr=0.1))
    with embedded(threads=1) as cluster:
        cache = RowCache([model.table], cluster.pool, 1 << 20)
        actual = cache.find({T_ROWS: np.arange(3, dtype=np.uint64)})
        assert cache.make_room(actual)
        cache.touch(actual, {T_ROWS: np.zeros((3, DIM), np.float32)})
        cache.end_window()
        cache.clear()
    assert (cache.num_evicted, cache.num_lost) == (3, 0)


def test_what_a_window_brought_is_looked_at_once_to_leave_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_batches, size, looked = 20, 5000, []
    with embedded(threads=1) as cluster:
        cache = RowCache([Model().table], cluster.pool, 0)
        rows = cache.tables[T_ROWS]
        cache.budget = num_batches * size * rows.row_bytes
        touched_at = rows.touched_at

        def counting(keys: np.ndarray) -> np.ndarray:
            looked.append(len(keys))
            return touched_at(keys)

        monkeypatch.setattr(rows, "touched_at", counting)
        for number in range(2 * num_batches):
            keys = np.arange(number * size, (number + 1) * size, dtype=np.uint64)
            actual = cache.find({T_ROWS: keys})
            assert cache.make_room(actual)
            cache.touch(actual, {T_ROWS: np.zeros((size, DIM), np.float32)})
            if number == num_batches - 1:
                cache.end_window()
    assert cache.num_evicted == num_batches * size
    assert sum(looked) == num_batches * size


def test_real_memory_stays_within_the_budget() -> None:
    table = tr.Table("t", dim=16, optimizer=tr.optim.Adagrad(lr=0.1))
    budget = 24 << 20
    with embedded(threads=1) as cluster:
        cache = RowCache([table], cluster.pool, budget)
        rng = np.random.default_rng(1)
        for _ in range(60):
            keys = np.unique(rng.integers(0, 2**63, 5000).astype(np.uint64))
            actual = cache.find({T_ROWS: keys})
            assert cache.make_room(actual)
            cache.touch(actual, {T_ROWS: np.zeros((len(keys), 16), np.float32)})
            cache.end_window()
        assert cache.num_evicted > 50_000
        assert cache.tables[T_ROWS].num_bytes <= budget


def test_a_batch_beyond_the_budget_is_refused_with_both_numbers() -> None:
    data = Lists([list(range(20))])
    with Job(1) as job, pytest.raises(ResourceExhausted, match=r"found cache_bytes 1000"):
        job.run(1, lambda cluster: train(cluster, data, 5, cache_bytes=1000))


def test_a_delta_that_comes_twice_is_added_once_everywhere() -> None:
    with Job(2) as job, job.join(0, 1) as cluster:
        model = Model(tr.optim.Adam(lr=0.1))
        dense = torch.optim.Adam(model.parameters(), lr=0.1)
        cluster.client.create_table(model.table.schema)
        parameters = DenseParameters({"top": (model.top, 0)}, None)
        cluster.client.create_blocks("Adam", [{"lr": 0.1}], parameters)
        keys = np.arange(NUM_KEYS, dtype=np.uint64)
        before = cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()
        group = model.table.optimizer.group()
        delta = TableGradient(keys, torch.ones(NUM_KEYS, DIM), values_of_group(group, 1))
        top = DenseGradient({"top": torch.tensor([1.0, 2.0])}, [{"lr": 0.1}])
        for _ in range(3):
            cluster.client.push(PushHeader(1, 0, [], 1), {T_ROWS: delta}, top, kind="delta")
        pulled = cluster.client.pull({T_ROWS: keys}, blocks=True)
        np.testing.assert_allclose(pulled.rows[T_ROWS], before + 1)
        assert pulled.blocks is not None
        assert [list(values) for ids, values in pulled.blocks if ids] == [[1.0, 2.0]]
        del dense


def test_shows_and_clicks_are_counted_on_the_servers() -> None:
    policy = tr.policy.ScorePolicy(show_click=tr.policy.ShowClick("show", "click"))

    class Shown(Lists):
        def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[Any]:
            for batch in super().stream(index, num_streams, epoch=epoch):
                ones = torch.ones(len(batch["a"]))
                yield {**batch, "show": 2 * ones, "click": ones}

    data = Shown([[1, 2], [1, 3], [1, 1]])
    with Job(1) as job:
        job.run(1, lambda cluster: train(cluster, data, 2, Model(policy=policy)))
        rows, actual = job.servers[0].state.tables["t"].rows, np.empty((4, 2))
        rows.statistics(np.arange(4, dtype=np.uint64), actual, 0, False, _core.Pool(1))
    np.testing.assert_array_equal(actual, [[0, 0], [8, 4], [2, 1], [2, 1]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": tr.optim.FTRL()}, "expected another rule than FTRL for table 't'"),
        ({"policy": tr.policy.ScorePolicy(pulls_statistics=True)}, "without pulls_statistics"),
    ],
)
def test_tables_that_cannot_be_cached_are_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with embedded(threads=1) as cluster, pytest.raises(BadRequest, match=message):
        make_optimizer(Model(**options), cluster, 1)


def dense_adam(cluster: Cluster) -> tr.Trainer:
    """Its rows have no state."""
    model = exact.Model(exact.RULES["sgd"])
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.mse_loss,
        strategy=Strategy("geo", k=7),
        progress=False,
        cluster=cluster,
    )


def test_one_worker_resumes_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    batches = exact.stream_batches(0)[:40]
    keys = exact.keys_in_bucket_order()
    actual = []
    for goes_on in (False, True):
        with embedded(threads=1) as cluster:
            trainer = dense_adam(cluster)
            if goes_on:
                trainer.load(tmp_path / "saved")
            else:
                trainer.fit(OwnBatches(batches[:25]))
                trainer.save(tmp_path / "saved")
            trainer.fit(OwnBatches(batches[25:]))
            rows = cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()
            actual.append({"rows": rows, **trainer.model.dense_weights()})
    for part, values in actual[0].items():
        np.testing.assert_array_equal(actual[1][part], values, err_msg=part)


def test_all_workers_resume_with_the_dense_state_of_the_first(tmp_path: Path) -> None:
    def state_of(trainer: tr.Trainer) -> list[np.ndarray]:
        states = [
            trainer.optimizer.mode.setup.optimizer.state[p] for p in trainer.model.parameters()
        ]
        return [state[name].numpy().copy() for state in states for name in sorted(state)]

    def work(cluster: Cluster) -> tuple[list[np.ndarray], list[np.ndarray]]:
        trainer = dense_adam(cluster)
        trainer.fit(OwnBatches(exact.stream_batches(cluster.worker)[:20]))
        trainer.save(tmp_path / "saved")
        before = state_of(trainer)
        trainer.load(tmp_path / "saved")
        return before, state_of(trainer)

    with Job(2) as job:
        (first, first_again), (second, second_again) = job.run(2, work)
    for saved, other, *loaded in zip(first, second, first_again, second_again, strict=True):
        assert all(np.array_equal(saved, values) for values in loaded)
        assert saved.ndim == 0 or not np.array_equal(saved, other)


def test_a_scheduler_drives_the_dense_rates_that_the_worker_steps_with() -> None:
    with embedded(threads=1) as cluster:
        model = Model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = Strategy("geo", k=2)
        optimizer = tr.DistributedOptimizer(inner, model, strategy=strategy, cluster=cluster)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 1))
        actual = []
        for _ in range(3):
            model.top.sum().backward()
            optimizer.step(examples=1)
            scheduler.step()
            actual.append(model.top[0].item())
        assert actual == pytest.approx([-0.1, -0.1, -0.1])


def test_several_threads_are_refused() -> None:
    with embedded(threads=1) as cluster, pytest.raises(BadRequest, match="expected threads=1 in"):
        tr.Trainer(
            Model(), None, loss=torch.sum, strategy=Strategy("geo", k=1), threads=2, cluster=cluster
        )
