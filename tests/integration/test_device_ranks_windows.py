"""Windows of several workers on devices: streams within a fixed memory, to the bits of sync."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.test_device_passes import RULES, assert_equal
from tests.integration.test_device_ranks import (
    assert_same,
    contents,
    make_trainer,
    on_ranks,
    on_servers,
)
from tests.integration.test_device_windows import Two, memory_of_two_tables, stream
from tests.jobs import Job
from trireme.device import BlockLayout
from trireme.errors import BadRequest, ResourceExhausted
from trireme.job.cluster import Cluster
from trireme.train.modes.device_pass import window_rows
from trireme.train.modes.device_ranks.owned_window import OwnedWindow

LENGTHS = (12, 0, 9)  # ids come back after seven


class Data:
    """Batches of ids that move on, and of which some return after a while."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        drawn = torch.Generator().manual_seed(100 * self.seed + 10 * epoch + index)
        for number in range(LENGTHS[index]):
            ids = torch.randint(0, 25, (6, 2), generator=drawn) + 10 * (number % 7)
            yield {"a": ids[:, 0], "b": ids[:, 1], "label": (ids.sum(1) % 2).float()}


class Same(Data):
    """The same in every epoch."""

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        return super().stream(index, num_streams)


def memory_of(one: tr.Trainer, num_rows: int) -> int:
    [table] = one.optimizer.tables
    return num_rows * BlockLayout.of(table.schema).device_bytes


def training(
    rule: str, mode: str, num_rows: int | None, batches: int = 1, **options: Any
) -> Callable[[Cluster], Any]:
    """num_rows: of the window of each worker; None: without."""

    def work(cluster: Cluster) -> Any:
        one = make_trainer(cluster, RULES[rule](), mode, **options)
        figures = []
        for number in range(2):
            within = (
                nullcontext()
                if num_rows is None
                else one.in_window(batches, memory_of(one, num_rows))
            )
            with within:
                trained = one.fit(Data(number), epochs=2)
                looked = one.evaluate(Data(7))
                figures += [trained["auc"], trained["examples"], looked["loss"], looked["auc"]]
        cluster.client.coordinator.gather({}, [])
        one.optimizer.refresh()
        weights = {name: p.detach().numpy().copy() for name, p in one.model.named_parameters()}
        return figures, one.optimizer.num_steps, weights

    return work


@pytest.fixture(scope="module")
def of_sync() -> Any:
    return on_servers(3, training("adam", "sync", None))


@pytest.mark.parametrize(("num_rows", "batches"), [(20, 1), (24, 4), (1000, 8)])
def test_a_window_of_any_size_trains_to_the_bits_of_sync(
    monkeypatch: pytest.MonkeyPatch, of_sync: Any, num_rows: int, batches: int
) -> None:
    evicted, evict = [], window_rows.WindowBlock._evict

    def counting(self: Any, num: int, *arguments: Any) -> None:
        evicted.append(num)
        evict(self, num, *arguments)

    monkeypatch.setattr(window_rows.WindowBlock, "_evict", counting)
    assert_same(on_servers(3, training("adam", "sync", num_rows, batches)), of_sync)
    assert_same(on_ranks(3, training("adam", "collective", num_rows, batches)), of_sync)
    assert bool(evicted) == (num_rows < 100)


def test_owners_join_the_batches_to_come_only_where_rows_are_lacking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined, union = [], OwnedWindow._union

    def counting(self: OwnedWindow, batches: Any) -> Any:
        joined.append(self)
        return union(self, batches)

    monkeypatch.setattr(OwnedWindow, "_union", counting)

    def work(cluster: Cluster) -> tuple[int, int]:
        one = make_trainer(cluster, RULES["adagrad"](), "sync")
        with one.in_window(8, memory_of(one, 1000)):
            one.fit(Same(0))
            before = joined.count(one.optimizer.mode.rows)
            one.fit(Same(0))
            return before, joined.count(one.optimizer.mode.rows) - before

    counts, _ = on_servers(3, work)
    for before, later in counts:
        assert before > 0
        assert later == 0


def test_rows_with_statistics_leave_a_window_and_return() -> None:
    options = {"policy": tr.policy.ScorePolicy()}
    expected = on_servers(3, training("adagrad", "sync", None, **options))
    assert_same(on_servers(3, training("adagrad", "sync", 24, 2, **options)), expected)


def test_a_window_that_one_worker_has_no_room_in_is_an_error_of_all() -> None:
    def work(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adagrad"](), "sync")
        one.begin_window(2, memory_of(one, 4))
        with pytest.raises(ResourceExhausted, match=r"a batch of at most 4 rows .* times the"):
            one.fit(Data(0))
        one.abandon_pass()

    _, actual = on_servers(3, work)
    assert not any(name.startswith("keys:") for name in actual)


def accumulating(begin: Callable[[tr.Trainer], Any]) -> Callable[[Cluster], Any]:
    """A loop whose steps are of two batches of new ids; the last worker has fewer."""

    def work(cluster: Cluster) -> Any:
        one = make_trainer(cluster, RULES["adagrad"](), "sync")
        ids = torch.arange(12 * 16).view(16, 6, 2)[: (16, 12)[cluster.worker]] + 90 * cluster.worker
        batches = [{"a": i[:, 0], "b": i[:, 1], "label": (i.sum(1) % 4 < 2).float()} for i in ids]
        with begin(one):
            own = iter(batches)  # a list would have to be the same at all workers
            for number, batch in enumerate(tr.prefetch(own, one.model, cluster=cluster)):
                one.loss(one.model(batch), batch["label"]).backward()
                if number % 2:
                    one.optimizer.step()
                    one.model.zero_grad()
        cluster.client.coordinator.gather({}, [])
        one.optimizer.refresh()
        weights = {name: p.detach().numpy().copy() for name, p in one.model.named_parameters()}
        return [], one.optimizer.num_steps, weights

    return work


def test_a_step_of_several_batches_keeps_their_rows_in_a_window() -> None:
    expected = on_servers(2, accumulating(lambda _: nullcontext()))
    actual = on_servers(2, accumulating(lambda one: one.in_window(4, memory_of(one, 35))))
    assert_same(actual, expected)


def one_table_after_the_other(begin: Callable[[tr.Trainer], Any]) -> Callable[[Cluster], Any]:
    """A loop without a pipeline, whose first lookup is of one table alone."""

    def work(cluster: Cluster) -> Any:
        model = Two()
        nn.init.constant_(model.top.weight, 0.1)  # nothing is drawn: workers are threads here
        nn.init.constant_(model.top.bias, 0.1)
        one = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters(), 0.01),
            strategy=tr.Strategy("sync"),
            loss=nn.functional.binary_cross_entropy_with_logits,
            progress=False,
            cluster=cluster,
        )
        with begin(one):
            for batch in stream(cluster.worker, 8):
                one.loss(model(tr.data.Batch(batch)), batch["label"]).backward()
                one.optimizer.step()
                model.zero_grad()
        cluster.client.coordinator.gather({}, [])
        one.optimizer.refresh()
        weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        return [], one.optimizer.num_steps, weights

    return work


def test_a_loop_of_ones_own_looks_up_one_table_after_the_other_in_a_window() -> None:
    expected = on_servers(2, one_table_after_the_other(lambda _: nullcontext()))
    # An owner has at most 12 rows of a batch of each of three row classes.
    actual = on_servers(
        2,
        one_table_after_the_other(lambda one: one.in_window(2, memory_of_two_tables(one, 20))),
    )
    assert_same(actual, expected)


def test_an_abandoned_window_changes_nothing() -> None:
    with Job(2) as job:
        states = [server.state for server in job.servers]

        def work(cluster: Cluster) -> None:
            one = make_trainer(cluster, RULES["adagrad"](), "sync")
            one.fit(Data(0))
            cluster.client.coordinator.gather({}, [])
            before = contents(states)
            one.begin_window(2, memory_of(one, 24))
            one.fit(Data(1))
            one.abandon_pass()
            cluster.client.coordinator.gather({}, [])
            assert_equal(contents(states), before)
            cluster.client.coordinator.gather({}, [])
            one.fit(Data(2))

        job.run(3, work)


def test_workers_that_begin_different_things_are_told() -> None:
    def work(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adagrad"](), "sync")
        begin = one.begin_pass if cluster.worker else lambda _: one.begin_window(2, "1MiB")
        with pytest.raises(BadRequest, match="to begin the same"):
            begin(Data(0))
        one.fit(Data(0))

    on_servers(3, work)
