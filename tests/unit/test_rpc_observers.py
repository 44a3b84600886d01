"""Observers of rpc calls on clients and servers, and the server's own statistics."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import numpy as np
import pytest

from tests.proxy import Faults, Proxy
from trireme.errors import BadRequest
from trireme.rpc import Call, Deferred, Ended, Limits, Reply, Request, RpcClient, Server

ARRAY = np.zeros(10_000, np.float32)


class Requests:
    """Calls that a server's observer saw."""

    def __init__(self) -> None:
        self.reported: Counter[tuple[str, str]] = Counter()
        self.seconds: list[float] = []

    def __call__(self, method: str, seconds: float, error: str) -> None:
        self.reported[method, error] += 1
        self.seconds.append(seconds)


def echo(request: Request) -> Reply:
    return Reply(request.body, request.arrays)


def refuse(request: Request) -> Reply:
    raise BadRequest("no")


def test_both_sides_tell_of_each_call_and_how_it_ended() -> None:
    requests, calls = Requests(), list[Ended]()
    handlers = {"echo": echo, "refuse": refuse}
    with (
        Server("127.0.0.1:0", handlers, name="s", observe=requests) as server,
        RpcClient(name="w", observe=calls.append) as client,
    ):
        call = [Call(server.endpoint, "echo", {}, [ARRAY])] * 3
        client.call_all(call, timeout_s=60)
        for method in ("refuse", "such"):
            with pytest.raises(BadRequest):
                client.call(server.endpoint, method, timeout_s=60)
    assert requests.reported == {
        ("echo", ""): 3,
        ("refuse", "BAD_REQUEST"): 1,
        ("unknown", "BAD_REQUEST"): 1,  # a peer chooses names, not what is counted
    }
    assert all(0 <= seconds < 60 for seconds in requests.seconds)
    ended = [(call.method, call.error, call.num_retries) for call in calls]
    assert ended == [("echo", "", 0)] * 3 + [
        ("refuse", "BAD_REQUEST", 0),
        ("such", "BAD_REQUEST", 0),
    ]
    for call in calls[:3]:
        assert ARRAY.nbytes < call.num_bytes_sent < ARRAY.nbytes + 200
        assert ARRAY.nbytes < call.num_bytes_received < ARRAY.nbytes + 200


def test_a_request_that_was_sent_again_is_a_retry() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    calls = list[Ended]()
    faults = Faults(seed=seed, lose_request=0.2, lose_reply=0.2)
    with (
        Server("127.0.0.1:0", {"echo": echo}, name="s") as server,
        Proxy(server.endpoint, faults) as proxy,
        RpcClient(name="w", observe=calls.append) as client,
    ):
        for _ in range(40):
            client.call(proxy.endpoint, "echo", {}, [ARRAY], timeout_s=60)
        lost = proxy.counts["lose_request"] + proxy.counts["lose_reply"]
    assert len(calls) == 40
    assert sum(call.num_retries for call in calls) == lost > 0
    sent = sum(call.num_bytes_sent for call in calls)
    assert sent == pytest.approx((40 + lost) * ARRAY.nbytes, rel=0.01)


def test_a_call_to_a_full_server_is_retried_and_the_wait_is_reported() -> None:
    calls, waits = list[Ended](), list[tuple[str, str]]()
    came, go_on = threading.Semaphore(0), threading.Event()

    def hold(request: Request) -> None:
        came.release()
        assert go_on.wait(60)

    def watch(name: str, line: str) -> None:
        waits.append((name, line))
        go_on.set()

    limits = Limits(total_requests_max=1)
    with (
        Server("127.0.0.1:0", {"hold": hold}, name="s", limits=limits) as server,
        RpcClient(name="first") as first,
        RpcClient(name="second", observe=calls.append, watch=watch) as second,
    ):
        holder = threading.Thread(target=lambda: first.call(server.endpoint, "hold", timeout_s=60))
        holder.start()
        assert came.acquire(timeout=60)
        second.call(server.endpoint, "hold", timeout_s=60)
        holder.join(60)
    [call] = calls
    assert call.error == ""
    assert call.num_retries > 0
    (name, line), over = waits
    assert (name, over) == ("second", ("second", ""))
    assert "holds 1 requests: later (total_requests_max)" in line


def test_a_server_reports_its_requests_and_bytes() -> None:
    came, go_on = threading.Semaphore(0), threading.Event()
    deferred = Deferred()

    def hold(request: Request) -> None:
        came.release()
        assert go_on.wait(60)

    def wait(request: Request) -> Deferred:
        came.release()
        return deferred

    handlers = {"hold": hold, "wait": wait}
    with (
        Server("127.0.0.1:0", handlers, name="s", threads=1) as server,
        RpcClient(name="w") as client,
    ):
        assert server.usage()[:5] == (0, 0, 0, 0, 0)
        calls = [Call(server.endpoint, method, {}, [ARRAY]) for method in ("wait", "hold", "hold")]
        caller = threading.Thread(target=lambda: client.call_all(calls, timeout_s=60))
        caller.start()
        assert came.acquire(timeout=60)
        assert came.acquire(timeout=60)
        deadline = time.monotonic() + 60
        while server.usage().queued < 1:  # its arrival signals no event
            assert time.monotonic() < deadline
        usage = server.usage()
        assert (usage.running, usage.deferred, usage.connections) == (1, 1, 1)
        assert usage.queued == 1
        assert usage.num_bytes >= 3 * ARRAY.nbytes
        assert usage.num_bytes_in > 3 * ARRAY.nbytes
        go_on.set()
        deferred.reply(Reply({}, [ARRAY]))
        caller.join(60)
        assert server.usage().num_bytes_out > ARRAY.nbytes
