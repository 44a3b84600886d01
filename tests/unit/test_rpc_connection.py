"""Connections of rpc: lost, re-established, shared, given up, closed, leaving nothing."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import zmq

from proxy import Faults, Proxy
from tests.seeds import SEED, named_in_failure
from trireme.errors import (
    BadRequest,
    DeadlineExceeded,
    TriremeError,
    Unavailable,
)
from trireme.job import connecting
from trireme.rpc import Call, Deferred, Reply, Request, RpcClient, Server, Waiting
from trireme.rpc.notices import Notices

MIB = 1 << 20


def echo(request: Request) -> Reply:
    return Reply(request.body, request.arrays)


@pytest.fixture
def client() -> Iterator[RpcClient]:
    with RpcClient(name="worker 0") as client:
        yield client


def num_threads() -> int:
    """Threads of this process, ZeroMQ's own among them."""
    return len(os.listdir("/proc/self/task"))


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


# Lost and made again


def test_calls_continue_after_a_restart_of_the_server_on_the_same_port(client: RpcClient) -> None:
    with Server("127.0.0.1:0", {"echo": echo}, name="first") as first:
        at = first.endpoint
        client.call(at, "echo", timeout_s=30)
    with Server(at, {"echo": echo}, name="second"):
        assert client.call(at, "echo", {"a": 1}, timeout_s=30).body == {"a": 1}


def test_call_waits_for_a_server_that_starts_later(client: RpcClient) -> None:
    at = free_address()
    replies: list[Reply] = []
    caller = threading.Thread(
        target=lambda: replies.append(client.call(at, "echo", {"a": 1}, timeout_s=60))
    )
    caller.start()
    with Server(at, {"echo": echo}, name="late"):
        caller.join(60)
    assert [reply.body for reply in replies] == [{"a": 1}]


def test_trying_again_leaves_the_random_numbers_of_the_script_alone(client: RpcClient) -> None:
    before = random.getstate()
    with pytest.raises(Unavailable), RpcClient(name="another") as another:
        another.call(free_address(), "echo", timeout_s=0.3)
    assert random.getstate() == before


def test_request_without_answer_is_sent_again_with_the_same_id(client: RpcClient) -> None:
    ids: list[int] = []
    may_go_on = threading.Event()

    def slow_once(request: Request) -> None:
        ids.append(request.id)
        if len(ids) == 1:
            assert may_go_on.wait(60)

    def cut(proxy: Proxy) -> None:
        while not ids:
            pass
        proxy.cut()
        while len(ids) == 1:
            pass
        may_go_on.set()

    with (
        Server("127.0.0.1:0", {"slow": slow_once}, name="s") as server,
        Proxy(server.endpoint, Faults(seed=1)) as proxy,
    ):
        cutter = threading.Thread(target=cut, args=[proxy])
        cutter.start()
        client.call(proxy.endpoint, "slow", timeout_s=60)
        cutter.join()
    assert len(ids) == 2
    assert ids[0] == ids[1]


def test_stopping_server_answers_the_requests_it_has(client: RpcClient) -> None:
    entered = threading.Event()
    held: list[Deferred] = []

    def defer(request: Request) -> Deferred:
        held.append(Deferred())
        entered.set()
        return held[-1]

    with Server("127.0.0.1:0", {"defer": defer}, name="s") as server:
        errors: list[object] = []

        def call() -> None:
            with RpcClient(name="waits") as waits:
                errors.extend(
                    waits.call_all(
                        [Call(server.endpoint, "defer")], timeout_s=1, return_errors=True
                    )
                )

        caller = threading.Thread(target=call)
        caller.start()
        assert entered.wait(60)
        server.stop()
        caller.join(60)
    assert isinstance(errors[0], Unavailable)
    held[0].reply(Reply())  # too late, and no error


def test_server_killed_in_the_middle_is_unavailable_before_long(client: RpcClient) -> None:
    code = (
        "import sys; from trireme.rpc import Server, Deferred;"
        "s = Server('127.0.0.1:0', {'hang': lambda r: Deferred()}, name='victim').start();"
        "print(s.endpoint, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    at = process.stdout.readline().strip()
    with process, pytest.raises(DeadlineExceeded, match=r"hang at .* \(victim\): no answer"):
        client.call(at, "hang", timeout_s=0.3)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    with pytest.raises(Unavailable, match=r"hang at .* \(victim\): not reached"):
        client.call(at, "hang", timeout_s=0.3)


def test_a_long_call_ends_when_its_server_has_not_been_reached_for_long() -> None:
    """However long it may take to answer: a server that works on a call is reached."""
    answer = threading.Timer(1.0, lambda: held[0].reply(Reply({"took": "long"})))
    held: list[Deferred] = []

    def hold(_: Request) -> Deferred:
        held.append(Deferred())
        if len(held) == 1:
            answer.start()
        return held[-1]

    with RpcClient(name="worker 0", unreached_s=0.3) as client:
        with Server("127.0.0.1:0", {"hold": hold, "echo": echo}, name="s") as server:
            calls = [Call(server.endpoint, "hold"), Call(free_address(), "echo")]
            replies = client.call_all(calls, timeout_s=60, return_errors=True)
            assert isinstance(replies[0], Reply)
            assert isinstance(replies[1], Unavailable)
            assert "not reached" in str(replies[1])
            stop = threading.Timer(0.5, server.stop)
            stop.start()
            with pytest.raises(Unavailable, match=r"hold at .* \(s\): not reached .*for 0.3 s"):
                client.call(server.endpoint, "hold", timeout_s=60)
            stop.join()
        with (
            pytest.raises(Unavailable, match=r"echo at .*: not reached .*for 0.3 s"),
            client.clone() as another,
        ):
            another.call_all([calls[1]], timeout_s=60)


# Messages while waiting


def test_waiting_client_logs_the_server_it_waits_for(
    client: RpcClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trireme.rpc.notices.FIRST_S", 0.1)
    with (
        Server("127.0.0.1:0", {"hang": lambda request: Deferred()}, name="s") as server,
        caplog.at_level(logging.WARNING),
    ):
        absent = free_address()
        calls = [Call(server.endpoint, "hang"), Call(absent, "push"), Call(absent, "push")]
        client.call_all(calls, timeout_s=0.35, return_errors=True)
    assert f"waiting for {server.endpoint} (s) (hang): no answer for 0 s" in caplog.text
    assert f"waiting for {absent} (2 x push): not reached (no process listens there)" in caplog.text


def test_waiting_message_goes_to_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.rpc.notices.FIRST_S", 0.1)
    waits: list[Waiting] = []
    absent = free_address()
    calls = [Call(absent, "push"), Call(absent, "push")]
    with (
        RpcClient(name="w", on_wait=waits.append) as client,
        pytest.raises(Unavailable),
    ):
        client.call_all(calls, timeout_s=0.35)
    assert len(waits) in (1, 2)
    status = "not reached (no process listens there)"
    assert waits[0][:4] == (absent, "push", 2, status)
    assert str(waits[0]) == f"waiting for {absent} (2 x push): {status} for 0 s"


def test_a_client_that_reaches_nobody_takes_no_processor(client: RpcClient) -> None:
    """Its server may be on this machine, recovering what it had."""
    before = time.thread_time()
    with pytest.raises(Unavailable):
        client.call(free_address(), "push", timeout_s=2.0)
    assert time.thread_time() - before < 0.3  # it was half of the time, or more


def test_a_connection_that_is_dropped_and_not_refused_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux drops connections to a socket that has not accepted as many as it lets wait."""
    monkeypatch.setattr("trireme.rpc.sockets._CONNECT_TIMEOUT_MS", 2500)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        stack.enter_context(socket.create_connection(listener.getsockname()))
        endpoint = "{}:{}".format(*listener.getsockname())
        client = stack.enter_context(RpcClient(name="w"))
        with pytest.raises(Unavailable, match=r"not reached \(its machine is off, or a network or"):
            client.call(endpoint, "push", timeout_s=4)


@pytest.mark.parametrize(
    ("method", "is_meeting"),
    [("coord.gather", True), ("coord.meet_in_pass", True), ("ps.pull", False)],
)
def test_a_worker_says_what_a_meeting_waits_for(
    method: str, is_meeting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting("host:1 (coord.gather)", method, 1, "no answer", 3.2)
    connecting._log_wait(waiting)
    others = "; it answers when all workers have come" if is_meeting else ""
    assert caplog.messages == [
        f"waiting for host:1 (coord.gather) ({method}): no answer for 3 s{others}"
    ]


def test_messages_become_seldom_while_the_wait_goes_on() -> None:
    notices = Notices(100.0)
    due = [second for second in range(300) if notices.take_due(100.0 + second)]
    assert due == [3, 6, 12, 24, 48, 96, 156, 216, 276]
    assert notices.take_due(1000.0)  # late: one message for all that were due
    assert not notices.take_due(1000.0)


# Several at once


def test_many_clients_get_their_own_answers() -> None:
    wrong: list[object] = []

    def work(number: int, at: str, parent: RpcClient) -> None:
        random = np.random.default_rng(number)
        with parent.clone(f"worker {number}") as client:
            for i in range(40):
                array = random.random(random.integers(0, 20_000), np.float32)
                reply = client.call(at, "echo", {"n": number, "i": i}, [array], timeout_s=60)
                if reply.body != {"n": number, "i": i} or (reply.arrays[0] != array).any():
                    wrong.append((number, i))

    with RpcClient(name="parent") as parent:
        servers = [Server("127.0.0.1:0", {"echo": echo}, name=f"s{i}").start() for i in range(2)]
        workers = [
            threading.Thread(target=work, args=[i, servers[i % 2].endpoint, parent])
            for i in range(8)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        for server in servers:
            server.stop()
    assert not wrong


def test_requests_of_different_connections_are_handled_in_parallel() -> None:
    barrier = threading.Barrier(3)

    def meet(request: Request) -> None:
        barrier.wait(60)

    with Server("127.0.0.1:0", {"meet": meet}, name="s", threads=3) as server:

        def call() -> None:
            with RpcClient(name="w") as client:
                client.call(server.endpoint, "meet", timeout_s=60)

        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
    assert not barrier.broken


def test_requests_of_one_connection_are_handled_one_at_a_time(client: RpcClient) -> None:
    inside = threading.Lock()

    def handle(request: Request) -> None:
        assert inside.acquire(blocking=False)
        np.random.default_rng(1).random(200_000)
        inside.release()

    with Server("127.0.0.1:0", {"x": handle}, name="s", threads=4) as server:
        client.call_all([Call(server.endpoint, "x") for _ in range(50)], timeout_s=60)


def test_errors_can_be_returned_call_by_call(client: RpcClient) -> None:
    with Server("127.0.0.1:0", {"echo": echo}, name="s") as server:
        calls = [
            Call(server.endpoint, "echo", {"i": 1}),
            Call(server.endpoint, "none"),
            Call(free_address(), "echo"),
            Call(server.endpoint, "echo", {"i": 4}),
        ]
        answers = client.call_all(calls, timeout_s=0.5, return_errors=True)
        assert [type(answer) for answer in answers] == [Reply, BadRequest, Unavailable, Reply]
        with pytest.raises(BadRequest, match=r"none at .*no such method"):
            client.call_all(calls, timeout_s=60)  # at once: the first error ends it
        assert client.call_all([], timeout_s=1) == []


def test_client_used_by_two_threads_is_refused(client: RpcClient) -> None:
    entered, may_go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        entered.set()
        assert may_go_on.wait(60)

    with Server("127.0.0.1:0", {"hold": hold}, name="s") as server:
        caller = threading.Thread(target=lambda: client.call(server.endpoint, "hold", timeout_s=60))
        caller.start()
        assert entered.wait(60)
        with pytest.raises(BadRequest, match="for one thread"):
            client.call(server.endpoint, "hold", timeout_s=60)
        may_go_on.set()
        caller.join(60)


def test_arrays_may_change_when_a_call_has_failed(client: RpcClient) -> None:
    """The server must see the array as it was, or not at all, also when the call was given up."""
    wrong: list[float] = []

    def check(request: Request) -> None:
        values = np.unique(request.arrays[0])
        if len(values) != 1:
            wrong.append(values)

    array = np.zeros(8 * MIB, np.uint8)
    with Server("127.0.0.1:0", {"check": check}, name="s") as server:
        client.call(server.endpoint, "check", arrays=[array], timeout_s=60)
        for i in range(60):
            with contextlib.suppress(TriremeError):
                timeout_s = 0.0005 * (i % 20 + 1)
                client.call(server.endpoint, "check", arrays=[array], timeout_s=timeout_s)
            array[:] = i + 1
    assert not wrong


# Closing


def test_nothing_is_left_after_server_and_client() -> None:
    def use() -> None:
        with (
            Server("127.0.0.1:0", {"echo": echo}, name="s") as server,
            RpcClient(name="w") as client,
        ):
            client.call(server.endpoint, "echo", arrays=[np.zeros(MIB)], timeout_s=30)
            client.call_all([Call(free_address(), "echo")], timeout_s=0.05, return_errors=True)

    use()  # pyzmq starts its collector thread on first use
    threads, descriptors = num_threads(), len(os.listdir("/proc/self/fd"))
    num_uses = 5
    for _ in range(num_uses):
        use()
    # What one use leaves comes as often as it is used; other tests' threads may come and go.
    assert num_threads() < threads + num_uses
    assert len(os.listdir("/proc/self/fd")) < descriptors + num_uses


def test_stop_names_the_handler_that_does_not_end_and_where_it_is() -> None:
    entered, may_go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        entered.set()
        assert may_go_on.wait(60)

    server = Server("127.0.0.1:0", {"hold": hold}, name="s").start()

    def call() -> None:
        with RpcClient(name="w") as client:
            client.call_all([Call(server.endpoint, "hold")], timeout_s=60, return_errors=True)

    caller = threading.Thread(target=call)
    caller.start()
    assert entered.wait(60)
    with pytest.raises(DeadlineExceeded, match=r"Server.stop: .*: hold \(.*\d+ hold\b"):
        server.stop(timeout_s=0.05)
    may_go_on.set()
    server.stop(timeout_s=60)
    caller.join(60)


def test_closed_client_and_wrong_starts_are_refused(client: RpcClient) -> None:
    client.close()
    client.close()
    with pytest.raises(BadRequest, match="closed"):
        client.call("127.0.0.1:1", "echo", timeout_s=1)
    with pytest.raises(BadRequest, match="all closed"):
        client.clone()
    with Server("127.0.0.1:0", {}, name="s") as server, pytest.raises(BadRequest, match="once"):
        server.start()
    with pytest.raises(BadRequest, match="threads"):
        Server("127.0.0.1:0", {}, name="s", threads=0)


def test_client_in_a_forked_child_is_refused() -> None:
    """DataLoader workers are forked: ZeroMQ's thread does not exist there."""
    code = """
import os, sys
from trireme.errors import BadRequest
from trireme.rpc import RpcClient, Server
server = Server("127.0.0.1:0", {"echo": lambda request: None}, name="s").start()
client = RpcClient(name="w")
client.call(server.endpoint, "echo", timeout_s=30)
child = os.fork()
if child == 0:
    try:
        client.call(server.endpoint, "echo", timeout_s=30)
    except BadRequest as error:
        client.close()
        with RpcClient(name="child") as own:
            own.call(server.endpoint, "echo", timeout_s=30)
        os._exit(7 if "make a client in each process" in str(error) else 8)
    os._exit(9)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
client.call(server.endpoint, "echo", timeout_s=30)
client.close()
server.stop()
sys.exit(status)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 7


def test_two_servers_in_one_process_know_nothing_of_each_other(client: RpcClient) -> None:
    with (
        Server("127.0.0.1:0", {"who": lambda request: Reply({"n": 1})}, name="a") as a,
        Server("127.0.0.1:0", {"who": lambda request: Reply({"n": 2})}, name="b") as b,
    ):
        calls = [Call(a.endpoint, "who"), Call(b.endpoint, "who")] * 10
        replies = client.call_all(calls, timeout_s=30)
    assert [reply.body["n"] for reply in replies] == [1, 2] * 10


def test_every_byte_of_a_connection_is_accounted_for() -> None:
    """The server tells unfinished messages by exact counting; a wrong frame size would drift."""
    random = np.random.default_rng(5)
    with (
        Server("127.0.0.1:0", {"echo": echo}, name="s") as server,
        RpcClient(name="w") as client,
    ):
        unfinished = set()
        for _ in range(200):
            sizes = random.choice([0, 1, 200, 255, 256, 257, 8192, 70_000], 3)
            client.call(
                server.endpoint,
                "echo",
                {"x": "y" * int(random.integers(300))},
                [np.zeros(size, np.uint8) for size in sizes],
                timeout_s=30,
            )
            [peer] = server._socket.peers
            peer.read()
            unfinished.add(peer.num_read - peer.num_bytes_in)
        assert len(unfinished) == 1
        assert unfinished.pop() < 512  # ZMTP's handshake
        deadline = time.monotonic() + 30
        while abs(peer._acked - peer.num_bytes_out) >= 512 and time.monotonic() < deadline:
            client.call(server.endpoint, "echo", timeout_s=30)  # the last reply is acknowledged
            peer.read()
        assert abs(peer._acked - peer.num_bytes_out) < 512


def test_failing_callbacks_do_not_end_the_heartbeat(
    client: RpcClient, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> str:
        raise KeyError("whom")

    with Server("127.0.0.1:0", {"x": lambda request: Deferred(fail)}, name="s") as server:
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match="no answer was ready: KeyError"):
                client.call(server.endpoint, "x", timeout_s=3)
    assert "Traceback" in caplog.text


def test_connection_that_cannot_be_followed_is_closed(
    client: RpcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with Server("127.0.0.1:0", {"echo": echo}, name="s") as server:
        with monkeypatch.context() as patch:
            patch.setattr("trireme.rpc.peers.os.dup", no_more)
            with pytest.raises(Unavailable):
                client.call(server.endpoint, "echo", timeout_s=0.5)
        client.call(server.endpoint, "echo", timeout_s=30)


def test_deadline_reaches_the_handler_and_ends_waiting_replies(client: RpcClient) -> None:
    remaining: list[float] = []

    def note(request: Request) -> Deferred:
        remaining.append(request.deadline - time.monotonic())
        return Deferred(lambda: "workers [1] have not come")

    with Server("127.0.0.1:0", {"note": note}, name="s") as server:
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"workers \[1\] have not come"):
            client.call(server.endpoint, "note", timeout_s=3)
        assert time.monotonic() - start < 30
    assert 0 < remaining[0] <= 3


# Interrupted


def test_a_call_after_one_that_was_interrupted_while_it_was_sent(
    client: RpcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two parts of a message: the rest of it is not the beginning of the next."""

    def send_half(self: zmq.Socket, parts: Sequence[Any], flags: int, **_: Any) -> None:
        self.send(parts[0], flags | zmq.SNDMORE, copy=False)
        raise KeyboardInterrupt

    with Server("127.0.0.1:0", {"echo": echo}, name="s") as server:
        client.call(server.endpoint, "echo", timeout_s=20)
        began = time.monotonic()
        with monkeypatch.context() as patched:
            patched.setattr(zmq.Socket, "send_multipart", send_half)
            with pytest.raises(KeyboardInterrupt):
                client.call(server.endpoint, "echo", {}, [np.ones(MIB, np.uint8)], timeout_s=20)
        reply = client.call(server.endpoint, "echo", {"n": 1}, [np.zeros(3)], timeout_s=20)
        assert reply.body == {"n": 1}
        assert time.monotonic() - began < 4  # it does not wait for the arrays of the traceback


def test_an_interrupted_client_is_not_in_use(client: RpcClient) -> None:
    """Ctrl-C between taking the client's lock and the block that releases it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    rng = random.Random(SEED)
    try:
        with named_in_failure():
            for _ in range(300):
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 + rng.random() * 1e-4)
                    while True:
                        client.call_all([], timeout_s=20)
                assert not client._busy.locked()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
