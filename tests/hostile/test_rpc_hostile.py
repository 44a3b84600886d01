"""Peers that break the protocol get a typed error or are disconnected; others are still served.

Every test ends by a call of a well-behaved client, over a connection that was open all the time.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from zmtp import HELLO, LONG, MORE, RawPeer, call, frame, greeting, message, send_until_closed

from trireme.errors import BadRequest, ResourceExhausted
from trireme.rpc import Limits, Reply, Request, RpcClient, Server

MIB = 1 << 20
LIMITS = Limits(
    message_bytes_max=MIB,
    header_bytes_max=1 << 14,
    arrays_max=64,
    requests_max=8,
    inflight_bytes_max=4 * MIB,
    total_bytes_max=8 * MIB,
    connections_max=20,
    faults_max=4,
    handshake_timeout_s=0.5,
)


@pytest.fixture
def handled() -> threading.Semaphore:
    """Counts the calls of "blob"."""
    return threading.Semaphore(0)


@pytest.fixture
def server(handled: threading.Semaphore) -> Iterator[Server]:
    def blob(request: Request) -> Reply:
        handled.release()
        return Reply({"blob": bytes(MIB // 2)})

    handlers = {
        "echo": lambda request: Reply(request.body, request.arrays),
        "blob": blob,
        "array": lambda _: Reply({}, [np.zeros(MIB // 2, np.uint8)]),
    }
    with (
        Server("127.0.0.1:0", handlers, name="server 0", limits=LIMITS) as server,
        RpcClient(name="good") as good,
    ):
        assert good.call(server.endpoint, "echo", {"before": 1}, timeout_s=30).body == {"before": 1}
        connection = good._connections[server.endpoint]
        zmq_socket = connection._socket
        yield server
        assert good.call(server.endpoint, "echo", {"after": 1}, timeout_s=30).body == {"after": 1}
        assert connection._socket is zmq_socket, "the good client's connection was closed too"


@pytest.fixture
def peer(server: Server) -> Iterator[RawPeer]:
    with RawPeer(server.endpoint) as peer:
        yield peer


@pytest.fixture
def stack(server: Server) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Below the protocol


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 8,
        bytes(4096),
        b"\xff" * 4096,
        greeting()[:10] + b"\x03" + b"\xff" * 200,
        greeting().replace(b"NULL", b"HUGE") + bytes(100),
        greeting() + frame(b"\x05READY" + b"\xff" * 50, 4),
        greeting() + frame(b"\x05ERROR\x03abc", 4),
        greeting() + message(b"traffic before the handshake"),
    ],
)
def test_peer_that_does_not_speak_zmtp_is_closed(peer: RawPeer, data: bytes) -> None:
    try:
        peer.socket.sendall(data)
        while not peer.is_closed_by_server():
            pass
    except ConnectionError:
        pass


@pytest.mark.parametrize("data", [b"", b"\xff", greeting()[:11], greeting()])
def test_peer_that_stops_within_the_handshake_is_closed(peer: RawPeer, data: bytes) -> None:
    peer.socket.sendall(data)
    while not peer.is_closed_by_server():
        pass


def test_peer_without_hello_is_closed(peer: RawPeer) -> None:
    peer.greet()
    assert peer.is_closed_by_server()


def test_part_beyond_the_limit_closes_the_connection(peer: RawPeer) -> None:
    peer.hello()
    peer.socket.sendall(bytes([LONG]) + (1 << 40).to_bytes(8, "big"))
    assert peer.is_closed_by_server()


@pytest.mark.parametrize("size", [100, 10_000, 500_000])
def test_message_cut_in_the_middle_is_forgotten(server: Server, size: int) -> None:
    data = message(msgpack.packb(call(a=[["uint8", [size]]])), bytes(size))
    for end in range(1, len(data), len(data) // 7):
        with RawPeer(server.endpoint) as peer:
            peer.hello().socket.sendall(data[:end])


@pytest.mark.parametrize("part_bytes", [0, 1, 200, 8192, 500_000])
def test_endless_parts_close_the_connection_and_memory_stays(
    peer: RawPeer, part_bytes: int
) -> None:
    peer.hello()
    before = memory_bytes()
    chunk = frame(bytes(part_bytes), MORE) * max(1, 65536 // (part_bytes + 2))
    num_bytes = send_until_closed(peer, [chunk])
    # One reading of the counters may miss what passes until the next one.
    assert num_bytes < 1 << 30
    assert memory_bytes() - before < 512 * MIB


def test_endless_parts_before_the_hello_close_the_connection(peer: RawPeer) -> None:
    peer.greet()
    send_until_closed(peer, [frame(bytes(100), MORE) * 100])


def test_unfinished_messages_of_many_peers_are_bounded_together(
    server: Server, stack: ExitStack
) -> None:
    peers = [stack.enter_context(RawPeer(server.endpoint)).hello() for _ in range(12)]
    part = bytes([MORE | LONG]) + MIB.to_bytes(8, "big")
    open_peers = set(peers)
    for peer in peers:  # 12 times a little less than a message, 8 may be held
        peer.socket.sendall(part + bytes(MIB - 4096))
    deadline = time.monotonic() + 20
    while len(open_peers) > 8 and time.monotonic() < deadline:
        for peer in list(open_peers):
            peer.socket.settimeout(0.05)
            try:
                if peer.is_closed_by_server():
                    open_peers.remove(peer)
            except TimeoutError:
                pass
    assert 6 <= len(open_peers) <= 8


def test_replies_that_many_peers_do_not_read_are_bounded_together(
    server: Server, stack: ExitStack
) -> None:
    """Each may leave 4 MiB: 48 MiB in all, of which 8 may be held."""
    peers = [stack.enter_context(RawPeer(server.endpoint)) for _ in range(12)]
    for peer in peers:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        peer.hello()
        for number in range(1, LIMITS.requests_max + 1):
            peer.send(call(number, "array"))
    followed = server._socket.peers
    deadline = time.monotonic() + 20
    while any(peer.num_requests for peer in followed) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert sum(p.unsent_bytes for p in followed if not p.is_dropped) <= LIMITS.total_bytes_max


def test_connections_beyond_the_limit_are_closed(server: Server, stack: ExitStack) -> None:
    peers = [
        stack.enter_context(RawPeer(server.endpoint)).hello()
        for _ in range(LIMITS.connections_max - 1)
    ]
    with suppress(ConnectionError), RawPeer(server.endpoint) as one_more:  # reset, even at once
        one_more.greet()
        assert one_more.is_closed_by_server()
    for peer in peers:
        peer.send(call())
        assert peer.header()["t"] == "reply"


# The handshake


@pytest.mark.parametrize(
    "spoilt",
    [
        {"magic": "other"},
        {"t": "call"},
        {"t": "welcome"},
        {"version_min": 2, "version_max": 9},
        {"version_min": 0, "version_max": 0},
        {"version_min": "1"},
        {"version_max": True},
        {"name": "x" * 300},
        {"name": 7},
        {"message_bytes_max": 0},
        {"message_bytes_max": -1},
        {"message_bytes_max": 1.5},
    ],
)
def test_wrong_hello_is_answered_and_never_welcomed(peer: RawPeer, spoilt: dict[str, Any]) -> None:
    peer.greet().send(HELLO | spoilt)
    answer = peer.header()
    assert (answer["t"], answer["id"], answer["code"]) == ("error", 0, BadRequest.code)
    peer.send(call())
    assert peer.header()["code"] == BadRequest.code


def test_a_wrong_version_is_answered_with_both_versions(peer: RawPeer) -> None:
    peer.greet().send(HELLO | {"version_min": 7, "version_max": 9})
    assert "version 1, found a client that speaks 7 to 9" in peer.header()["message"]


def test_second_hello_is_a_fault(peer: RawPeer) -> None:
    peer.hello().send(HELLO)
    assert peer.header()["code"] == BadRequest.code


# Calls

NESTED: Any = 0
for _ in range(2000):
    NESTED = [NESTED]

WRONG_CALLS = [
    b"",
    b"\xc1",
    b"garbage",
    b"\x91" * 3000,
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xffx",
    msgpack.packb([1, 2, 3]),
    msgpack.packb(None),
    msgpack.packb({1: 2}),
    msgpack.packb({}),
    msgpack.packb({"t": "call"}),
    msgpack.packb({"t": "jump", "id": 1}),
    msgpack.packb({"t": ["call"]}),
    msgpack.packb(call()) + b"\0",
    msgpack.packb(call())[:-1],
    msgpack.packb(call(b={"x": msgpack.ExtType(4, b"x")})),
    msgpack.packb(call(b={"x": msgpack.Timestamp(1)})),
    msgpack.packb(call(b={b"\xff": 1})).replace(b"\xc4\x01\xff", b"\xa1\xff"),
    msgpack.packb(call(b={"x": "y" * (1 << 14)})),
    *(msgpack.packb(call(request_id)) for request_id in (0, -1, 1 << 63, "1", 1.0, True, None)),
    *(msgpack.packb(call(method=method)) for method in ("m" * 257, 1, None, ["echo"])),
    *(msgpack.packb(call(ms=ms)) for ms in (-1, 1 << 50, 1.5, "1", None)),
    *(msgpack.packb(call(b=body)) for body in ([], None, "x", 1)),
    *(msgpack.packb(call(a=arrays)) for arrays in ([["int8", [1]]], {}, None, 7)),
    msgpack.packb(call(t="reply")),
    msgpack.packb(call(t="error")),
]


@pytest.mark.parametrize("data", WRONG_CALLS, ids=range(len(WRONG_CALLS)))
def test_malformed_call_is_answered_bad_request(peer: RawPeer, data: bytes) -> None:
    peer.hello().socket.sendall(message(data))
    answer = peer.header()
    assert (answer["t"], answer["code"], answer["name"]) == ("error", 1, "BAD_REQUEST")
    peer.send(call(5))
    assert peer.header() == {"t": "reply", "id": 5, "b": {}}


@pytest.mark.parametrize(
    ("specs", "parts"),
    [
        ([["int8", [1]]], []),
        ([], [b"x"]),
        ([["int8", [1]]], [b"x", b"y"]),
        ([["int8", [2]]], [b"x"]),
        ([["int8", [0]]], [b"x"]),
        ([["float32", [1]]], [b"xyz"]),
        ([["object", [1]]], [bytes(8)]),
        ([["O", [1]]], [bytes(8)]),
        ([["|O8", [1]]], [bytes(8)]),
        ([["<U2", [1]]], [bytes(8)]),
        ([["datetime64", [1]]], [bytes(8)]),
        ([["complex64", [1]]], [bytes(8)]),
        ([["float32,int32", [1]]], [bytes(8)]),
        ([["", [1]]], [bytes(8)]),
        ([[7, [1]]], [bytes(8)]),
        ([["int8", [-1]]], [b"x"]),
        ([["int8", [-1, -1]]], [b"x"]),
        ([["int8", [True]]], [b"x"]),
        ([["int8", [1.0]]], [b"x"]),
        ([["int8", ["1"]]], [b"x"]),
        ([["int8", 1]], [b"x"]),
        ([["int8", {"0": 1}]], [b"x"]),
        ([["int8"]], [b"x"]),
        ([["int8", [1], 1]], [b"x"]),
        (["int8"], [b"x"]),
        ([None], [b"x"]),
        ([["int8", [1] * 9]], [b"x"]),
        ([["int8", [1 << 60]]], [b"x"]),
        ([["int64", [1 << 32, 1 << 32]]], [b"x"]),
        ([["int64", [1 << 47, 1 << 47, 1 << 47, 0]]], [b"x"]),
    ],
    ids=str,
)
def test_array_that_is_not_what_its_spec_says_is_answered_bad_request(
    peer: RawPeer, specs: Any, parts: list[bytes]
) -> None:
    peer.hello().send(call(3, a=specs), *parts)
    answer = peer.header()
    assert (answer["t"], answer["code"]) == ("error", 1)


def test_empty_array_of_a_huge_shape_takes_no_memory(peer: RawPeer) -> None:
    peer.hello().send(call(3, a=[["int64", [1 << 47, 1 << 47, 0]]]), b"")
    answer = peer.header()
    assert (answer["t"], answer["code"]) == ("error", 1)
    peer.send(call(4, a=[["int64", [1 << 47, 0]]]), b"")
    assert peer.header()["a"] == [["int64", [1 << 47, 0]]]


def test_too_many_parts_are_refused(peer: RawPeer) -> None:
    num_parts = LIMITS.arrays_max + 1
    peer.hello().send(call(3, a=[["int8", [1]]] * num_parts), *[b"x"] * num_parts)
    assert peer.header()["code"] == ResourceExhausted.code


def test_too_many_bytes_in_many_parts_are_refused(peer: RawPeer) -> None:
    part = bytes(MIB // 4)
    peer.hello().send(call(3, a=[["int8", [len(part)]]] * 5), *[part] * 5)
    assert peer.header()["code"] == ResourceExhausted.code


def test_peer_that_repeats_faults_is_disconnected(peer: RawPeer) -> None:
    peer.hello()
    for _ in range(LIMITS.faults_max):
        peer.socket.sendall(message(b"garbage"))
        assert peer.header()["code"] == BadRequest.code
    peer.socket.sendall(message(b"garbage"))
    assert peer.is_closed_by_server()


def test_replayed_and_reordered_calls_are_each_answered(peer: RawPeer) -> None:
    peer.hello()
    for request_id in (7, 7, 3, 9, 3, 1):
        peer.send(call(request_id, b={"n": request_id}))
        assert peer.header() == {"t": "reply", "id": request_id, "b": {"n": request_id}}


# Floods


def test_peer_beyond_its_credit_is_refused_then_closed(peer: RawPeer) -> None:
    peer.hello()
    before = memory_bytes()
    calls = b"".join(message(msgpack.packb(call(i + 1))) for i in range(10_000))
    try:
        for _ in range(100):  # a million
            peer.socket.sendall(calls)
        while not peer.is_closed_by_server():
            pass
    except ConnectionError:
        pass
    assert memory_bytes() - before < 64 * MIB


def test_peer_that_takes_no_replies_is_not_served_further(
    peer: RawPeer, handled: threading.Semaphore
) -> None:
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the kernel takes little
    peer.hello()
    before = memory_bytes()
    num_handled = 0
    while num_handled < 2000:  # 1 GB of replies, one request at a time
        peer.send(call(num_handled + 1, "blob"))
        if not handled.acquire(timeout=0.5):
            break
        num_handled += 1
    # Half a MiB each; 4 MiB may wait here, and some in the kernel.
    assert 4 < num_handled < 40
    assert memory_bytes() - before < 64 * MIB


def test_connections_that_come_and_go_leave_nothing(server: Server) -> None:
    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with RpcClient(name="clock") as clock:
        clock.call(server.endpoint, "echo", timeout_s=30)
        before = num_descriptors()
        for _ in range(200):
            with RawPeer(server.endpoint) as peer:
                peer.hello().send(call())
        deadline = time.monotonic() + 20
        while num_descriptors() > before and time.monotonic() < deadline:
            clock.call(server.endpoint, "echo", timeout_s=30)
        assert num_descriptors() <= before
