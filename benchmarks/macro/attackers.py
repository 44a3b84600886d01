"""Hostile peers, one kind a run: `python -m benchmarks.macro.attackers KIND --at HOST:PORT ...`.

Each attacks as fast as its threads can until its time is over, and prints its number of attempts.

no_key         ZMTP's greeting without CURVE, again and again
wrong_key      a whole CURVE handshake with a key that is not listed
replay         the recorded bytes of an admitted client's connection
huge_header    frames that announce 2 GB, followed by bytes
endless_parts  parts without an end
tiny_requests  small messages without a handshake, a million if there is time
nothing        connections that stay silent, as many as are accepted
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import json
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import zmq

from trireme.launch.key_folder import client_keys
from trireme.rpc import ClientKeys, RpcClient
from trireme.rpc.auth import secure_client

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_MORE, _LONG = 1, 2
_SILENT = 1000
_THREADS = 8  # connections that break the protocol at the same time
_CONNECT_S = 0.5  # after this a connection is tried again
_BLOCK = 1 << 16
_CALL = msgpack.packb({"t": "call", "id": 1, "m": "server.ready", "ms": 1000, "b": {}})


def greeting(mechanism: bytes) -> bytes:
    return _GREETING + mechanism.ljust(20, b"\0") + bytes(32)


class Target:
    """The address of the server, and the end time of the attack."""

    def __init__(self, at: str, seconds: float, keys: Path | None) -> None:
        host, _, port = at.rpartition(":")
        self.at, self.address = at, (host, int(port))
        self.keys = None if keys is None else client_keys(keys)
        self._deadline = time.monotonic() + seconds
        self._lock, self._recorded = threading.Lock(), b""

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=_CONNECT_S)

    def recorded(self) -> bytes:
        """The bytes of one connection of an admitted client, for all threads."""
        with self._lock:
            self._recorded = self._recorded or record(self)
            return self._recorded

    def own_keys(self) -> ClientKeys:
        assert self.keys is not None, "expected --keys for this kind"
        return self.keys


def _send_and_wait(target: Target, data: bytes) -> None:
    """One connection: send, and read until the server closes it."""
    with contextlib.suppress(OSError), target.connect() as peer:
        peer.sendall(data)
        while peer.recv(_BLOCK) and not target.is_over:
            pass


def _again_and_again(target: Target, data: bytes) -> int:
    for number in itertools.count():
        if target.is_over:
            return number
        _send_and_wait(target, data)
    raise AssertionError


def no_key(target: Target) -> int:
    return _again_and_again(target, greeting(b"NULL") + bytes(64))


def tiny_requests(target: Target) -> int:
    message = bytes([0, len(_CALL)]) + _CALL
    return _again_and_again(target, greeting(b"NULL") + message * 1000)


def endless_parts(target: Target) -> int:
    return _again_and_again(target, greeting(b"CURVE") + bytes([_MORE, 0]) * _BLOCK)


def huge_header(target: Target) -> int:
    announced = bytes([_LONG]) + (2 << 30).to_bytes(8, "big")
    return _again_and_again(target, greeting(b"CURVE") + announced + bytes(_BLOCK))


def wrong_key(target: Target) -> int:
    keys, context = target.own_keys(), zmq.Context()
    for number in itertools.count():
        if target.is_over:
            context.destroy(linger=0)
            return number
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            secure_client(dealer, keys)
            monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            dealer.connect(f"tcp://{target.at}")
            monitor.poll(1000)
            dealer.disable_monitor()
            monitor.close(linger=0)
    raise AssertionError


def replay(target: Target) -> int:
    return _again_and_again(target, target.recorded())


def nothing(target: Target) -> int:
    peers: deque[socket.socket] = deque()
    number = 0
    while not target.is_over:
        try:
            peers.append(target.connect())
            number += 1
            is_full = len(peers) > _SILENT
        except OSError as error:
            is_full = error.errno == errno.EMFILE
        if is_full and peers:  # the oldest were closed by the server
            peers.popleft().close()
    for peer in peers:
        peer.close()
    return number


def record(target: Target) -> bytes:
    """Record with a proxy what an admitted client sends in one connection."""
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        at = "{}:{}".format(*listener.getsockname())
        thread = threading.Thread(target=_pass_on, args=(listener, target, recorded), daemon=True)
        thread.start()
        with RpcClient(name="recorded", keys=target.own_keys()) as client:
            client.call(at, "server.ready", timeout_s=10)
    thread.join(10)
    return b"".join(recorded)


def _pass_on(listener: socket.socket, target: Target, recorded: list[bytes]) -> None:
    front, _ = listener.accept()
    with front, target.connect() as back:
        answers = threading.Thread(target=_pump, args=(back, front, []), daemon=True)
        answers.start()
        _pump(front, back, recorded)


def _pump(source: socket.socket, sink: socket.socket, recorded: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_BLOCK):
            recorded.append(data)
            sink.sendall(data)


KINDS: dict[str, Callable[[Target], int]] = {
    kind.__name__: kind
    for kind in (no_key, wrong_key, replay, huge_header, endless_parts, tiny_requests, nothing)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--at", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--keys", type=Path)
    arguments = parser.parse_args()
    sys.stdout.write("begins\n")
    sys.stdout.flush()
    target = Target(arguments.at, arguments.seconds, arguments.keys)
    with ThreadPoolExecutor(_THREADS) as pool:
        tries = sum(pool.map(KINDS[arguments.kind], [target] * _THREADS))
    sys.stdout.write(json.dumps({"tries": tries}) + "\n")


if __name__ == "__main__":
    main()
