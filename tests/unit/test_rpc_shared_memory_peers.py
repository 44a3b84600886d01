"""Peers that offer wrong memory to share, or name places that they may not."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from trireme.errors import BadRequest
from trireme.rpc import Limits, RpcClient, Server, frames
from trireme.rpc.shared_memory import SharedMemory, opened

MIB = 1 << 20


class Raw:
    """A connection that sends whatever headers a test makes."""

    def __init__(self, server: Server, offer: Any) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(f"tcp://{server.endpoint}")
        hello = {"t": "hello", "magic": "trireme", "version_min": 1, "version_max": 1}
        hello |= {"name": "raw", "message_bytes_max": 1 << 30, "shared": offer}
        self.answer = self.send(hello)

    def send(self, header: dict[str, Any]) -> dict[str, Any]:
        self.socket.send_multipart(frames.pack(header, ()))
        answer: dict[str, Any] = msgpack.unpackb(self.socket.recv_multipart()[0])
        return answer

    def call(self, **fields: Any) -> dict[str, Any]:
        return self.send({"t": "call", "id": 5, "m": "echo", "ms": 9000, "b": {}, **fields})

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory(4 * MIB)
    yield memory
    memory.close()


@pytest.mark.parametrize(
    "wrong",
    [
        7, None, [], {}, {"pid": -1}, {"fd": -1}, {"pid": True}, {"fd": "3"}, {"name": "x"},
        {"name": "trireme-../../etc/passwd"}, {"name": "trireme-" + "g" * 32}, {"bytes": 0},
        {"bytes": (1 << 63) + 1},
    ],
)  # fmt: skip
def test_an_offer_of_another_form_is_a_fault(
    server: Server, memory: SharedMemory, wrong: Any
) -> None:
    offer = {**memory.offer(), **wrong} if wrong and type(wrong) is dict else wrong
    with pytest.raises(BadRequest):
        opened(offer, 1 << 40)
    with Raw(server, offer) as raw:
        assert (raw.answer["t"], raw.answer["name"]) == ("error", "BAD_REQUEST")


def test_only_memory_of_that_name_that_cannot_shrink_is_opened(
    server: Server, memory: SharedMemory, tmp_path: Path
) -> None:
    name = "trireme-" + "0" * 32
    unsealed = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 8 * MIB)
    other = os.memfd_create("another program's", os.MFD_ALLOW_SEALING)
    os.ftruncate(other, 8 * MIB)
    fcntl.fcntl(other, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    (tmp_path / f"memfd:{name}").write_bytes(bytes(8 * MIB))
    file = os.open(tmp_path / f"memfd:{name}", os.O_RDWR)
    good = memory.offer()
    offers = [
        {**good, "fd": unsealed, "name": name},
        {**good, "fd": other, "name": name},
        {**good, "fd": file, "name": name},
        {**good, "name": name},
        {**good, "fd": 1 << 30},
        {**good, "pid": 1 << 30},
        {**good, "bytes": 5 * MIB},
    ]
    for offer in offers:
        with Raw(server, offer) as raw:
            assert raw.answer["t"] == "welcome"
            assert "shared" not in raw.answer
    with Raw(server, good) as raw:
        assert raw.answer["shared"] == 4 * MIB
    for descriptor in (unsealed, other, file):
        os.close(descriptor)


def test_huge_pages_are_refused_because_they_can_run_out(memory: SharedMemory) -> None:
    """A client that punches holes would make the server touch pages that nobody has."""
    try:
        huge = os.memfd_create(memory._name, os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"this system has none: {error}")
    os.ftruncate(huge, 4 * MIB)
    fcntl.fcntl(huge, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(FileNotFoundError, match="something else"):
        opened({**memory.offer(), "fd": huge}, 1 << 40)
    os.close(huge)


def test_a_terminal_of_that_name_is_not_even_opened(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a mount namespace of its own a client gives any file any name. A server that opened a
    terminal would have it, and would end with it.
    """
    master, terminal = os.openpty()
    offer = {**memory.offer(), "fd": terminal}
    target = f"/memfd:{memory._name} (deleted)"
    flags: list[int] = []
    real_open = os.open

    def noting(path: str, how: int, **more: Any) -> int:
        flags.append(how)
        return real_open(path, how, **more)

    monkeypatch.setattr(os, "readlink", lambda _: target)
    monkeypatch.setattr(os, "open", noting)
    with pytest.raises(FileNotFoundError, match="something else"):
        opened(offer, 1 << 40)
    assert flags
    assert all(how & os.O_PATH for how in flags)
    os.close(master)
    os.close(terminal)


BYTES = ["uint8", [1 << 16]]


@pytest.mark.parametrize(
    "fields",
    [
        {"a": [BYTES], "s": [-1]},
        {"a": [BYTES], "s": [4 * MIB - (1 << 16) + 1]},
        {"a": [BYTES], "s": [(1 << 63) - 1]},
        {"a": [BYTES], "s": [True]},
        {"a": [BYTES], "s": [0.0]},
        {"a": [BYTES], "s": ["0"]},
        {"a": [BYTES], "s": 0},
        {"a": [BYTES], "s": [0, 0]},
        {"a": [BYTES], "s": []},
        {"a": [BYTES], "s": [None]},
        {"a": [BYTES, BYTES], "s": [0, None]},
        {"a": [["uint8", [3 * MIB]]] * 2, "s": [0, 0]},
        {"a": [["uint16", [MIB]]] * 3, "s": [1, 1, 1]},
        {"t": "piece", "at": 0, "sizes": [10, 1 << 17], "a": [BYTES], "s": [0]},
        {"a": [["uint8", [1 << 48]]], "s": [0]},
        {"a": [["object", [1]]], "s": [0]},
        {"a": 5, "s": [0]},
        {"s": [0]},
        {"room": 0},
        {"room": [0]},
        {"room": [0, 4 * MIB + 1]},
        {"room": [4 * MIB, 1]},
        {"room": [-1, 5]},
        {"room": [0, -1]},
        {"room": [True, 1]},
        {"room": [(1 << 63) - 1, (1 << 63) - 1]},
        {"room": {"start": 0}},
    ],
)
def test_places_outside_the_memory_are_faults(
    server: Server, memory: SharedMemory, fields: dict[str, Any]
) -> None:
    with Raw(server, memory.offer()) as raw:
        answer = raw.call(**fields)
        assert (answer["t"], answer["name"], answer["handled"]) == ("error", "BAD_REQUEST", True)
        assert raw.call(a=[BYTES], s=[4 * MIB - (1 << 16)])["t"] == "reply"
        assert raw.call(room=[0, 4 * MIB])["t"] == "reply"
    assert server.usage().num_faults == 1


def test_places_without_shared_memory_are_faults(server: Server) -> None:
    with RpcClient(name="w", limits=Limits(shared_bytes_max=0)) as client:
        client.call(server.endpoint, "echo", timeout_s=60)
    hello = {"t": "hello", "magic": "trireme", "version_min": 1, "version_max": 1}
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    socket.connect(f"tcp://{server.endpoint}")
    for header in (
        {**hello, "name": "raw", "message_bytes_max": 1 << 20},
        {"t": "call", "id": 5, "m": "echo", "ms": 9000, "b": {}, "a": [BYTES], "s": [0]},
        {"t": "call", "id": 6, "m": "echo", "ms": 9000, "b": {}, "room": [0, 1]},
    ):
        socket.send_multipart(frames.pack(header, ()))
        answer, _ = frames.unpack(socket.recv_multipart(), Limits())
        assert answer["t"] == "welcome" or answer["name"] == "BAD_REQUEST"
    socket.close()
    assert server.usage().num_faults == 2


def test_a_client_that_changes_its_arrays_meanwhile_changes_no_others(
    server: Server, memory: SharedMemory
) -> None:
    """Rooms and arrays may overlap as a client likes: it harms nobody but itself."""
    nine = np.full(1 << 18, 9, np.uint8)
    with Raw(server, memory.offer()) as raw, RpcClient(name="w") as client:
        for start in range(0, 1 << 16, 1 << 12):
            header = raw.call(a=[BYTES], s=[start], room=[start + 5, 1 << 17])
            assert header["s"] == [start + 5]
            [got] = client.call(server.endpoint, "echo", arrays=[nine], timeout_s=60).arrays
            np.testing.assert_array_equal(got, nine)


def test_the_memory_is_the_clients_own(memory: SharedMemory) -> None:
    shared = opened(memory.offer(), 1 << 40)
    memory.bytes[5] = 9
    assert shared[5] == 9
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(memory._descriptor, mmap.PAGESIZE)
