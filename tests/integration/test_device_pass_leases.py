"""While a pass or window on a device runs, nothing else changes rows; a worker that has left does
not hold others up, and cannot end its pass once they have changed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trireme as tr
from tests.conditions import wait_until
from tests.integration.durable_servers import DurableServers
from tests.integration.restarted_script import Model, make_trainer, one_stream
from tests.integration.test_device_pass_kills import SCRIPT, loaded
from tests.integration.test_device_passes import (
    RULES,
    assert_equal,
    contents,
    data,
    saved,
    trainer,
)
from tests.programs import Program, Template
from trireme import rpc
from trireme.checkpoint.worker_side.load import load_checkpoint
from trireme.errors import Fenced, Leased, NotReady, TriremeError
from trireme.interchange.worker_side.dense_blocks import read_blocks, write_blocks
from trireme.interchange.worker_side.import_requests import importing, send_rows
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.protocol.pass_lease import PassLease
from trireme.protocol.wire import Push, TablePush
from trireme.worker import passes
from trireme.worker.expiry_calls import remove, shrink

FAR = 10**6
"""A key that no data has."""
VALUES: dict[str, float | int] = {
    **dict.fromkeys(("weight_decay", "l1", "l2", "lower", "upper"), 0.0),
    "lr": 0.1,
    "eps": 1e-8,
    "beta1": 0.9,
    "beta2": 0.999,
    "step": 1,
}
"""Of a step of Adam."""
SILENCE_S = 6.0
"""Of a worker of these servers, until others may change its rows."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with embedded() as opened:
        set_default(opened)
        yield opened


def push_of(table: str, dim: int, sequence: int, *, stream: int = 7) -> Push:
    """A push of another worker, to one row."""
    keys, gradients = np.array([FAR], np.uint64), np.ones((1, dim), np.float32)
    return Push(
        stream=stream, sequence=sequence, incarnation=1, step=0, staged=False, computed_at=0,
        examples=1, position=(sequence,), time=0, map_version=2,
        tables=[TablePush(table, keys, gradients, VALUES)], blocks=None,
    )  # fmt: skip


class Other:
    """Another worker: a client of its own, whose pushes go to every server."""

    def __init__(self, servers: DurableServers, table: str, dim: int) -> None:
        self._servers, self._table, self._dim = servers, table, dim
        self._client, self._sequence = rpc.RpcClient(name="another worker"), 0

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _call(self, method: str, body: dict[str, Any], arrays: list[Any]) -> None:
        calls = [rpc.Call(a, method, body, arrays) for a in self._servers.addresses]
        for answer in self._client.call_all(calls, timeout_s=30.0, return_errors=True):
            if isinstance(answer, TriremeError):
                raise answer

    def push(self) -> None:
        body, arrays = push_of(self._table, self._dim, self._sequence + 1).to_wire()
        self._call("ps.push", body, arrays)
        self._sequence += 1

    def has_pushed(self) -> bool:
        """Push unless a worker has the rows that has not been silent for long enough."""
        try:
            self.push()
        except Leased:
            return False
        except NotReady as error:  # an import of the worker that has left is prepared
            self._drop((error.details or {})["import"])
            return False
        return True

    def _drop(self, id: str) -> None:
        """As any worker that is refused."""
        ask = rpc.Call(self._servers.addresses[0], "coord.decide", {"id": id, "commit": False}, [])
        [decision] = self._client.call_all([ask], timeout_s=30.0)
        assert decision.body["commit"] is False
        self._call("import.finish", {"id": id, "commit": False}, [])


def change_by_push(cluster: Cluster, _: Path) -> None:
    body, arrays = push_of("keys", 4, 1).to_wire()
    cluster.client.servers.call_all(
        [rpc.Call(cluster.client.servers.endpoints[0], "ps.push", body, arrays)], 10.0
    )


def change_by_import(cluster: Cluster, _: Path) -> None:
    with importing(cluster.client, ["keys"], replace=False) as id:
        rows = {"key": np.arange(3, dtype=np.uint64), "weights": np.ones((3, 4), np.float32)}
        send_rows(cluster.client, "keys", rows, time=0, pool=cluster.pool, id=id)


CHANGES: dict[str, Callable[[Cluster, Path], object]] = {
    "push": change_by_push,
    "import": change_by_import,
    "blocks": lambda c, _: write_blocks(c.client, read_blocks(c.client)[1]),
    "load": lambda c, path: load_checkpoint(c.client, path / "before"),
    "shrink": lambda c, _: shrink(c.client, time=0, day_over=True),
    "remove": lambda c, _: remove(c.client, "keys", np.arange(3, dtype=np.uint64)),
}


def begin(one: tr.Trainer, kind: str, batches: Any) -> None:
    if kind == "pass":
        one.begin_pass(batches)
    else:
        one.begin_window(2, "1MiB")


@pytest.mark.parametrize("kind", ["pass", "window"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_others_change_within_a_pass_is_refused_and_it_ends_well(
    cluster: Cluster, tmp_path: Path, change: str, kind: str
) -> None:
    one = trainer(RULES["adam"]())
    one.fit(data(0))
    one.save(tmp_path / "before")
    begin(one, kind, data(1))
    one.fit(data(1))
    with pytest.raises(Leased, match="pass 2 on a device of worker 0") as caught:
        CHANGES[change](cluster, tmp_path)
    assert caught.value.details == {"worker": 0, "incarnation": 1, "pass": 2}
    one.end_pass()
    actual = contents(cluster)
    CHANGES[change](cluster, tmp_path)  # after it, nothing is refused
    with embedded() as opened:
        set_default(opened)
        other = trainer(RULES["adam"]())
        other.fit(data(0))
        other.save(tmp_path / "other")
        other.fit(data(1))
        assert_equal(actual, contents(opened))


@pytest.mark.parametrize("kind", ["pass", "window"])
@pytest.mark.parametrize("end", ["abandon", "nothing trained", "failed beginning"])
def test_a_pass_that_gives_nothing_leaves_no_lease(
    cluster: Cluster, tmp_path: Path, end: str, kind: str
) -> None:
    one = trainer(RULES["adam"]())
    if end == "failed beginning":
        with pytest.raises(ZeroDivisionError):
            begin(one, "pass", Broken())
    else:
        begin(one, kind, data(0))
        if end == "abandon":
            one.fit(data(0))
            one.abandon_pass()
        else:
            one.end_pass()
    change_by_import(cluster, tmp_path)
    one.fit(data(0))


class Broken:
    def __iter__(self) -> Iterator[Any]:
        raise ZeroDivisionError


def test_a_worker_that_gave_up_without_reaching_a_server_goes_on(cluster: Cluster) -> None:
    one = trainer(RULES["adam"](), "async")
    one.begin_pass(data(0))
    cluster.client.release = lambda last: None  # type: ignore[method-assign]
    one.abandon_pass()
    assert cluster.server is not None
    assert cluster.server.leases.is_held
    one.fit(data(0))
    assert not cluster.server.leases.is_held


def test_a_pull_of_others_does_not_end_an_import_that_ends_a_pass(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(RULES["adam"]())
    one.begin_window(2, "1MiB")
    one.fit(data(0))
    decide, refused = passes.end_device_pass, []

    def decide_later(*arguments: Any) -> bool:
        assert cluster.server is not None
        with pytest.raises(NotReady) as caught:
            cluster.server.check_settled()
        refused.append(caught.value.details)
        return decide(*arguments)

    monkeypatch.setattr(passes, "end_device_pass", decide_later)
    one.end_pass()
    assert refused == [None]  # without the id: nobody else decides


def test_delayed_calls_of_an_earlier_pass_neither_end_nor_bring_back_a_lease(
    cluster: Cluster,
) -> None:
    one = trainer(RULES["adam"]())
    state = cluster.server
    assert state is not None
    with one.on_device(data(0)):
        one.fit(data(0))
    with pytest.raises(Fenced, match="expected a pass after pass 1"):
        state.lease(PassLease(0, 1, 1))
    with one.on_device(data(0)):
        state.release(PassLease(0, 1, 1))
        with pytest.raises(Leased):
            state.lease(PassLease(1, 5, 9))
        one.fit(data(0))
        state.lease(PassLease(0, 1, 2))  # sent twice
    assert not state.leases.is_held


# ---- processes ----


def test_a_pass_that_one_server_refuses_leaves_no_lease_at_the_others(
    programs: Template, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        servers = stack.enter_context(DurableServers(programs, 2, tmp_path))
        cluster = stack.enter_context(servers.join(0, 1))
        set_default(cluster)
        one = trainer(RULES["adam"]())
        client, lease = rpc.RpcClient(name="another worker"), PassLease(5, 1, 1).to_wire()
        stack.callback(client.close)
        for address in reversed(servers.addresses):
            client.call_all([rpc.Call(address, "ps.lease", lease, [])], timeout_s=30.0)
            with pytest.raises(Leased, match="pass 1 on a device of worker 5"):
                one.begin_pass(data(0))
        for address in servers.addresses:
            client.call_all([rpc.Call(address, "ps.release", lease, [])], timeout_s=30.0)
        with one.on_device(data(0)):
            one.fit(data(0))


def lasting(programs: Template, folder: Path) -> DurableServers:
    return DurableServers(programs, 2, folder, timeout_s=SILENCE_S)


def test_servers_restarted_within_a_pass_still_refuse_others(
    programs: Template, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        servers = stack.enter_context(DurableServers(programs, 2, tmp_path))
        cluster = servers.join(0, 1)
        set_default(cluster)
        one = trainer(RULES["adam"]())
        one.fit(data(0))
        one.begin_pass(data(1))
        one.fit(data(1))
        for server in (0, 1):
            servers.kill(server)
            servers.start(server)
        other = stack.enter_context(Other(servers, "keys", 4))
        with pytest.raises(Leased, match="pass 2 on a device of worker 0"):
            other.push()
        one.end_pass()
        actual = saved(one, tmp_path / "ended")
        other.push()
        cluster.close()
    with embedded() as opened:
        set_default(opened)
        expected = trainer(RULES["adam"]())
        for number in range(2):
            expected.fit(data(number))
        assert_equal(actual, contents(opened))


def start_worker(programs: Template, servers: DurableServers, hold: str) -> Program:
    env = {
        "TRIREME_TIMEOUT_S": f"{SILENCE_S:g}",
        "TRIREME_THREADS": "1",
        "TRIREME_ROLE": "worker",
        "TRIREME_SERVERS": ",".join(servers.addresses),
        "TRIREME_INDEX": "0",
        "TRIREME_NUM_WORKERS": "1",
    }
    return programs.start("worker", [SCRIPT, str(servers.folder), "--passes", "--hold", hold], env)


def rows_before_the_last_pass() -> dict[str, np.ndarray]:
    with embedded() as cluster:
        torch.manual_seed(0)
        one = make_trainer("sync", Model(tr.optim.Adam(lr=0.05)), cluster)
        one.fit(one_stream(0), epochs=2)
        one.fit(one_stream(0))
        return contents(cluster)


def test_the_lease_of_a_killed_worker_ends_and_rows_are_those_of_the_beginning(
    programs: Template, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        servers = stack.enter_context(lasting(programs, tmp_path))
        other = stack.enter_context(Other(servers, "t", 3))
        with start_worker(programs, servers, "end_device_pass:2:before") as worker:
            worker.wait_line("^held$")  # its import is prepared everywhere
            with pytest.raises(Leased, match="pass 3 on a device of worker 0"):
                other.push()
            worker.kill()
        wait_until(other.has_pushed)
        cluster = stack.enter_context(servers.join(0, 1))
        one = make_trainer("sync", Model(tr.optim.Adam(lr=0.05)), cluster)
        for epochs in (2, 1):  # the killed process has made them
            assert not one.fit(one_stream(0), epochs=epochs)["examples"] > 0
        one.begin_pass(one_stream(1))
        one.abandon_pass()
        one.save(tmp_path / "now")
    actual = loaded(tmp_path / "now")
    assert actual.pop(f"t:{FAR}").any()
    assert_equal(actual, rows_before_the_last_pass())


def test_a_silent_worker_loses_its_lease_to_others_and_cannot_end_its_pass(
    programs: Template, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        servers = stack.enter_context(lasting(programs, tmp_path))
        other = stack.enter_context(Other(servers, "keys", 4))
        cluster = servers.join(0, 1, timeout_s=SILENCE_S)
        set_default(cluster)
        one = trainer(RULES["adam"]())
        one.fit(data(0))
        before = saved(one, tmp_path / "before")
        one.begin_pass(data(1))
        one.fit(data(1))
        with pytest.raises(Leased):
            other.push()
        heartbeat = cluster._heartbeat
        assert heartbeat is not None
        heartbeat.stop()  # as of a process that was stopped, or is cut off
        wait_until(other.has_pushed)
        for server in (0, 1):
            servers.kill(server)
            servers.start(server)
        with pytest.raises(Fenced, match="pass 2 on a device of worker 0: expected its lease"):
            one.end_pass()
        one.abandon_pass()
        actual = saved(one, tmp_path / "after")
        one.fit(data(1))
        cluster.close()
    assert actual.pop(f"keys:{FAR}").any()
    assert_equal(actual, before)
