"""The system refuses a process another thread (ulimit -u, a pid cgroup): who needs it is told so,
and what can do without it goes on. Nothing is left half begun.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conditions import WAIT_S, wait_until
from tests.jobs import Job
from tests.property.test_recovery import Served
from trireme.bounded_queue import BoundedQueue
from trireme.errors import ResourceExhausted
from trireme.rpc import Deferred, Reply, Request, RpcClient, Server
from trireme.server.row_fetcher import RowFetcher
from trireme.server.row_tier import RowTier
from trireme.telemetry.http_server import HttpServer, RequestHandler
from trireme.train.loop.replica import Replica, train_replicas

Refuse = Callable[[str], None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """refuse(name): threads whose name has this in it cannot start, as CPython says it; "": no
    thread can, "-none-": all can.
    """
    start, refused = threading.Thread.start, ["-none-"]

    def start_some(thread: threading.Thread) -> None:
        if refused[-1] in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    return refused.append


@pytest.mark.parametrize("name", ["s-serve-0", "s-serve-2", "s-keep"])
def test_a_server_that_lacks_a_thread_leaves_none(refuse: Refuse, name: str) -> None:
    refuse(name)
    server = Server("127.0.0.1:0", {}, name="s")
    with pytest.raises(ResourceExhausted, match=r"one more thread.*ulimit -u"):
        server.start()
    assert [t.name for t in threading.enumerate() if t.name.startswith("s-")] == []
    refuse("-none-")
    again = Server(server.endpoint, {"ask": lambda _: Reply()}, name="s")  # its port is free
    with again, RpcClient(name="c") as client:
        client.call(again.endpoint, "ask", {}, timeout_s=WAIT_S)


@pytest.mark.parametrize(
    "error", [MemoryError("of a test"), RuntimeError("can't start new thread")]
)
def test_a_handler_that_lacks_memory_or_a_thread_is_no_bug(error: Exception) -> None:
    def fail(_: Request) -> Reply:
        raise error

    server = Server("127.0.0.1:0", {"ask": fail}, name="s")
    with server, RpcClient(name="c") as client, pytest.raises(ResourceExhausted):
        client.call(server.endpoint, "ask", {}, timeout_s=WAIT_S)


def test_a_queue_without_its_thread_can_be_closed(refuse: Refuse) -> None:
    refuse("reader")
    queue = BoundedQueue[int](1)
    with pytest.raises(ResourceExhausted, match="one more thread"):
        queue.start("reader", iter([1]))
    queue.close()
    assert queue.join(WAIT_S)


def test_memory_is_divided_later_and_no_change_fails(
    refuse: Refuse, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier, divided = RowTier(8 << 20, [tmp_path]), threading.Event()
    tier._divide_anew = lambda: bool(divided.set())  # type: ignore[method-assign,func-returns-value]
    refuse("")  # none
    for _ in range(2000):
        tier.note_push()
    assert tier.with_room(lambda: "changed") == "changed"
    assert "one more thread" in caplog.text
    refuse("-none-")
    for _ in range(2000):
        tier.note_push()
    assert divided.wait(WAIT_S)
    tier.close()


def test_rows_are_fetched_when_a_thread_is_to_be_had(refuse: Refuse) -> None:
    class Rows:
        fetched = threading.Event()

        def fetch(self, *_: Any) -> None:
            self.fetched.set()

    fetcher, wanted = RowFetcher(), [(Rows(), np.arange(3, dtype=np.uint64))]
    refuse("trireme-fetch")
    fetcher.announce(wanted)
    assert fetcher.num_dropped == 1
    assert fetcher.end() is None
    refuse("-none-")
    fetcher.announce(wanted)
    assert Rows.fetched.wait(WAIT_S)
    thread = fetcher.end()
    assert thread is not None
    thread.join(WAIT_S)


def test_a_change_that_waits_for_a_snapshot_needs_no_new_thread(
    refuse: Refuse, tmp_path: Path
) -> None:
    served = Served(tmp_path)
    refuse("")
    answers: list[object] = []
    with served.state.journal.replacing():
        deferred = served.state.journal.change_once(lambda: Reply({"changed": True}))
        assert isinstance(deferred, Deferred)
        deferred.bind(answers.append)
    wait_until(lambda: len(answers) > 0)
    assert isinstance(answers[0], Reply)
    assert answers[0].body == {"changed": True}
    served.close()


def test_metrics_are_answered_after_requests_that_found_no_thread(refuse: Refuse) -> None:
    class Handler(RequestHandler):
        def do_GET(self) -> None:
            self.answer(200, b"here", "text/plain")

    server = HttpServer("metrics", "127.0.0.1:0", Handler, threads_max=2)
    server.start()
    refuse("process_request_thread")
    for _ in range(3):
        with pytest.raises(ConnectionError):
            http_get(server)
    refuse("-none-")
    assert http_get(server) == b"here"
    server.stop()


def http_get(server: HttpServer) -> bytes:
    host, port = server.server_address[:2]
    connection = HTTPConnection(str(host), int(port), timeout=WAIT_S)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read()
    finally:
        connection.close()


def test_a_worker_that_lacks_its_heartbeat_leaves_no_connection(refuse: Refuse) -> None:
    before = open_clients()
    with Job(1) as job:
        refuse("trireme-heartbeat")
        with pytest.raises(ResourceExhausted, match="one more thread"):
            job.join(0, 1)
        assert open_clients() == before


def open_clients() -> int:
    clients = [one for one in gc.get_objects() if type(one) is RpcClient]  # not of dead proxies
    return sum(not client._is_closed for client in clients)


def test_training_threads_end_when_one_of_them_cannot_start(refuse: Refuse) -> None:
    replicas: Any = [object() for _ in range(3)]
    worked, failed = list[Replica](), list[Replica]()
    refuse("trireme-train-1")
    with pytest.raises(ResourceExhausted, match="one more thread"):
        train_replicas(replicas, worked.append, failed.append)
    assert failed == replicas[1:2]
    assert set(map(id, worked)) == {id(replicas[0]), id(replicas[2])}
