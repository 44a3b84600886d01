"""The bytes of protocol version 1, field by field, as docs/protocol.md specifies them.

A change here is a change of the protocol: old clients and servers meet new ones. The bytes are
written by hand from the document; they are never regenerated.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from trireme.errors import WrongMap
from trireme.rpc import Limits, Reply, Request, RpcClient, Server
from trireme.rpc.frames import pack, unpack

# name: (header, arrays, header bytes, bytes of the other parts)
VERSION_1: dict[str, tuple[dict[str, Any], list[np.ndarray], str, list[str]]] = {
    "hello": (
        {
            "t": "hello",
            "magic": "trireme",
            "version_min": 1,
            "version_max": 1,
            "name": "worker 0",
            "message_bytes_max": 268435456,
            "call_bytes_max": 4294967296,
        },
        [],
        "87"  # a map of 7
        "a174" "a568656c6c6f"  # "t": "hello"
        "a56d61676963" "a77472697265 6d65"  # "magic": "trireme"
        "ab76657273696f6e5f6d696e" "01"  # "version_min": 1
        "ab76657273696f6e5f6d6178" "01"  # "version_max": 1
        "a46e616d65" "a8776f726b65722030"  # "name": "worker 0"
        "b16d6573736167655f62797465735f6d6178" "ce10000000"  # "message_bytes_max": 2**28
        "ae63616c6c5f62797465735f6d6178" "cf0000000100000000",  # "call_bytes_max": 2**32
        [],
    ),
    "welcome": (
        {
            "t": "welcome",
            "version": 1,
            "name": "server 0",
            "requests_max": 64,
            "inflight_bytes_max": 1073741824,
            "message_bytes_max": 268435456,
            "header_bytes_max": 1048576,
            "arrays_max": 4096,
            "call_bytes_max": 4294967296,
        },
        [],
        "89"
        "a174" "a777656c636f6d65"
        "a776657273696f6e" "01"
        "a46e616d65" "a87365727665722030"
        "ac72657175657374735f6d6178" "40"
        "b2696e666c696768745f62797465735f6d6178" "ce40000000"
        "b16d6573736167655f62797465735f6d6178" "ce10000000"
        "b06865616465725f62797465735f6d6178" "ce00100000"
        "aa6172726179735f6d6178" "cd1000"
        "ae63616c6c5f62797465735f6d6178" "cf0000000100000000",
        [],
    ),
    "call": (
        {"t": "call", "id": 258, "m": "push", "ms": 30000, "b": {"stream": 3}},
        [np.array([1, 2**64 - 1], np.uint64), np.array([[1.0, -2.0]], np.float32)],
        "86"
        "a174" "a463616c6c"
        "a26964" "cd0102"
        "a16d" "a470757368"
        "a26d73" "cd7530"
        "a162" "81" "a673747265616d" "03"
        "a161" "92"  # "a": two arrays
        "92" "a675696e743634" "91" "02"  # ["uint64", [2]]
        "92" "a7666c6f61743332" "92" "01" "02",  # ["float32", [1, 2]]
        ["0100000000000000" "ffffffffffffffff", "0000803f" "000000c0"],
    ),
    "reply": (
        {"t": "reply", "id": 258, "b": {}},
        [np.array([True, False]), np.array(-2, np.int16), np.zeros((0, 3), np.float16)],
        "84"
        "a174" "a57265706c79"
        "a26964" "cd0102"
        "a162" "80"
        "a161" "93"
        "92" "a4626f6f6c" "91" "02"
        "92" "a5696e743136" "90"  # no dims: one value
        "92" "a7666c6f61743136" "92" "00" "03",
        ["0100", "feff", ""],
    ),
    "error": (
        {
            "t": "error",
            "id": 258,
            "code": 2,
            "name": "WRONG_MAP",
            "message": "no",
            "handled": True,
            "details": {"version": 9},
        },
        [],
        "87"
        "a174" "a56572726f72"
        "a26964" "cd0102"
        "a4636f6465" "02"
        "a46e616d65" "a957524f4e475f4d4150"
        "a76d657373616765" "a26e6f"
        "a768616e646c6564" "c3"
        "a764657461696c73" "81" "a776657273696f6e" "09",
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERSION_1)
def test_message_packs_to_the_bytes_of_version_1(name: str) -> None:
    header, arrays, head, tail = VERSION_1[name]
    parts = pack(dict(header), arrays)
    assert bytes(parts[0]).hex() == head.replace(" ", "")
    assert [bytes(part).hex() for part in parts[1:]] == tail


@pytest.mark.parametrize("name", VERSION_1)
def test_bytes_of_version_1_are_read(name: str) -> None:
    header, arrays, head, tail = VERSION_1[name]
    got, got_arrays = unpack([bytes.fromhex(part) for part in (head, *tail)], Limits())
    got.pop("a", None)
    assert got == header
    for array, expected in zip(got_arrays, arrays, strict=True):
        np.testing.assert_array_equal(array, expected, strict=True)


def test_an_array_in_shared_memory_has_a_place_and_no_part() -> None:
    shared = np.zeros(64, np.uint8)
    arrays = [np.array([7], np.uint64), np.array([1, 2**64 - 1], np.uint64)]
    shared[16:32] = arrays[1].view(np.uint8)
    header = {"t": "reply", "id": 258, "b": {}}
    head = (
        "85"
        "a174" "a57265706c79"
        "a26964" "cd0102"
        "a162" "80"
        "a161" "92"
        "92" "a675696e743634" "91" "01"
        "92" "a675696e743634" "91" "02"
        "a173" "92" "c0" "10"  # "s": a part, and byte 16
    )  # fmt: skip
    parts = pack(dict(header), arrays, [None, 16])
    assert [bytes(part).hex() for part in parts] == [head, "0700000000000000"]
    got, got_arrays = unpack(parts, Limits(), shared)
    assert got["s"] == [None, 16]
    assert all(map(np.array_equal, got_arrays, arrays))


def test_client_and_server_say_just_this() -> None:
    """A ROUTER plays the server to a real client, then a DEALER the client to a real server."""
    header, arrays, _, _ = VERSION_1["call"]
    parts = {
        name: [bytes.fromhex(part) for part in (head, *tail)]
        for name, (_, _, head, tail) in VERSION_1.items()
    }
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
        ThreadPoolExecutor(1) as pool,
    ):
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with RpcClient(name="worker 0", limits=Limits(shared_bytes_max=0)) as client:
            client._ids = itertools.count(header["id"])
            done = pool.submit(
                client.call, f"127.0.0.1:{port}", "push", header["b"], arrays, timeout_s=30.0005
            )
            routing_id, *hello = router.recv_multipart()
            assert hello == parts["hello"]
            router.send_multipart([routing_id, *parts["welcome"]])
            _, head, *tail = router.recv_multipart()
            got = msgpack.unpackb(head)
            assert 0 < got["ms"] <= header["ms"]
            assert msgpack.packb(got | {"ms": header["ms"]}) == parts["call"][0]
            assert tail == parts["call"][1:]
            router.send_multipart([routing_id, *parts["reply"]])
            assert len(done.result(30).arrays) == 3

    def handle(request: Request) -> Reply:
        if request.method == "push":
            return Reply({}, VERSION_1["reply"][1])
        error = WrongMap("no")
        error.details = {"version": 9}
        raise error

    with (
        Server("127.0.0.1:0", {"push": handle, "fail": handle}, name="server 0") as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.connect(f"tcp://{server.endpoint}")
        dealer.send_multipart(parts["hello"])
        assert dealer.recv_multipart() == parts["welcome"]
        dealer.send_multipart(parts["call"])
        assert dealer.recv_multipart() == parts["reply"]
        dealer.send_multipart([parts["call"][0].replace(b"push", b"fail"), *parts["call"][1:]])
        assert dealer.recv_multipart() == parts["error"]


def test_unknown_fields_are_ignored() -> None:
    _, _, head, _ = VERSION_1["hello"]
    data = bytes.fromhex(head)
    more = bytes([data[0] + 1]) + data[1:] + b"\xa6future\x07"
    header, _ = unpack([more], Limits())
    assert header.pop("future") == 7
    assert header == VERSION_1["hello"][0]
