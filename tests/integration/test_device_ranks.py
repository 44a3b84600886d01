"""Passes on devices of several workers train to the bits of sync without passes; CPUs stand in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.test_device_passes import RULES, assert_equal
from tests.jobs import Job
from tests.long import sampled
from tests.ranks import run_ranks
from tests.tables import rows_of
from trireme.errors import BadRequest, DataError, Leased, Stopped, Unavailable
from trireme.interchange.worker_side.import_requests import importing
from trireme.job.cluster import Cluster
from trireme.server.state import ServerState
from trireme.train.modes.collective import byte_exchange

ROUNDS = 2
SHOWS = tr.policy.ShowClick("show", "label")
LENGTHS = (5, 0, 2)  # batches of the workers
STRATEGIES = {"bounded": tr.Strategy("bounded", staleness=2)}


class Net(nn.Module):
    def __init__(self, table: tr.Table) -> None:
        super().__init__()
        self.rows = tr.nn.EmbeddingBag(table, features=["a", "b"])
        self.top = nn.Linear(2 * table.dim, 1)
        with torch.no_grad():  # nothing is drawn: workers are threads here
            self.top.weight.copy_(torch.linspace(-0.3, 0.4, 2 * table.dim)[None])
            self.top.bias.fill_(0.1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(self.rows(batch).flatten(1)).squeeze(1)


class Data:
    """Each worker has batches of its own, of uneven sizes, the same in each epoch."""

    def __init__(self, seed: int, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.seed, self.lengths = seed, lengths

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        assert num_streams == len(self.lengths)
        drawn = torch.Generator().manual_seed(10 * self.seed + index)
        for number in range(self.lengths[index]):
            size = 5 + (number + index) % 4
            a, b = (torch.randint(0, 60, (size, 3), generator=drawn) for _ in range(2))
            label = (a.sum(1) % 2).float()
            yield {"a": a, "b": b, "label": label, "show": torch.ones(size)}


def make_trainer(cluster: Cluster, rule: Any, mode: str, **options: Any) -> tr.Trainer:
    policy = options.pop("policy", None)
    model = Net(tr.Table("keys", dim=4, optimizer=rule, policy=policy))
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), 0.01),
        strategy=STRATEGIES.get(mode) or tr.Strategy(mode),
        loss=nn.functional.binary_cross_entropy_with_logits,
        metrics=[tr.metrics.AUC()],
        progress=False,
        cluster=cluster,
        **options,
    )


def contents(states: list[ServerState]) -> dict[str, np.ndarray]:
    """Every byte of the rows, by key, and of the blocks, of all servers."""
    actual: dict[str, np.ndarray] = {}
    for state in states:
        for name, table in state.tables.items():
            for key, row in zip(*rows_of(table.rows), strict=True):
                actual[f"{name}:{key}"] = np.array(row)
        with state.blocks_lock:  # each of several workers looks
            for spec in state.blocks.specs():
                for tensor, values in state.blocks.state_with(spec.id, {}).items():
                    actual[f"{spec.id}:{tensor}"] = np.copy(values.numpy())
    return actual


Work = Callable[[Cluster], Any]


def on_servers(num_workers: int, work: Work) -> tuple[list[Any], dict[str, np.ndarray]]:
    with Job(2) as job:
        results = job.run(num_workers, work)
        return results, contents([server.state for server in job.servers])


def on_ranks(num_workers: int, work: Work) -> tuple[list[Any], dict[str, np.ndarray]]:
    held: dict[str, np.ndarray] = {}

    def with_contents(cluster: Cluster) -> Any:
        assert cluster.host is not None
        result = work(cluster)
        cluster.client.coordinator.gather({}, [])
        held.update(contents([cluster.host.state]))
        return result

    return run_ranks(num_workers, with_contents), held


def training(
    rule: Callable[[], Any],
    mode: str,
    *,
    in_passes: bool,
    lengths: tuple[int, ...] = LENGTHS,
    **options: Any,
) -> Work:
    def work(cluster: Cluster) -> Any:
        one = make_trainer(cluster, rule(), mode, **options)
        figures = []
        for number in range(ROUNDS):
            data = Data(number, lengths)
            with one.on_device(data) if in_passes else nullcontext():
                trained = one.fit(data, epochs=2)
                figures += [trained["loss"], trained["auc"], trained["examples"]]
                looked = one.evaluate(Data(7, lengths))
                figures += [looked["loss"], looked["auc"]]
        cluster.client.coordinator.gather({}, [])
        weights = {name: p.detach().numpy().copy() for name, p in one.model.named_parameters()}
        return figures, one.optimizer.num_steps, weights

    return work


def assert_same(actual: Any, expected: Any) -> None:
    for of_pass, of_sync in zip(actual[0], expected[0], strict=True):
        assert of_pass[0] == of_sync[0]
        assert_equal(of_pass[2], of_sync[2])
    assert_equal(actual[1], expected[1])


@sampled(keep=len(RULES))
@pytest.mark.parametrize("mode", ["sync", "collective"])
@pytest.mark.parametrize("rule", RULES)
def test_a_pass_of_three_workers_trains_to_the_bits_of_sync(rule: str, mode: str) -> None:
    expected = on_servers(3, training(RULES[rule], "sync", in_passes=False))
    assert len(expected[1]) > 50
    run = on_servers if mode == "sync" else on_ranks
    assert_same(run(3, training(RULES[rule], mode, in_passes=True)), expected)


@pytest.mark.parametrize("lengths", [(3, 4), (0, 3), (0, 0, 1), (4, 4, 3)])
def test_however_unequal_the_data_is_all_end(lengths: tuple[int, ...]) -> None:
    """Where three workers have batches, the order of sums shows."""
    num, rule = len(lengths), RULES["adagrad"]
    expected = on_servers(num, training(rule, "sync", in_passes=False, lengths=lengths))
    actual = on_servers(num, training(rule, "sync", in_passes=True, lengths=lengths))
    assert_same(actual, expected)
    assert {steps for _, steps, _ in actual[0]} == {max(lengths) * 2 * ROUNDS}


def test_rows_that_need_several_chunks_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = on_ranks(2, training(RULES["adam"], "collective", in_passes=True, lengths=(3, 5)))
    monkeypatch.setattr(byte_exchange, "CHUNK_BYTES", 100)
    actual = on_ranks(2, training(RULES["adam"], "collective", in_passes=True, lengths=(3, 5)))
    assert_same(actual, expected)


def test_servers_have_the_rows_of_the_beginning_until_the_end() -> None:
    with Job(2) as job:
        states = [server.state for server in job.servers]

        def work(cluster: Cluster) -> None:
            one = make_trainer(cluster, RULES["adagrad"](), "sync")
            one.fit(Data(0))
            cluster.client.coordinator.gather({}, [])
            before = contents(states)
            one.begin_pass(Data(1))
            one.fit(Data(1))
            assert_equal(contents(states), before)
            cluster.client.coordinator.gather({}, [])
            one.end_pass()
            assert contents(states).keys() > before.keys()

        job.run(3, work)


def test_evaluate_within_a_pass_sees_the_rows_of_all_workers() -> None:
    def work(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adagrad"](), "collective")
        with one.on_device(Data(0)):
            one.fit(Data(0), epochs=2)
            within = one.evaluate(Data(5))
        after = one.evaluate(Data(5))
        assert [within["loss"], within["auc"]] == [after["loss"], after["auc"]]

    on_ranks(3, work)


def test_a_worker_that_fails_ends_the_pass_for_all_and_another_may_follow() -> None:
    def work(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adagrad"](), "sync")
        one.fit(Data(0))
        cluster.client.coordinator.gather({}, [])
        one.optimizer.refresh()
        weights = one.model.top.weight.detach().clone()
        fails = cluster.worker == 2
        expected = (ZeroDivisionError, "on purpose") if fails else (Unavailable, "pass on devices")

        def fail(*_: object) -> None:
            raise ZeroDivisionError("on purpose")

        def train() -> None:
            with one.on_device(Data(1)):
                one.fit(Data(1))

        hook = one.model.register_forward_hook(fail) if fails else None
        with pytest.raises(expected[0], match=expected[1]):
            train()
        if hook is not None:
            hook.remove()
        torch.testing.assert_close(one.model.top.weight.detach(), weights, rtol=0, atol=0)
        with one.on_device(Data(1)):
            one.fit(Data(1))

    _, actual = on_servers(3, work)

    def undisturbed(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adagrad"](), "sync")
        for number in range(2):
            one.fit(Data(number))

    assert_equal(actual, on_servers(3, undisturbed)[1])


class Broken(Data):
    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        if index == 2:
            raise DataError("worker 2: no such file")
        return super().stream(index, num_streams, epoch=epoch)


def test_data_that_one_worker_cannot_read_is_an_error_of_all() -> None:
    def work(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adagrad"](), "sync")
        with pytest.raises(BadRequest, match="worker 2: no such file"):
            one.begin_pass(Broken(0))
        with one.on_device(Data(0)):
            one.fit(Data(0))
        assert one.optimizer.num_steps == max(LENGTHS)

    on_servers(3, work)


def test_keys_of_other_data_are_an_error_of_all() -> None:
    class Other(Data):
        def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
            for batch in super().stream(index, num_streams, epoch=epoch):
                yield {**batch, "a": batch["a"] + (1000 if index == 2 else 0)}

    def work(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adagrad"](), "sync")
        one.begin_pass(Data(0))
        with pytest.raises(BadRequest, match=r"found 10\d\d of table 'keys'"):
            one.fit(Other(0))
        one.abandon_pass()

    on_servers(3, work)


def test_what_others_would_change_within_a_pass_is_refused() -> None:
    def work(cluster: Cluster, *, has_import: bool) -> None:
        one = make_trainer(cluster, RULES["adagrad"](), "sync")
        one.begin_pass(Data(0))
        one.fit(Data(0))
        if cluster.worker == 1 and has_import:
            with (
                pytest.raises(Leased, match="pass 1 on a device of worker 0"),
                importing(cluster.client, ["keys"], replace=False),
            ):
                pass
        cluster.client.coordinator.gather({}, [])
        one.end_pass()
        if cluster.worker == 2 and has_import:
            with importing(cluster.client, ["keys"], replace=False):
                pass  # the end of the pass has ended its lease

    _, actual = on_servers(3, partial(work, has_import=True))
    _, expected = on_servers(3, partial(work, has_import=False))
    assert_equal(actual, expected)


def test_an_end_whose_answers_were_lost_takes_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers have installed it, and worker 0 does not know."""

    def work(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adam"](), "sync")
        one.begin_pass(Data(0))
        one.fit(Data(0))
        if cluster.worker == 0:
            servers = cluster.client.servers
            finish = servers.finish

            def losing(*arguments: Any, **options: Any) -> bool:
                servers.finish = finish  # type: ignore[method-assign]
                finish(*arguments, **options)
                raise Unavailable("the answer was lost")

            servers.finish = losing  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="the answer was lost"):
            one.end_pass()
        one.end_pass()
        one.fit(Data(1))

    _, actual = on_servers(3, work)

    def undisturbed(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adam"](), "sync")
        for number in range(2):
            one.fit(Data(number))

    assert_equal(actual, on_servers(3, undisturbed)[1])


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_modes_whose_steps_are_not_of_all_workers_are_refused(mode: str) -> None:
    def work(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adagrad"](), mode)
        with pytest.raises(BadRequest, match=f"'sync' or 'collective', found '{mode}'"):
            one.begin_pass(Data(0))

    on_servers(3, work)


class Dealt(Data):
    """Twelve batches, for any number of streams."""

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        for number in range(index, 12, num_streams):
            drawn = torch.Generator().manual_seed(100 * self.seed + number)
            a, b = (torch.randint(0, 60, (5, 3), generator=drawn) for _ in range(2))
            yield {"a": a, "b": b, "label": (a.sum(1) % 2).float()}


@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 2)])
def test_another_number_of_workers_goes_on_within_an_epoch_in_a_pass(
    tmp_path: Path, before: int, now: int
) -> None:
    """A worker has none of the streams of that epoch, or two."""

    def stop(cluster: Cluster) -> None:
        one = make_trainer(cluster, RULES["adam"](), "collective")

        def ask(*_: object) -> None:
            cluster.stop_request.reason = "enough" if one.optimizer.num_steps == 2 else ""

        one.optimizer.register_step_post_hook(ask)
        with pytest.raises(Stopped):
            one.fit(Dealt(0), checkpoints=tr.Checkpoints(tmp_path, every_steps=100))

    def go_on(begin: Callable[[tr.Trainer], Any]) -> Work:
        def work(cluster: Cluster) -> Any:
            one = make_trainer(cluster, RULES["adam"](), "collective")
            assert one.resume(tmp_path) is not None
            with begin(one):
                one.fit(Dealt(0))
            one.fit(Dealt(1))
            return [], one.optimizer.num_steps, {}

        return work

    on_ranks(before, stop)
    expected = on_ranks(now, go_on(lambda _: nullcontext()))
    assert_same(on_ranks(now, go_on(lambda one: one.on_device(Dealt(0)))), expected)
    assert_same(on_ranks(now, go_on(lambda one: one.in_window(2, "1MiB"))), expected)


def test_all_workers_stop_after_the_same_step() -> None:
    def work(cluster: Cluster) -> int:
        one = make_trainer(cluster, RULES["adagrad"](), "sync")
        one.begin_pass(Data(0, (6, 6)))
        made = []

        def ask(*_: object) -> None:
            made.append(one.optimizer.num_steps)
            if cluster.worker == 1 and len(made) == 3:
                cluster.stop_request.reason = "worker 1 was asked to"

        one.optimizer.register_step_post_hook(ask)
        with pytest.raises(Stopped, match="0"):
            one.fit(Data(0, (6, 6)))
        assert cluster.stop_request.reason == "worker 1 was asked to"
        one.abandon_pass()
        return len(made)

    assert on_servers(2, work)[0] == [4, 4]
