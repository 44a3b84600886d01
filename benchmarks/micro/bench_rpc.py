"""rpc between processes over loopback, beside a plain TCP socket that moves the same bytes.

pull_push       a training step of 50,000 rows of 16 floats: pull (0.4 MB of keys, answered by 3.2
                MB of rows), then push (3.6 MB of keys and gradients, and an empty answer)
echo            one call with 3.6 MB in each direction
..._shared      the same, the arrays in memory that both processes share
round_trip      one empty call after another, from one client
small_requests  empty calls from two client processes, 32 in flight at a time, to one server

Every measurement checks the received values. The TCP rival is as fast as possible: a thread that
blocks in recv_into a reused buffer, sendall from the array's memory, Nagle off, and no protocol
beyond sizes that both sides know.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.harness import Claim, Contest, Run, Settings
from trireme.rpc import Call, Limits, Reply, Request, RpcClient, Server

DIM = 16
_CLIENTS = 2
_MODULE = (sys.executable, "-m", "benchmarks.micro.bench_rpc")


def contests(settings: Settings) -> list[Contest]:
    seconds = settings.pick(smoke=0.02, real=1.0)
    num_rows = settings.pick(smoke=100, real=50_000)
    return [
        _moves("pull_push", _RpcSteps, _TcpSteps, num_rows, seconds, settings),
        _moves("echo", _RpcEcho, _TcpEcho, num_rows, seconds, settings),
        _moves("pull_push_shared", _RpcSteps, _TcpSteps, num_rows, seconds, settings),
        _moves("echo_shared", _RpcEcho, _TcpEcho, num_rows, seconds, settings),
        _calls("round_trip", _round_trip, seconds, settings),
        _calls("small_requests", _small_requests, seconds, settings),
    ]


def _moves(
    metric: str,
    rpc_step: type[_RpcSteps],
    tcp_step: type[_TcpSteps],
    num_rows: int,
    seconds: float,
    settings: Settings,
) -> Contest:
    """Bytes per second of rpc beside those of TCP."""
    limits = Limits() if metric.endswith("_shared") else Limits(shared_bytes_max=0)
    return Contest(
        {
            metric: lambda _: _rpc_rate(rpc_step, num_rows, seconds, limits),
            "tcp": lambda _: _tcp_rate(tcp_step, num_rows, seconds),
        },
        [Claim(metric, metric, ("tcp",), unit="GB/s")],
        settings.rounds,
        num_warm_ups=settings.pick(smoke=0, real=1),
    )


def _calls(
    metric: str, measure: Callable[[float], float], seconds: float, settings: Settings
) -> Contest:
    return Contest(
        {metric: lambda _: Run(measure(seconds))},
        [Claim(metric, metric, unit="calls/s")],
        settings.rounds,
    )


def _rpc_rate(step_type: type[_RpcSteps], num_rows: int, seconds: float, limits: Limits) -> Run:
    with _process("rpc", num_rows) as at, RpcClient(name="bench", limits=limits) as client:
        return _move(step_type(client, at, num_rows), num_rows, seconds)


def _tcp_rate(step_type: type[_TcpSteps], num_rows: int, seconds: float) -> Run:
    with _process("tcp", num_rows) as at, _connect(at) as connection:
        return _move(step_type(connection, num_rows), num_rows, seconds)


def _move(step: _RpcSteps | _TcpSteps, num_rows: int, seconds: float) -> Run:
    """GB/s of steps that move the keys and the rows twice."""
    _rate(step, seconds / 4)  # warm up
    steps_per_s = _rate(step, seconds)
    step.check()
    return Run(steps_per_s * 2 * num_rows * (8 + 4 * DIM) / 1e9)


def _round_trip(seconds: float) -> float:
    """Empty calls per second of one client that waits for each."""
    with _process("rpc", 1) as at, RpcClient(name="bench") as client:
        return _rate(lambda: client.call(at, "nothing", timeout_s=30), seconds)


def _small_requests(seconds: float) -> float:
    """Empty calls per second that one server process answers to several client processes."""
    with _process("rpc", 1) as at:
        command = [*_MODULE, "--role", "small", "--at", at, "--seconds", str(seconds)]
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(_CLIENTS)
        ]
        return sum(float(process.communicate(timeout=60)[0]) for process in processes)


# What one step is


class _RpcSteps:
    def __init__(self, client: RpcClient, at: str, num_rows: int) -> None:
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


def _rate(step: Callable[[], object], seconds: float) -> float:
    """Steps per second."""
    count, start = 0, time.perf_counter()
    while True:
        step()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return count / elapsed


# The other processes


@contextmanager
def _process(role: str, num_rows: int) -> Iterator[str]:
    command = [*_MODULE, "--role", role, "--rows", str(num_rows)]
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
    with RpcClient(name="bench") as client:
        calls = [Call(at, "nothing") for _ in range(32)]
        client.call_all(calls, timeout_s=30)
        print(_rate(lambda: client.call_all(calls, timeout_s=30), seconds) * len(calls))


def main() -> None:
    """Run one of the other processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=["rpc", "tcp", "small"], required=True)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--at")
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args()
    if options.role == "rpc":
        _serve_rpc(options.rows)
    elif options.role == "tcp":
        _serve_tcp(options.rows)
    else:
        _call_small(options.at, options.seconds)


if __name__ == "__main__":
    main()
