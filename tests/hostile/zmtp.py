"""A peer that speaks ZMTP 3.1 byte by byte, so that it can break every rule above TCP."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgpack

MORE, LONG, COMMAND = 1, 2, 4

HELLO = {
    "t": "hello",
    "magic": "trireme",
    "version_min": 1,
    "version_max": 1,
    "name": "raw",
    "message_bytes_max": 1 << 20,
}


def greeting() -> bytes:
    """Signature, version 3.1, mechanism NULL, not a server: 64 bytes."""
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def frame(body: bytes, flags: int = 0) -> bytes:
    """One frame."""
    if len(body) > 255:
        return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def message(*parts: bytes) -> bytes:
    """The frames of one message."""
    return b"".join(frame(part, MORE) for part in parts[:-1]) + frame(parts[-1])


def call(request_id: Any = 1, method: Any = "echo", **fields: Any) -> dict[str, Any]:
    """The header of a call that a server would accept, unless `fields` spoil it."""
    return {"t": "call", "id": request_id, "m": method, "ms": 30_000, "b": {}, **fields}


class RawPeer:
    """A TCP connection to `endpoint`; every wait ends after 20 s."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()

    def greet(self) -> RawPeer:
        """ZMTP's handshake."""
        self.socket.sendall(greeting())
        self.exactly(64)
        ready = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
        self.socket.sendall(frame(ready, COMMAND))
        assert self.frame()[0] & COMMAND
        return self

    def hello(self) -> RawPeer:
        """ZMTP's handshake and ours."""
        self.greet().send(HELLO)
        assert self.header()["t"] == "welcome"
        return self

    def send(self, header: dict[str, Any], *arrays: bytes) -> None:
        self.socket.sendall(message(msgpack.packb(header), *arrays))

    def header(self) -> dict[str, Any]:
        """The header of the next message, whose other parts are dropped."""
        flags, body = self.frame()
        while flags & MORE:
            flags, _ = self.frame()
        return dict(msgpack.unpackb(body))

    def frame(self) -> tuple[int, bytes]:
        flags = self.exactly(1)[0]
        return flags, self.exactly(int.from_bytes(self.exactly(8 if flags & LONG else 1), "big"))

    def exactly(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            received = self.socket.recv(num_bytes - len(data))
            if not received:
                raise ConnectionResetError("the server closed the connection")
            data += received
        return bytes(data)

    def is_closed_by_server(self) -> bool:
        """Wait until the server closes; False if it sends something instead."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True


def send_until_closed(peer: RawPeer, chunks: Sequence[bytes]) -> int:
    """Send the chunks over and over until the server closes; returns how many bytes it took."""
    num_bytes = 0
    try:
        while num_bytes < 1 << 34:
            for chunk in chunks:
                peer.socket.sendall(chunk)
                num_bytes += len(chunk)
    except ConnectionError:
        return num_bytes
    raise AssertionError("the server took 16 GiB")
