"""rpc between processes over loopback, beside a plain TCP socket that moves the same bytes.

pull_push       a training step of 50,000 rows of 16 floats: pull (0.4 MB of keys there, 3.2 MB of
                rows back), then push (3.6 MB of keys and gradients there, an empty answer back)
echo            one call that carries 3.6 MB there and back
round_trip      one empty call after another, from one client
small_requests  empty calls from two client processes, 32 on their way at a time, to one server

    python benchmarks/micro/bench_rpc.py [--smoke]

prints one JSON line per metric: {"bench", "metric", "value", "unit", "vs", "ratio", "ratio_min",
"ratio_max"}. Runs with rpc and with TCP alternate; the median of the repeats counts, and every
repeat checks what arrived. The TCP rival is as fast as we could make one: a thread blocked in
recv_into a buffer that is reused, sendall from the array's own memory, Nagle off, and no protocol
beyond the sizes that both sides know.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from trireme.rpc import Call, Client, Reply, Request, Server

DIM = 16


def pull_push(num_rows: int = 50_000, seconds: float = 1.0, repeats: int = 5) -> dict[str, Any]:
    """Bytes per second of the steps of a training job, rpc and TCP."""
    return _compare("pull_push", _RpcSteps, _TcpSteps, num_rows, seconds, repeats)


def echo(num_rows: int = 50_000, seconds: float = 1.0, repeats: int = 5) -> dict[str, Any]:
    """Bytes per second of one call that carries as much back as there."""
    return _compare("echo", _RpcEcho, _TcpEcho, num_rows, seconds, repeats)


def round_trip(seconds: float = 1.0, repeats: int = 5) -> dict[str, Any]:
    """Empty calls per second of one client that waits for each."""
    with _process("rpc", 1) as at, Client(name="bench") as client:
        rates = [
            _rate(lambda: client.call(at, "nothing", timeout_s=30), seconds) for _ in range(repeats)
        ]
    return _line("round_trip", statistics.median(rates), "calls/s")


def small_requests(seconds: float = 1.0, repeats: int = 5, clients: int = 2) -> dict[str, Any]:
    """Empty calls per second that one server process answers to several client processes."""
    rates = []
    with _process("rpc", 1) as at:
        command = [sys.executable, __file__, "--role", "small", "--at", at]
        command += ["--seconds", str(seconds)]
        for _ in range(repeats):
            processes = [
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(clients)
            ]
            rates.append(sum(float(process.communicate(timeout=60)[0]) for process in processes))
    return _line("small_requests", statistics.median(rates), "calls/s")


# What one step is


class _RpcSteps:
    def __init__(self, client: Client, at: str, num_rows: int) -> None:
        self._client, self._at = client, at
        self._keys_K, self._rows_KD = _arrays(num_rows)

    def __call__(self) -> None:
        self._rows = self._client.call(self._at, "pull", {}, [self._keys_K], timeout_s=30).arrays[0]
        self._client.call(self._at, "push", {}, [self._keys_K, self._rows_KD], timeout_s=30)

    def check(self) -> None:
        np.testing.assert_array_equal(self._rows, self._rows_KD)


class _RpcEcho(_RpcSteps):
    def __call__(self) -> None:
        arrays = [self._keys_K, self._rows_KD]
        self._rows = self._client.call(self._at, "echo", {}, arrays, timeout_s=30).arrays[1]


class _TcpSteps:
    """A request is one byte, 'p' or 'e', and the arrays; an answer is the arrays, or one byte."""

    def __init__(self, tcp: socket.socket, num_rows: int) -> None:
        self._tcp = tcp
        self._keys_K, self._rows_KD = _arrays(num_rows)
        self._keys, self._rows = np.empty_like(self._keys_K), np.empty_like(self._rows_KD)
        self._ack = bytearray(1)

    def __call__(self) -> None:
        self._tcp.sendall(b"p")
        self._tcp.sendall(_bytes(self._keys_K))
        _fill(self._tcp, _bytes(self._rows))
        self._tcp.sendall(_bytes(self._keys_K))
        self._tcp.sendall(_bytes(self._rows_KD))
        _fill(self._tcp, memoryview(self._ack))

    def check(self) -> None:
        np.testing.assert_array_equal(self._rows, self._rows_KD)


class _TcpEcho(_TcpSteps):
    def __call__(self) -> None:
        self._tcp.sendall(b"e")
        self._tcp.sendall(_bytes(self._keys_K))
        self._tcp.sendall(_bytes(self._rows_KD))
        _fill(self._tcp, _bytes(self._keys))
        _fill(self._tcp, _bytes(self._rows))


def _arrays(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    keys_K = random.integers(0, 2**63, num_rows, dtype=np.uint64)
    return keys_K, random.random((num_rows, DIM), dtype=np.float32)


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _fill(tcp: socket.socket, buffer: memoryview) -> None:
    while buffer:
        num_bytes = tcp.recv_into(buffer, flags=socket.MSG_WAITALL)
        if num_bytes == 0:
            raise ConnectionError("the other side closed")
        buffer = buffer[num_bytes:]


# Measuring


def _compare(
    metric: str,
    rpc_step: type[_RpcSteps],
    tcp_step: type[_TcpSteps],
    num_rows: int,
    seconds: float,
    repeats: int,
) -> dict[str, Any]:
    rates, ratios = [], []
    with (
        _process("rpc", num_rows) as rpc_at,
        _process("tcp", num_rows) as tcp_at,
        Client(name="bench") as client,
        _connect(tcp_at) as connection,
    ):
        rpc, tcp = rpc_step(client, rpc_at, num_rows), tcp_step(connection, num_rows)
        _rate(tcp, seconds / 4)  # warm up
        _rate(rpc, seconds / 4)
        for _ in range(repeats):
            tcp_rate, rpc_rate = _rate(tcp, seconds), _rate(rpc, seconds)
            rates.append(rpc_rate * 2 * num_rows * (8 + 4 * DIM) / 1e9)
            ratios.append(rpc_rate / tcp_rate)
            rpc.check()
            tcp.check()
    ratio = {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    line = _line(metric, statistics.median(rates), "GB/s") | {"vs": "tcp"}
    return line | {name: round(value, 3) for name, value in ratio.items()}


def _rate(step: Callable[[], object], seconds: float) -> float:
    """Steps per second."""
    count, start = 0, time.perf_counter()
    while True:
        step()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return count / elapsed


def _line(metric: str, value: float, unit: str) -> dict[str, Any]:
    line = {"bench": "rpc", "metric": metric, "value": round(value, 3), "unit": unit}
    return line | {"vs": None, "ratio": None, "ratio_min": None, "ratio_max": None}


# The other process


@contextmanager
def _process(role: str, num_rows: int) -> Iterator[str]:
    command = [sys.executable, __file__, "--role", role, "--rows", str(num_rows)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()  # it ends when its input does
        process.wait(timeout=30)
        process.stdout.close()


@contextmanager
def _connect(at: str) -> Iterator[socket.socket]:
    host, _, port = at.rpartition(":")
    with socket.create_connection((host, int(port))) as tcp:
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield tcp


def _serve_rpc(num_rows: int) -> None:
    _, rows_KD = _arrays(num_rows)

    def pull(request: Request) -> Reply:
        assert request.arrays[0].shape == (num_rows,)
        return Reply({}, [rows_KD])

    def push(request: Request) -> None:
        assert request.arrays[1].shape == (num_rows, DIM)

    def echo(request: Request) -> Reply:
        return Reply(request.body, request.arrays)

    handlers = {"pull": pull, "push": push, "echo": echo, "nothing": lambda request: None}
    with Server("127.0.0.1:0", handlers, name="bench") as server:
        print(server.endpoint, flush=True)
        sys.stdin.read()


def _serve_tcp(num_rows: int) -> None:
    keys_K, rows_KD = _arrays(num_rows)
    keys, grads = np.empty_like(keys_K), np.empty_like(rows_KD)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
        tcp, _ = listener.accept()
    with tcp:
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while kind := tcp.recv(1):
            _fill(tcp, _bytes(keys))
            if kind == b"p":
                tcp.sendall(_bytes(rows_KD))
                _fill(tcp, _bytes(keys))
            _fill(tcp, _bytes(grads))
            if kind == b"p":
                tcp.sendall(b"k")
            else:
                tcp.sendall(_bytes(keys))
                tcp.sendall(_bytes(grads))


def _call_small(at: str, seconds: float) -> None:
    with Client(name="bench") as client:
        calls = [Call(at, "nothing") for _ in range(32)]
        client.call_all(calls, timeout_s=30)
        print(_rate(lambda: client.call_all(calls, timeout_s=30), seconds) * len(calls))


def run(smoke: bool = False) -> Iterator[dict[str, Any]]:
    """All metrics; with `smoke` as small as they can be."""
    seconds, repeats, num_rows = (0.02, 1, 100) if smoke else (1.0, 5, 50_000)
    yield pull_push(num_rows, seconds, repeats)
    yield echo(num_rows, seconds, repeats)
    yield round_trip(seconds, repeats)
    yield small_requests(seconds, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description="rpc beside plain TCP, over loopback")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--role", choices=["rpc", "tcp", "small"], help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=50_000, help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "rpc":
        _serve_rpc(options.rows)
    elif options.role == "tcp":
        _serve_tcp(options.rows)
    elif options.role == "small":
        _call_small(options.at, options.seconds)
    else:
        for line in run(smoke=options.smoke):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
