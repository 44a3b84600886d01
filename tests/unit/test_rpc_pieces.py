"""Calls and replies that are larger than a message travel in pieces."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zmq

from tests.conditions import wait_until
from tests.seeds import SEED, named_in_failure
from trireme.errors import BadRequest, ResourceExhausted
from trireme.rpc import Call, Limits, Reply, Request, RpcClient, Server, frames, peers
from trireme.rpc.pieces import Assembly, announced_bytes, cut

KIB = 1 << 10
SMALL = Limits(message_bytes_max=16 * KIB, header_bytes_max=8 * KIB, total_bytes_max=KIB * KIB)


OTHER = ("127.0.0.2", 0)  # seems to be another machine, which shares no memory


def echo(request: Request) -> Reply:
    return Reply(request.body, request.arrays)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server("127.0.0.1:0", {"echo": echo}, name="s", limits=SMALL) as server:
        yield server


def test_pieces_of_random_messages_give_the_message_again() -> None:
    rng = random.Random(SEED)
    with named_in_failure():
        for _ in range(200):
            sizes = [rng.choice((0, 1, 9, rng.randrange(20_000))) for _ in range(rng.randrange(90))]
            check_pieces([np.frombuffer(rng.randbytes(n), np.uint8) for n in sizes])


def check_pieces(arrays: list[np.ndarray]) -> None:
    whole = frames.pack({"t": frames.CALL, "id": 7, "b": {"n": len(arrays)}}, arrays)
    assembly: Assembly | None = None
    is_complete = False
    for message in cut(whole, 7, 16 * KIB):
        assert not is_complete
        assert sum(map(len, message)) <= 16 * KIB
        header, slices = frames.unpack(message, SMALL)
        if assembly is None:
            assert announced_bytes(header, Limits()) == sum(map(len, whole))
            assembly = Assembly(header)
        is_complete = assembly.add(header, slices)
    assert assembly is not None
    assert is_complete
    unpacked, taken = frames.unpack(assembly.parts, Limits())
    assert unpacked["b"] == {"n": len(arrays)}
    assert all(map(np.array_equal, taken, arrays))


def test_a_call_and_its_reply_may_be_larger_than_a_message(server: Server) -> None:
    arrays = [np.arange(60_000, dtype=np.float32), np.empty((0, 3)), np.arange(9)]
    limits = Limits(message_bytes_max=9 * KIB, header_bytes_max=8 * KIB)
    with RpcClient(name="w", limits=limits) as client:
        calls = [Call(server.endpoint, "echo", {"i": i}, arrays) for i in range(5)]
        calls.insert(2, Call(server.endpoint, "echo", {"i": 9}, [np.arange(3)]))
        replies = client.call_all(calls, timeout_s=60)
    assert [reply.body["i"] for reply in replies] == [0, 1, 9, 2, 3, 4]
    for reply in replies[:2] + replies[3:]:
        assert all(map(np.array_equal, reply.arrays, arrays))
    assert server.usage().num_bytes == 0


def test_a_call_beyond_what_a_server_holds_for_all_is_refused(server: Server) -> None:
    with RpcClient(name="w") as client:
        with pytest.raises(ResourceExhausted, match="total_bytes_max is 1048576, found 11"):
            client.call(
                server.endpoint, "echo", arrays=[np.zeros(1_100_000, np.uint8)], timeout_s=9
            )
        assert client.call(server.endpoint, "echo", {"x": 1}, timeout_s=9).body == {"x": 1}


def test_a_reply_beyond_what_the_client_takes_is_refused(server: Server) -> None:
    limits = Limits(message_bytes_max=9 * KIB, header_bytes_max=KIB, total_bytes_max=99 * KIB)
    array = np.zeros(110_000, np.uint8)
    with (
        RpcClient(name="w", limits=limits) as client,
        pytest.raises(ResourceExhausted, match="replies of 101376 bytes"),
    ):
        client.call(server.endpoint, "echo", arrays=[array], timeout_s=9)


class Raw:
    """A connection that sends whatever messages a test makes."""

    def __init__(self, server: Server) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger, self.socket.rcvtimeo = 0, 20_000
        self.socket.connect(f"tcp://{server.endpoint}")
        hello = {"t": "hello", "magic": "trireme", "version_min": 1, "version_max": 1}
        self.send(hello | {"name": "raw", "message_bytes_max": 1 << 20})
        assert self.receive()["t"] == "welcome"

    def send(self, header: dict[str, Any], *arrays: np.ndarray) -> None:
        self.socket.send_multipart(frames.pack(header, arrays))

    def receive(self) -> dict[str, Any]:
        header, _ = frames.unpack(self.socket.recv_multipart(), Limits())
        return header

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def piece(id: int, at: int, num_bytes: int, *sizes: int) -> tuple[dict[str, Any], np.ndarray]:
    header: dict[str, Any] = {"t": "piece", "id": id, "at": at}
    return header | ({"sizes": list(sizes)} if sizes else {}), np.zeros(num_bytes, np.uint8)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([piece(1, 0, 9)], "needs 'sizes'"),
        ([piece(1, 5, 9)], "needs 'sizes'"),
        ([piece(1, 0, 9, 10, -1)], "needs 'sizes'"),
        ([piece(1, 0, 9, 10, 1 << 62, 1 << 62)], "total_bytes_max"),
        ([piece(1, 0, 9, 10_000, 5)], "a header of 8192 bytes"),
        ([piece(1, 0, 9, *[1] * 5000)], "4096 arrays"),
        ([piece(1, 0, 0, 10, 5)], "found 0 bytes"),
        ([piece(1, 0, 16, 10, 5)], "found 16 bytes"),
        ([piece(1, 0, 9, 10, 5), piece(1, 8, 1)], "at byte 9 of 15"),
        ([piece(1, 0, 9, 10, 5), piece(2, 9, 1)], "of message 2 at 9"),
        ([piece(1, 0, 9, 10, 5), piece(2, 0, 9, 10, 5)], "of message 2 at 0"),
        ([piece(1, 0, 15, 10, 5)], "header must be one msgpack map"),
    ],
)
def test_wrong_pieces_are_faults_and_hold_nothing(
    server: Server, pieces: list[tuple[dict[str, Any], np.ndarray]], error: str
) -> None:
    with Raw(server) as raw:
        for header, data in pieces:
            raw.send(header, data)
        answer = raw.receive()
        assert (answer["t"], answer["handled"]) == ("error", True)
        assert error in answer["message"]
        assert server.usage().num_bytes == 0
        raw.send({"t": "call", "id": 5, "m": "echo", "ms": 9000, "b": {}})
        assert raw.receive()["t"] == "reply"
    assert server.usage().num_faults == 1


def test_the_other_pieces_of_a_refused_call_are_ignored(server: Server) -> None:
    with Raw(server) as holder, Raw(server) as raw:
        holder.send(*piece(1, 0, 9, 100, 600_000))
        wait_until(lambda: server.usage().num_bytes == 600_100)
        raw.send(*piece(4, 0, 9, 100, 600_000))
        raw.send(*piece(4, 9, 9))
        raw.send({"t": "call", "id": 5, "m": "echo", "ms": 9000, "b": {}})
        answers = [raw.receive() for _ in range(2)]
        assert [(a["t"], a["id"]) for a in answers] == [("error", 4), ("reply", 5)]
        assert not answers[0]["handled"]
        assert "no room for 600100" in answers[0]["message"]
        holder.socket.close()
        wait_until(lambda: server.usage().num_bytes == 0)
    assert server.usage().num_faults == 0


def test_a_call_that_stays_in_pieces_closes_its_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PIECE_TIMEOUT_S", 0.1)
    with Raw(server) as raw:
        raw.send(*piece(1, 0, 9, 100, 600_000))
        wait_until(lambda: server.usage().num_bytes == 600_100)
        wait_until(lambda: server.usage().num_bytes == 0)


def test_a_piece_may_take_longer_than_the_wait_for_the_next_if_its_bytes_go_on_arriving(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PIECE_TIMEOUT_S", 0.5)
    host, _, port = server.endpoint.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def carry() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection((host, int(port)), source_address=OTHER) as far:
                pumps.submit(pump, far, near, 0.0)
                pump(near, far, 0.05)  # 0.8 s for each piece

        def pump(source: socket.socket, to: socket.socket, pause_s: float) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(KIB):
                    threading.Event().wait(pause_s)
                    to.sendall(data)
                to.shutdown(socket.SHUT_RDWR)

        with ThreadPoolExecutor(3) as pumps, RpcClient(name="w") as client:
            pumps.submit(carry)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            array = np.ones(40_000, np.uint8)
            [got] = client.call(address, "echo", arrays=[array], timeout_s=30).arrays
            assert np.array_equal(got, array)


def test_clients_share_what_a_server_holds_for_calls_in_pieces(server: Server) -> None:
    """Each call alone fits; together they do not, so some are sent again."""

    def call(number: int) -> bool:
        array = np.full(700_000, number, np.uint8)
        with RpcClient(name=f"w{number}") as client:
            [got] = client.call(server.endpoint, "echo", arrays=[array], timeout_s=60).arrays
        return np.array_equal(got, array)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(call, range(12)))
    wait_until(lambda: server.usage().num_bytes == 0)


def test_an_assembly_names_the_piece_that_it_expects() -> None:
    assembly = Assembly(piece(3, 0, 2, 4, 4)[0])
    assert not assembly.add(piece(3, 0, 0)[0], [np.zeros(2, np.uint8)])
    with pytest.raises(BadRequest, match="message 3 at byte 2 of 8"):
        assembly.add(piece(3, 5, 0)[0], [np.zeros(2, np.uint8)])
