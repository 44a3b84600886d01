"""Peers without a key: the admitted client is served on, memory does not grow, and none of their
bytes reaches a handler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.macro import attackers
from benchmarks.macro.attackers import Target
from trireme.launch.key_folder import client_keys, make_folders, make_shared_folder, server_keys
from trireme.rpc import Limits, Reply, Request, RpcClient, Server, rate_limited_log
from trireme.rpc.address_filter import AddressFilter
from trireme.rpc.rate_limited_log import RateLimitedLog

MIB = 1 << 20
ATTACK_S = 0.5
# Attackers share the good client's address here, so that it must not be blocked.
LIMITS = Limits(connections_max=50, handshake_timeout_s=0.5, failures_max=1_000_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys of a server, a good client and an attacker; "bad" is listed, "other" is not."""
    make_folders(tmp_path / "keys", ["good", "bad"])
    make_shared_folder(tmp_path / "other")
    trusted = (tmp_path / "keys" / "good" / "server.pub").read_text()
    (tmp_path / "other" / "server.pub").write_text(trusted)
    return tmp_path


@pytest.fixture
def seen() -> list[str]:
    """Who has got through to a handler."""
    return []


@pytest.fixture
def server(folder: Path, seen: list[str]) -> Iterator[Server]:
    with serve(folder, seen, LIMITS) as server:
        yield server


@contextmanager
def serve(
    folder: Path, seen: list[str], limits: Limits, listen_fd: int | None = None
) -> Iterator[Server]:
    """A server that a good client calls before and after, over one connection."""

    def ready(request: Request) -> Reply:
        seen.append(request.key)
        return Reply()

    keys = server_keys(folder / "keys" / "server")
    good = client_keys(folder / "keys" / "good")
    handlers = {"server.ready": ready}
    with (
        Server(
            "127.0.0.1:0", handlers, name="s", keys=keys, limits=limits, listen_fd=listen_fd
        ) as server,
        RpcClient(name="good", keys=good) as client,
    ):
        client.call(server.endpoint, "server.ready", timeout_s=30)
        connection = client._connections[server.endpoint]._socket
        yield server
        client.call(server.endpoint, "server.ready", timeout_s=30)
        assert client._connections[server.endpoint]._socket is connection


@pytest.fixture
def call_anew(folder: Path) -> Callable[[Server], None]:
    """A good client comes, calls and goes."""
    keys = client_keys(folder / "keys" / "good")

    def call(server: Server) -> None:
        with RpcClient(name="newcomer", keys=keys) as newcomer:
            newcomer.call(server.endpoint, "server.ready", timeout_s=30)

    return call


def memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("kind", list(attackers.KINDS))
def test_a_stranger_costs_no_memory_and_reaches_no_handler(
    server: Server, folder: Path, seen: list[str], call_anew: Callable[[Server], None], kind: str
) -> None:
    keys = folder / ("keys/bad" if kind == "replay" else "other")
    target = Target(server.endpoint, ATTACK_S, keys)
    before = memory_bytes()
    attack = threading.Thread(target=attackers.KINDS[kind], args=(target,))
    attack.start()
    call_anew(server)
    while attack.is_alive():
        call_anew(server)
    attack.join()
    assert memory_bytes() - before < 64 * MIB
    listed = {"good"} | ({"bad"} if kind == "replay" else set())  # it is recorded first
    assert set(seen) == {client_keys(folder / "keys" / name).own.public for name in listed}


def test_a_replayed_handshake_is_good_for_nothing(
    server: Server, folder: Path, seen: list[str]
) -> None:
    """The bytes that were admitted once are sent again: the server answers with its handshake, to
    keys that the sender does not have, and closes.
    """
    target = Target(server.endpoint, 30, folder / "keys" / "bad")
    recorded = attackers.record(target)
    assert len(recorded) > 500
    num_seen = len(seen)
    for end in (len(recorded), len(recorded) // 2, 64 + 200):
        answer = b""
        with contextlib.suppress(ConnectionError), target.connect() as peer:
            peer.settimeout(20)
            peer.sendall(recorded[:end])
            while data := peer.recv(1 << 16):
                answer += data
        assert b"server.ready" not in answer
        assert len(answer) < 1000
    assert len(seen) == num_seen


def test_silent_connections_block_no_other_client(
    server: Server, call_anew: Callable[[Server], None]
) -> None:
    """Twice as many as the server takes: the oldest go, and a new good client comes in."""
    host, _, port = server.endpoint.rpartition(":")
    with ExitStack() as stack:
        for _ in range(2 * LIMITS.connections_max):
            with contextlib.suppress(ConnectionError):
                # A while: as many wait for accept() as the server takes, others come again.
                made = socket.create_connection((host, int(port)), timeout=30)
                stack.enter_context(made)
        call_anew(server)


def test_an_address_that_was_refused_too_often_is_shunned(
    folder: Path, seen: list[str], call_anew: Callable[[Server], None]
) -> None:
    with serve(folder, seen, Limits(failures_max=1)) as server:
        deadline = time.monotonic() + 60
        while strangers_are_heard(server.endpoint):
            assert time.monotonic() < deadline, "the server still hears 127.0.0.2"
        call_anew(server)


def strangers_are_heard(endpoint: str) -> bool:
    """Twenty connections from 127.0.0.2 that break the protocol at about the same time."""
    host, _, port = endpoint.rpartition(":")
    with ExitStack() as stack:
        for _ in range(20):
            try:
                # Over loopback the kernel answers at once or never.
                made = socket.create_connection((host, int(port)), 0.5, ("127.0.0.2", 0))
            except TimeoutError:
                return False
            peer = stack.enter_context(made)
            with contextlib.suppress(ConnectionError):
                peer.sendall(attackers.greeting(b"NULL") + bytes(64))
    return True


FLOOD = Limits(connections_max=50, failures_max=1_000_000, handshake_timeout_s=100)
NUM_CLOSED = 31


def flood(server: Server, stack: ExitStack) -> None:
    """More silent connections than the server takes, with that of the good client: of these the
    oldest are closed.
    """
    host, _, port = server.endpoint.rpartition(":")
    peers = [
        stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
        for _ in range(FLOOD.connections_max - 1 + NUM_CLOSED)
    ]
    for peer in peers[:NUM_CLOSED]:
        with contextlib.suppress(ConnectionError):
            while peer.recv(1 << 16):
                pass


def num_logged(caplog: pytest.LogCaptureFixture) -> int:
    """How many were closed, as the log says, with the lines that were left out."""
    logged = [record.getMessage() for record in list(caplog.records)]
    left_out = [int(line.split()[0]) for line in logged if line.endswith("about strangers")]
    return sum("connections are open" in line for line in logged) + sum(left_out)


def test_a_flood_of_strangers_leaves_lines_of_the_log_to_others(
    folder: Path, seen: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    keys = client_keys(folder / "keys" / "good")
    with (
        ExitStack() as stack,
        serve(folder, seen, FLOOD) as server,
        RpcClient(name="second", keys=keys) as second,
    ):
        second.call(server.endpoint, "server.ready", timeout_s=30)
        flood(server, stack)
        with server._lock:
            (peer,) = (peer for peer in server._socket.peers if peer.name == "second")
            server._socket.peers.drop(peer, "for a test")
            server._socket.address_filter._log.warning("something about an address")
    assert re.search("closed the connection of second.*: for a test", caplog.text)
    assert "something about an address" in caplog.text
    # One more if the second client came back, as it does at once, before the server ended.
    assert num_logged(caplog) in (NUM_CLOSED, NUM_CLOSED + 1)


def test_lines_that_were_left_out_are_counted_when_their_time_is_over(
    folder: Path,
    seen: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rate_limited_log, "WINDOW_S", 0.5)
    with ExitStack() as stack, serve(folder, seen, FLOOD) as server:
        flood(server, stack)
        deadline, tick = time.monotonic() + 60, threading.Event()
        while num_logged(caplog) < NUM_CLOSED:
            assert time.monotonic() < deadline, "lines that were left out are not counted"
            tick.wait(0.02)


def test_a_server_hears_all_at_a_socket_that_it_is_handed(folder: Path, seen: list[str]) -> None:
    """Whoever listened there before may have been killed while it blocked somebody."""
    with socket.create_server(("127.0.0.1", 0)) as launcher:
        blocked = AddressFilter(
            launcher, 1, RateLimitedLog(logging.getLogger("trireme.rpc"), "addresses")
        )
        for _ in range(2):
            blocked.failed("127.0.0.1")
        assert len(blocked) == 1
        with serve(folder, seen, LIMITS, os.dup(launcher.fileno())):
            pass
