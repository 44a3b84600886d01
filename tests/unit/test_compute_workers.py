"""The compute workers of a label, as one worker sees them: credits, refusals, deadlines."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from trireme.errors import (
    BadRequest,
    DeadlineExceeded,
    ResourceExhausted,
    TriremeError,
    Unavailable,
)
from trireme.rpc import Call, Deferred, Limits, Reply, Request, RpcClient, Server
from trireme.train.compute import compute_workers
from trireme.train.compute.compute_workers import READY, ComputeWorkers


class Peer:
    """A compute worker of a test: it holds every call until it is told an answer."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.calls: queue.SimpleQueue[Deferred] = queue.SimpleQueue()
        self.deadline = 0.0  # of the last call
        self.refusal: TriremeError | None = None
        self.server = Server(
            "127.0.0.1:0",
            {"run": self._on_run, READY: lambda _: Reply()},
            name="peer",
            limits=limits,
        ).start()

    def _on_run(self, request: Request) -> Deferred:
        self.deadline = request.deadline
        if self.refusal is not None:
            raise self.refusal
        answer = Deferred()
        self.calls.put(answer)
        return answer


@contextmanager
def workers_of(
    *addresses: str, timeout_s: float = 30.0, first: int = 0
) -> Iterator[ComputeWorkers]:
    workers = ComputeWorkers(
        "gpu",
        addresses,
        first=first,
        connect=lambda: RpcClient(name="worker 0"),
        timeout_s=timeout_s,
    )
    yield workers
    workers.close()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    peers = [Peer(), Peer()]
    yield peers
    for peer in peers:
        peer.server.stop()


def refused() -> ResourceExhausted:
    error = ResourceExhausted("full")
    error.details = {"full": True}
    return error


def calling(workers: ComputeWorkers, num: int) -> list[threading.Thread]:
    threads = [
        threading.Thread(target=workers.call, args=("run", {}, []), daemon=True) for _ in range(num)
    ]
    for thread in threads:
        thread.start()
    return threads


def test_batches_go_to_the_one_with_the_least_in_flight(peers: list[Peer]) -> None:
    addresses = [peer.server.endpoint for peer in peers]
    with workers_of(*addresses, first=1) as workers:
        threads = calling(workers, 1)
        held = [peers[1].calls.get(timeout=30)]  # the one that it prefers
        threads += calling(workers, 1)
        held.append(peers[0].calls.get(timeout=30))
        assert workers.use(credits=2).in_flight == 2  # one at each
        for answer in held:
            answer.reply(Reply())
        for thread in threads:
            thread.join(30)
        assert workers.use(credits=2).in_flight == 0


def test_a_full_one_is_passed_over(peers: list[Peer]) -> None:
    peers[0].refusal = refused()
    with workers_of(*(peer.server.endpoint for peer in peers)) as workers:
        [thread] = calling(workers, 1)
        peers[1].calls.get(timeout=30).reply(Reply())
        thread.join(30)


def test_one_that_may_hold_no_more_requests_is_passed_over(peers: list[Peer]) -> None:
    """As one whose requests have all the bytes that they may have."""
    peers[0].server.stop()
    peers[0] = Peer(Limits(total_requests_max=1))
    with workers_of(*(peer.server.endpoint for peer in peers), timeout_s=200.0) as workers:
        threads = [*calling(workers, 1)]
        held = [peers[0].calls.get(timeout=30)]
        for _ in range(2):  # the third is refused by the first one
            threads += calling(workers, 1)
            held.append(peers[1].calls.get(timeout=30))
        for answer in held:
            answer.reply(Reply())
        for thread in threads:
            thread.join(30)


def test_when_all_are_full_the_batch_waits_for_room(peers: list[Peer]) -> None:
    peers[0].refusal = refused()
    with workers_of(peers[0].server.endpoint) as workers:
        [thread] = calling(workers, 1)
        peers[0].refusal = None
        peers[0].calls.get(timeout=30).reply(Reply())
        thread.join(30)


def test_an_answer_that_does_not_come_goes_to_another(peers: list[Peer]) -> None:
    with workers_of(*(peer.server.endpoint for peer in peers), timeout_s=0.5) as workers:
        [thread] = calling(workers, 1)
        peers[0].calls.get(timeout=30)  # never answered
        peers[1].calls.get(timeout=30).reply(Reply())
        thread.join(30)


def test_one_is_waited_for_half_as_long_while_another_is_left(peers: list[Peer]) -> None:
    """In sync the other workers wait as long for the batch."""
    timeout_s = 200.0
    addresses = [peer.server.endpoint for peer in peers]
    for asked, is_last in ((addresses, False), (addresses[:1], True)):
        with workers_of(*asked, timeout_s=timeout_s) as workers:
            latest = time.monotonic() + 0.75 * timeout_s
            [thread] = calling(workers, 1)
            answer = peers[0].calls.get(timeout=30)
            assert (peers[0].deadline > latest) == is_last
            answer.reply(Reply())
            thread.join(30)
            [thread] = calling_at(workers, asked[0])
            answer = peers[0].calls.get(timeout=30)
            assert (peers[0].deadline > latest) == is_last
            answer.reply(Reply())
            thread.join(30)


def calling_at(workers: ComputeWorkers, address: str) -> list[threading.Thread]:
    thread = threading.Thread(target=workers.call_at, args=(address, "run", {}, []), daemon=True)
    thread.start()
    return [thread]


def test_an_error_of_the_model_is_raised_at_once(peers: list[Peer]) -> None:
    error = BadRequest("compute worker 0 (gpu): RuntimeError: no")
    error.details = {"raised": "RuntimeError"}
    peers[0].refusal = error
    with (
        workers_of(*(peer.server.endpoint for peer in peers)) as workers,
        pytest.raises(BadRequest, match="RuntimeError: no"),
    ):
        workers.call("run", {}, [])
    assert peers[1].calls.empty()


def test_none_left_names_the_label_and_every_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with (
        workers_of(address, timeout_s=0.5) as workers,
        pytest.raises(DeadlineExceeded, match=f"label gpu: {address}: .*no process listens there"),
    ):
        workers.call("run", {}, [])


def test_a_call_that_is_made_once_ends_with_its_connection() -> None:
    peer = Peer()
    errors: list[TriremeError] = []

    def call() -> None:
        with RpcClient(name="worker 0") as client:
            once = Call(peer.server.endpoint, "run", once=True)
            [error] = client.call_all([once], timeout_s=60, return_errors=True)
            assert isinstance(error, TriremeError)
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    peer.calls.get(timeout=30)
    peer.server.stop()
    thread.join(30)
    [error] = errors
    assert error.name == "UNAVAILABLE"


def test_messages_become_seldom_while_none_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone:
        def call_all(self, calls: list[Call], *, timeout_s: float) -> None:
            raise Unavailable("gone")

        def close(self) -> None:
            pass

    now = [0.0]

    class Clock(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0.01
            return False

    monkeypatch.setattr(compute_workers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(compute_workers, "threading", SimpleNamespace(Condition=Clock))
    workers = ComputeWorkers("gpu", ["host:1"], first=0, connect=Gone, timeout_s=100.0)  # type: ignore[arg-type]
    with pytest.raises(DeadlineExceeded):
        workers.call("run", {}, [])
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("waiting for")]
    assert [line.rpartition(" for ")[2] for line in lines] == [
        f"{seconds} s" for seconds in (3, 6, 12, 24, 48, 96)
    ]


def test_one_that_ends_before_it_answers_is_said_to_have_ended(
    peers: list[Peer], caplog: pytest.LogCaptureFixture
) -> None:
    """A launcher listens for it, so that a connection can be made before it has started."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        peers[0].refusal = BadRequest("no more")
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with (
            workers_of(address, peers[0].server.endpoint) as workers,
            pytest.raises(BadRequest, match="no more"),
        ):
            workers.call("run", {}, [])
    assert f"compute worker {address} (gpu): " in caplog.text
    assert "closed the connection before a handshake: it has ended, another program" in caplog.text
    assert "server key" not in caplog.text  # there are none
