"""Passes of several workers whose next rows are read while they train: the bits of sync without
passes; what both passes need stays, and only the rest is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.integration.test_device_passes import RULES, assert_equal
from tests.integration.test_device_ranks import (
    LENGTHS,
    Data,
    Work,
    assert_same,
    make_trainer,
    on_ranks,
    on_servers,
)
from trireme.errors import BadRequest, DataError
from trireme.interchange.worker_side.import_requests import importing, send_rows
from trireme.job.cluster import Cluster
from trireme.train.modes.device_pass import pass_rows
from trireme.train.modes.device_ranks import next_keys
from trireme.worker import whole_rows

DAYS = 3


class Day(Data):
    """Its keys are 30 more than those of the day before."""

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        for batch in super().stream(index, num_streams, epoch=epoch):
            yield {**batch, "a": batch["a"] + 30 * self.seed, "b": batch["b"] + 30 * self.seed}

    def keys(self) -> set[int]:
        num = len(self.lengths)
        batches = [batch for index in range(num) for batch in self.stream(index, num)]
        return {int(key) for batch in batches for name in "ab" for key in batch[name].flatten()}


def days(lengths: tuple[int, ...]) -> list[Day]:
    return [Day(number, lengths) for number in range(DAYS)]


def training(
    rule: str, mode: str, lengths: tuple[int, ...], *, how: str, after_day: Any = None
) -> Work:
    """how: "plain", "passes", or passes "ahead", each of which reads for the next."""

    def work(cluster: Cluster) -> Any:
        one, figures, data = make_trainer(cluster, RULES[rule](), mode), [], days(lengths)
        for today, following in zip(data, [*data[1:], None], strict=True):
            within: Any = nullcontext()
            if how != "plain":
                within = one.on_device(today, following if how == "ahead" else None)
            with within:
                trained = one.fit(today, epochs=2)
                figures += [trained["loss"], trained["auc"], trained["examples"]]
            figures.append(one.evaluate(Data(7, lengths))["loss"])
            if after_day is not None:
                after_day(cluster)
        weights = {name: p.detach().numpy().copy() for name, p in one.model.named_parameters()}
        cluster.client.coordinator.gather({}, [])
        return figures, one.optimizer.num_steps, weights

    return work


@pytest.fixture
def numbers_read(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Gets the numbers of rows that each worker reads from the servers, one reading after the
    other.
    """
    numbers: dict[int, list[int]] = {}
    read = whole_rows.read_parts

    def counting(how: Any, keys: Any, *others: Any) -> Any:
        if len(keys):
            numbers.setdefault(how.client.worker, []).append(len(keys))
        return read(how, keys, *others)

    for module in (whole_rows, pass_rows):
        monkeypatch.setattr(module, "read_parts", counting)
    return numbers


@pytest.mark.parametrize("lengths", [(4,), (3, 4), LENGTHS])
def test_a_pass_that_follows_reads_what_the_one_before_lacks(
    numbers_read: dict[int, list[int]], lengths: tuple[int, ...]
) -> None:
    num = len(lengths)
    expected = on_servers(num, training("adam", "sync", lengths, how="plain"))
    runs: list[tuple[Callable[..., Any], str]] = [(on_servers, "sync"), (on_ranks, "collective")]
    for run, mode in runs:
        numbers_read.clear()
        assert_same(run(num, training("adam", mode, lengths, how="ahead")), expected)
        keys = [day.keys() for day in days(lengths)]
        totals = [sum(numbers) for numbers in zip(*numbers_read.values(), strict=True)]
        assert totals == [len(keys[0]), len(keys[1] - keys[0]), len(keys[2] - keys[1])]
        assert len(numbers_read) == num


@pytest.mark.parametrize("rule", ["shared_adagrad", "ftrl"])
def test_rows_that_stay_give_the_bits_of_rows_that_are_read(rule: str) -> None:
    expected = on_servers(3, training(rule, "sync", LENGTHS, how="passes"))
    assert_same(on_servers(3, training(rule, "sync", LENGTHS, how="ahead")), expected)


def test_keys_that_need_many_messages_arrive(
    numbers_read: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training has fewer messages than they need: the next pass begins with the rest."""
    expected = on_servers(3, training("adam", "sync", LENGTHS, how="plain"))
    monkeypatch.setattr(next_keys, "PART_KEYS", 1)
    numbers_read.clear()
    assert_same(on_servers(3, training("adam", "sync", LENGTHS, how="ahead")), expected)
    keys = [day.keys() for day in days(LENGTHS)]
    assert sum(map(sum, numbers_read.values())) == len(keys[0] | keys[1] | keys[2]) + len(
        keys[0] & keys[2] - keys[1]
    )


class Waiting(Day):
    """Worker 0 has batches until `goes_on`, and the others have none meanwhile."""

    goes_on: Callable[[], bool] = staticmethod(lambda: True)

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        yield from super().stream(index, num_streams, epoch=epoch)
        while index == 0 and not self.goes_on():
            yield from super().stream(index, num_streams, epoch=epoch)


def test_rows_are_read_while_the_pass_trains(numbers_read: dict[int, list[int]]) -> None:
    def work(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adam"](), "sync")
        today, following = Waiting(0, (2, 2)), Day(1, (2, 2))
        one.begin_pass(today, following)
        today.goes_on = lambda: all(len(numbers) == 2 for numbers in numbers_read.values())
        one.fit(today)
        assert [len(numbers) for numbers in numbers_read.values()] == [2, 2]
        one.end_pass()
        with one.on_device(following):
            one.fit(following)
        assert [len(numbers) for numbers in numbers_read.values()] == [2, 2]

    on_servers(2, work)


def test_what_others_change_between_is_read_again(numbers_read: dict[int, list[int]]) -> None:
    def change(cluster: Cluster) -> None:
        if cluster.worker == 1:
            with importing(cluster.client, ["keys"], replace=False) as id:
                rows = {"key": torch.arange(60).numpy().astype("uint64")}
                rows["weights"] = torch.ones(60, 4).numpy()
                send_rows(cluster.client, "keys", rows, time=0, pool=cluster.pool, id=id)
        cluster.client.coordinator.gather({}, [])

    expected = on_servers(3, training("sgd", "sync", LENGTHS, how="passes", after_day=change))
    numbers_read.clear()
    actual = on_servers(3, training("sgd", "sync", LENGTHS, how="ahead", after_day=change))
    assert_same(actual, expected)
    keys = [day.keys() for day in days(LENGTHS)]
    again = [len(keys[n]) + len(keys[n] - keys[n - 1]) for n in (1, 2)]
    assert sum(map(sum, numbers_read.values())) == len(keys[0]) + sum(again)


@pytest.mark.parametrize("who", [{1}, {0, 1, 2}])
def test_a_worker_may_begin_with_other_data_than_it_said(
    numbers_read: dict[int, list[int]], who: set[int]
) -> None:
    """All read again, whoever does."""

    def work(cluster: Cluster, *, changes: bool) -> None:
        one = make_trainer(cluster, RULES["adam"](), "sync")
        today, following = Day(0), Day(1)
        with one.on_device(today, following if changes else None):
            one.fit(today)
        other = Day(2) if cluster.worker in who else following
        with one.on_device(other):
            one.fit(other)

    _, expected = on_servers(3, lambda cluster: work(cluster, changes=False))
    num = sum(numbers[-1] for numbers in numbers_read.values())
    numbers_read.clear()
    _, actual = on_servers(3, lambda cluster: work(cluster, changes=True))
    assert_equal(actual, expected)
    assert sum(numbers[-1] for numbers in numbers_read.values()) == num


@pytest.mark.parametrize("who", [{0}, {1, 2}])
def test_data_that_follows_at_some_workers_alone_is_an_error_of_all(who: set[int]) -> None:
    def work(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adagrad"](), "sync")
        following = Data(1) if cluster.worker in who else None
        with pytest.raises(BadRequest, match=rf"found it at workers \[{str(sorted(who))[1:-1]}\]"):
            one.begin_pass(Data(0), following)
        one.fit(Data(0))

    _, actual = on_servers(3, work)

    def undisturbed(cluster: Cluster) -> None:
        make_trainer(cluster, RULES["adagrad"](), "sync").fit(Data(0))

    assert_equal(actual, on_servers(3, undisturbed)[1])


class Broken(Data):
    """error: of worker 2."""

    error: Exception = DataError("worker 2: no such file")

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        if index == 2:
            raise self.error
        return super().stream(index, num_streams, epoch=epoch)


def test_an_error_of_data_that_follows_is_raised_by_all_where_its_pass_begins() -> None:
    def work(cluster: Cluster) -> None:
        one, broken = make_trainer(cluster, RULES["adagrad"](), "sync"), Broken(1)
        with one.on_device(Data(0), broken):
            one.fit(Data(0))
        with pytest.raises(BadRequest, match="worker 2: no such file"):
            one.begin_pass(broken)
        with one.on_device(Data(2)):
            one.fit(Data(2))
        assert one.optimizer.num_steps == 2 * max(LENGTHS)

    on_servers(3, work)


class Endless(Data):
    """Worker 1 reads until the test is over. Threads that read it: `entered`."""

    def __init__(self, seed: int, is_over: threading.Event, entered: threading.Event) -> None:
        super().__init__(seed)
        self.is_over, self.entered = is_over, entered

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        while index == 1 and not self.is_over.is_set():
            self.entered.set()
            yield from super().stream(2, num_streams, epoch=epoch)
        yield from super().stream(index, num_streams, epoch=epoch)


@pytest.mark.parametrize("how", ["abandoned", "ended", "window"])
def test_a_pass_that_is_not_followed_stops_its_reading(how: str) -> None:
    """Two workers wait for the keys of one, which reads without an end."""
    is_over, entered = threading.Event(), threading.Event()

    def work(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adagrad"](), "sync")
        one.begin_pass(Data(0), Endless(1, is_over, entered))
        one.fit(Data(0))
        assert entered.wait(60)
        if how == "abandoned":
            one.abandon_pass()
            one.fit(Data(0))
        else:
            one.end_pass()
        within = one.in_window(2, "1MiB") if how == "window" else one.on_device(Data(2))
        with within:
            one.fit(Data(2))
        assert one.optimizer.num_steps == 2 * max(LENGTHS)

    try:
        on_servers(3, work)
    finally:
        is_over.set()


def test_evaluate_between_passes_may_find_that_rows_are_read_ahead() -> None:
    """What is looked up meanwhile are the rows of the servers, which have those of the end."""

    def work(cluster: Cluster) -> list[float]:
        one = make_trainer(cluster, RULES["adam"](), "sync")
        data, losses = days(LENGTHS), []
        for today, following in zip(data, [*data[1:], None], strict=True):
            with one.on_device(today, following):
                one.fit(today)
                losses.append(one.evaluate(Data(7))["loss"])
            assert one.evaluate(Data(7))["loss"] == losses[-1]
        return losses

    losses, _ = on_servers(3, work)
    assert losses[0] == losses[1] == losses[2]
    assert len(set(losses[0])) == DAYS
