"""CURVE keys: listed clients are admitted, everybody else gets no answer."""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from zmtp import RawPeer, call, greeting, message

from trireme.errors import BadRequest, Unavailable
from trireme.rpc import (
    ClientKeys,
    KeyPair,
    Limits,
    Reply,
    Request,
    RpcClient,
    Server,
    ServerKeys,
    make_keys,
    read_keys,
)

LIMITS = Limits(handshake_timeout_s=0.5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Key files of a server, an admitted worker and a stranger."""
    for name in ("server", "worker", "stranger"):
        make_keys(tmp_path / name)
    note = f"{read_keys(tmp_path / 'worker').public} worker 0"
    (tmp_path / "admitted").write_text(f"# who may connect\n\n{note}\n")
    return tmp_path


@pytest.fixture
def seen() -> list[Request]:
    return []


@pytest.fixture
def server(folder: Path, seen: list[Request]) -> Iterator[Server]:
    def echo(request: Request) -> Reply:
        seen.append(request)
        return Reply(request.body, request.arrays)

    keys = ServerKeys.read(folder / "server", folder / "admitted")
    with Server("127.0.0.1:0", {"echo": echo}, name="s", keys=keys, limits=LIMITS) as server:
        yield server


def client(folder: Path, name: str, server: str = "server.pub") -> RpcClient:
    keys = ClientKeys.read(folder / name, folder / server)
    return RpcClient(name=name, keys=keys, limits=LIMITS)


def test_admitted_key_is_served(server: Server, folder: Path, seen: list[Request]) -> None:
    array = np.arange(1_000_000, dtype=np.float32)
    with client(folder, "worker") as worker:
        reply = worker.call(server.endpoint, "echo", {"a": 1}, [array], timeout_s=30)
    np.testing.assert_array_equal(reply.arrays[0], array)
    assert seen[0].key == read_keys(folder / "worker").public


def test_key_that_is_not_listed_is_refused_at_once(
    server: Server, folder: Path, seen: list[Request], caplog: pytest.LogCaptureFixture
) -> None:
    with client(folder, "stranger") as stranger:
        for _ in range(2):
            with pytest.raises(Unavailable, match="does not admit this client's key"):
                stranger.call(server.endpoint, "echo", timeout_s=30)
    assert not seen
    assert read_keys(folder / "stranger").public in caplog.text


def test_client_without_key_gets_nothing(server: Server, seen: list[Request]) -> None:
    with (
        RpcClient(name="open", limits=LIMITS) as plain,
        pytest.raises(Unavailable, match="keys on one side only"),
    ):
        plain.call(server.endpoint, "echo", timeout_s=0.5)
    assert not seen


def test_client_with_another_server_key_gets_nothing(
    server: Server, folder: Path, seen: list[Request]
) -> None:
    with (
        client(folder, "worker", "stranger.pub") as misled,
        pytest.raises(Unavailable, match="wrong server key"),
    ):
        misled.call(server.endpoint, "echo", timeout_s=0.5)
    assert not seen


def test_client_with_keys_does_not_talk_to_an_open_server(folder: Path) -> None:
    with (
        Server("127.0.0.1:0", {"echo": lambda request: Reply()}, name="open") as server,
        client(folder, "worker") as worker,
        pytest.raises(Unavailable, match="keys on one side only"),
    ):
        worker.call(server.endpoint, "echo", timeout_s=0.5)


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"CURVE"])
def test_peer_that_skips_the_handshake_gets_nothing(
    server: Server, seen: list[Request], mechanism: bytes
) -> None:
    with RawPeer(server.endpoint) as peer:
        peer.socket.sendall(
            greeting().replace(b"NULL".ljust(20, b"\0"), mechanism.ljust(20, b"\0"))
        )
        try:
            peer.exactly(64)
            peer.socket.sendall(message(b"\x81\xa1t\xa5hello") * 10)
            while not peer.is_closed_by_server():
                pass
        except ConnectionError:
            pass
    assert not seen


def test_open_server_binds_loopback_only(caplog: pytest.LogCaptureFixture) -> None:
    for bind in ("0.0.0.0:0", "*:0", "[::]:0", ":0"):
        with pytest.raises(BadRequest, match="only a loopback address"):
            Server(bind, {}, name="s")
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        Server("0.0.0.0:0", {}, name="s", insecure=True)
    assert "open to everyone" in caplog.text


def test_server_with_keys_may_bind_any_address(folder: Path) -> None:
    keys = ServerKeys.read(folder / "server", folder / "admitted")
    with Server("0.0.0.0:0", {"echo": lambda request: Reply()}, name="s", keys=keys) as server:
        at = server.endpoint.replace("0.0.0.0", "127.0.0.1")
        with client(folder, "worker") as worker:
            worker.call(at, "echo", timeout_s=30)


@pytest.mark.parametrize("bind", ["", "localhost", "127.0.0.1:x", "127.0.0.1:70000", "no.such:1"])
def test_address_that_cannot_be_bound_is_refused(bind: str) -> None:
    with pytest.raises(BadRequest, match="bind"):
        Server(bind, {}, name="s")


def test_address_in_use_is_refused() -> None:
    with Server("127.0.0.1:0", {}, name="first") as first:
        second = Server(first.endpoint, {}, name="second")
        with pytest.raises(BadRequest, match="cannot bind"):
            second.start()


def test_secret_key_stays_secret(folder: Path) -> None:
    keys = read_keys(folder / "server")
    assert keys.secret not in repr(keys)
    assert stat.S_IMODE((folder / "server").stat().st_mode) == 0o600
    assert keys.secret not in (folder / "server.pub").read_text()


def test_keys_are_not_overwritten(folder: Path) -> None:
    before = (folder / "server").read_text()
    with pytest.raises(BadRequest, match="must not exist"):
        make_keys(folder / "server")
    assert (folder / "server").read_text() == before


@pytest.mark.parametrize("text", ["", "x" * 40, "public a secret b", "\xff"])
def test_file_that_holds_no_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, "latin-1")
    with pytest.raises(BadRequest):
        read_keys(path)
    with pytest.raises(BadRequest):
        ServerKeys.read(tmp_path / "absent", path)
    with pytest.raises(BadRequest):
        KeyPair(public="~" * 40, secret=text)


def test_raw_call_helper_is_what_an_open_server_accepts() -> None:
    with (
        Server("127.0.0.1:0", {"echo": lambda request: Reply()}, name="s") as server,
        RawPeer(server.endpoint) as peer,
    ):
        peer.hello().send(call(9))
        assert peer.header() == {"t": "reply", "id": 9, "b": {}}
