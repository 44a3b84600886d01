"""RpcClient and server over real sockets: requests, replies, their order, and errors."""

from __future__ import annotations

import queue
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from proxy import Faults, Proxy
from tests.conditions import wait_until
from trireme.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    ResourceExhausted,
    Unavailable,
    WrongMap,
)
from trireme.rpc import Call, Deferred, Reply, Request, RpcClient, Server
from trireme.rpc.frames import DTYPES

SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (2, 0, 3), (1, 2, 3, 4, 5), (513,), (2048, 3)]


class Service:
    """A handler for each thing a handler may do, and what it saw."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.deferred: queue.SimpleQueue[Deferred] = queue.SimpleQueue()
        self.is_entered = threading.Event()
        self.may_go_on = threading.Event()
        self.handlers = {
            "echo": self.echo,
            "note": self.note,
            "defer": self.defer,
            "hold": self.hold,
            "wrong_map": self.wrong_map,
            "broken": self.broken,
        }

    def echo(self, request: Request) -> Reply:
        return Reply(request.body, request.arrays)

    def note(self, request: Request) -> None:
        self.seen.append(request.body["value"])

    def defer(self, request: Request) -> Deferred:
        deferred = Deferred()
        self.deferred.put(deferred)
        return deferred

    def hold(self, request: Request) -> None:
        self.is_entered.set()
        assert self.may_go_on.wait(60)

    def wrong_map(self, request: Request) -> None:
        error = WrongMap("map is 2, found 1")
        error.details = {"version": 2}
        raise error

    def broken(self, request: Request) -> None:
        raise KeyError("lost")


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def server(service: Service) -> Iterator[Server]:
    with Server("127.0.0.1:0", service.handlers, name="server 0") as server:
        yield server
        service.may_go_on.set()


@pytest.fixture
def client() -> Iterator[RpcClient]:
    with RpcClient(name="worker 0") as client:
        yield client


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_and_shape_arrive_as_they_were(
    server: Server, client: RpcClient, dtype: str
) -> None:
    random = np.random.default_rng(7)
    arrays = [random.integers(0, 2, shape).astype(dtype) for shape in SHAPES]
    reply = client.call(server.endpoint, "echo", arrays=arrays, timeout_s=30)
    for sent, got in zip(arrays, reply.arrays, strict=True):
        np.testing.assert_array_equal(got, sent, strict=True)
        assert got.flags.aligned
        assert not got.flags.writeable


def test_what_a_handler_held_is_free_when_its_error_has_been_sent(client: RpcClient) -> None:
    """A push that a full disk refuses has room in its tables, for which the next one would wait."""
    held = []

    def refuse(request: Request) -> None:
        room = threading.Event()
        held.append(weakref.ref(room))
        try:
            raise OSError("no space")
        except OSError as error:
            raise ResourceExhausted("no space") from error

    with Server("127.0.0.1:0", {"refuse": refuse}, name="server 0") as server:
        with pytest.raises(ResourceExhausted, match="no space"):
            client.call(server.endpoint, "refuse", timeout_s=30)
        wait_until(lambda: held[0]() is None)


def test_body_arrives_as_it_was(server: Server, client: RpcClient) -> None:
    body = {"none": None, "list": [1, -(2**63), 2**64 - 1, 0.1, "x", b"\0\xff", True, {"a": []}]}
    assert client.call(server.endpoint, "echo", body, timeout_s=30).body == body


def test_error_of_a_handler_names_method_endpoint_and_server(
    server: Server, client: RpcClient
) -> None:
    with pytest.raises(WrongMap, match="map is 2, found 1") as caught:
        client.call(server.endpoint, "wrong_map", timeout_s=30)
    assert f"wrong_map at {server.endpoint} (server 0)" in str(caught.value)
    assert caught.value.details == {"version": 2}


def test_unexpected_exception_becomes_internal_and_the_server_still_serves(
    server: Server, client: RpcClient, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Internal, match="KeyError: 'lost'"):
        client.call(server.endpoint, "broken", timeout_s=30)
    assert "Traceback" in caplog.text
    assert client.call(server.endpoint, "echo", {"a": 1}, timeout_s=30).body == {"a": 1}


def test_unknown_method_is_refused(server: Server, client: RpcClient) -> None:
    with pytest.raises(BadRequest, match="no such method"):
        client.call(server.endpoint, "nothing", timeout_s=30)


def test_calls_of_one_client_are_handled_in_order(
    server: Server, client: RpcClient, service: Service
) -> None:
    client.call_all([Call(server.endpoint, "note", {"value": i}) for i in range(300)], timeout_s=30)
    assert service.seen == list(range(300))


def test_no_answer_waits_for_a_slow_request() -> None:
    """Answers of quick requests leave together; the handler of the next one may prove slow."""
    service = Service()
    replies: queue.SimpleQueue[str] = queue.SimpleQueue()
    first, last = Service(), Service()
    handlers = {**service.handlers, "first": first.hold, "last": last.hold}

    with ExitStack() as stack:
        server = stack.enter_context(Server("127.0.0.1:0", handlers, name="s", threads=1))

        def ask(method: str) -> None:
            with RpcClient(name=method) as client:
                client.call(server.endpoint, method, timeout_s=50)
            replies.put(method)

        threads = [threading.Thread(target=ask, args=[name]) for name in ("first", "echo", "last")]
        stack.callback(lambda: [thread.join(60) for thread in threads])
        for num_queued, thread in zip((0, 1, 2), threads, strict=True):
            thread.start()
            assert first.is_entered.wait(30)
            wait_until(lambda num=num_queued: server.usage().queued == num)
        first.may_go_on.set()
        assert last.is_entered.wait(30)
        assert {replies.get(timeout=30), replies.get(timeout=30)} == {"first", "echo"}
        last.may_go_on.set()
        assert replies.get(timeout=30) == "last"


def test_deferred_answers_of_a_handler_that_goes_on_are_sent_and_counted_once() -> None:
    service = Service()

    def answer_and_hold(request: Request) -> None:
        for _ in range(3):
            service.deferred.get(timeout=30).reply(Reply({"late": True}))
        service.hold(request)

    handlers = {**service.handlers, "answer": answer_and_hold}
    with ExitStack() as stack:
        server = stack.enter_context(Server("127.0.0.1:0", handlers, name="s"))
        waiting, answering = (stack.enter_context(RpcClient(name=name)) for name in ("w", "a"))
        stack.callback(service.may_go_on.set)
        replies: list[Reply] = []
        calls = [Call(server.endpoint, "defer") for _ in range(3)]
        wait = threading.Thread(
            target=lambda: replies.extend(waiting.call_all(calls, timeout_s=50))
        )
        wait.start()
        hold = threading.Thread(
            target=lambda: answering.call(server.endpoint, "answer", timeout_s=50)
        )
        hold.start()
        assert service.is_entered.wait(30)
        assert server.usage()[:3] == (0, 1, 0)  # queued, running, deferred
        wait.join(30)
        assert [reply.body for reply in replies] == [{"late": True}] * 3
        service.may_go_on.set()
        hold.join(30)


def test_deferred_is_answered_from_another_thread(
    server: Server, client: RpcClient, service: Service
) -> None:
    def answer() -> None:
        for _ in range(2):
            service.deferred.get(timeout=60).reply(Reply({"late": True}))

    thread = threading.Thread(target=answer)
    thread.start()
    assert client.call(server.endpoint, "defer", timeout_s=30).body == {"late": True}
    assert client.call(server.endpoint, "defer", timeout_s=30).body == {"late": True}
    thread.join()


def test_absent_server_is_an_error_at_the_deadline_that_names_the_server(client: RpcClient) -> None:
    with pytest.raises(
        Unavailable, match=r"push at 127.0.0.1:1: .*no process listens .* for 0.3 s"
    ):
        client.call("127.0.0.1:1", "push", timeout_s=0.3)


def test_silent_handler_ends_in_deadline_exceeded(server: Server, client: RpcClient) -> None:
    # Both sides keep the deadline; whose word comes first depends on the machine.
    message = r"defer at .* \(server 0\): no answer (for 0.3 s|was ready before the deadline)"
    with pytest.raises(DeadlineExceeded, match=message):
        client.call(server.endpoint, "defer", timeout_s=0.3)
    assert client.call(server.endpoint, "echo", timeout_s=30).body == {}


def test_server_takes_over_a_socket_that_listens_already() -> None:
    held = socket.create_server(("127.0.0.1", 0))
    bind = f"127.0.0.1:{held.getsockname()[1]}"
    with RpcClient(name="worker 0") as client:
        answers: list[Reply] = []

        def ask() -> None:
            answers.append(client.call(bind, "echo", {"n": 1}, timeout_s=30))

        asking = threading.Thread(target=ask)
        asking.start()  # connects before there is a server
        with Server(bind, Service().handlers, name="s", listen_fd=held.detach()) as server:
            asking.join(60)
            assert server.endpoint == bind
    assert [answer.body for answer in answers] == [{"n": 1}]


def test_calls_survive_a_network_that_loses_and_repeats_messages(
    server: Server, client: RpcClient, service: Service
) -> None:
    faults = Faults(
        seed=11, lose_request=0.05, lose_reply=0.05, duplicate=0.1, replay=0.1, delay=0.1
    )
    with Proxy(server.endpoint, faults) as proxy:
        for i in range(200):
            assert client.call(proxy.endpoint, "echo", {"i": i}, timeout_s=30).body == {"i": i}
    assert min(proxy.counts[name] for name in ("lose_request", "lose_reply", "replay")) > 0


def test_reply_arrives_that_a_server_sends_just_before_it_stops() -> None:
    """Many rounds, since it is a race: ZeroMQ must not drop what came before the connection."""
    for _ in range(200):
        is_asked = threading.Event()

        def answer(request: Request, is_asked: threading.Event = is_asked) -> Reply:
            is_asked.set()
            return Reply(request.body)

        answers: list[Reply] = []
        with (
            RpcClient(name="worker 0") as client,
            Server("127.0.0.1:0", {"bye": answer}, name="s") as server,
        ):
            asking = threading.Thread(
                target=lambda end=server.endpoint, client=client, answers=answers: answers.append(
                    client.call(end, "bye", {"n": 1}, timeout_s=20)
                )
            )
            asking.start()
            assert is_asked.wait(60)
            server.stop()
            asking.join(60)
        assert [actual.body for actual in answers] == [{"n": 1}]
