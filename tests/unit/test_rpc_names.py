"""Names of servers: looked up by those who listen and by those who connect."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from tests.conditions import WAIT_S
from trireme.errors import Unavailable
from trireme.rpc import Call, Reply, Request, RpcClient, Server
from trireme.rpc.auth import numeric_address


@pytest.mark.parametrize("names", [["::1"], ["127.0.0.1", "::1"], ["::1", "127.0.0.1"]])
def test_a_server_is_reached_at_whichever_address_of_its_name_it_listens(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last one, as servers bind the first that their own machine looks up."""
    real = socket.getaddrinfo
    absent = ["no address yet"]

    def look_up(host: str, *arguments: Any, flags: int = 0, **options: Any) -> list[Any]:
        if host != "server.example" or flags:  # it is asked first whether it is a number
            return real(host, *arguments, flags=flags, **options)
        if absent:
            raise socket.gaierror(socket.EAI_NONAME, absent.pop())
        return [info for name in names for info in real(name, *arguments, **options)]

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    at = f"[{names[-1]}]" if ":" in names[-1] else names[-1]
    with (
        Server(f"{at}:0", {"echo": lambda request: Reply(request.body)}, name="s") as server,
        RpcClient(name="w") as client,
    ):
        port = server.endpoint.rpartition(":")[2]
        reply = client.call(f"server.example:{port}", "echo", {"n": 1}, timeout_s=60)
        assert reply.body == {"n": 1}


def test_a_name_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    with RpcClient(name="w") as client, pytest.raises(Unavailable, match="the name has no address"):
        client.call("trireme.invalid:6000", "echo", timeout_s=1)


def test_a_name_that_takes_long_holds_up_no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    other, real = threading.Event(), socket.getaddrinfo

    def look_up(host: str, *arguments: Any, flags: int = 0, **options: Any) -> list[Any]:
        if host != "server.example" or flags:
            return real(host, *arguments, flags=flags, **options)
        assert other.wait(WAIT_S), "the other server has not been called"
        return real("127.0.0.1", *arguments, **options)

    def answer(_: Request) -> Reply:
        other.set()
        return Reply()

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    with Server("127.0.0.1:0", {"a": answer}, name="s") as server, RpcClient(name="w") as client:
        named = f"server.example:{server.endpoint.rpartition(':')[2]}"
        calls = [Call(address, "a", {}, []) for address in (named, server.endpoint)]
        assert len(client.call_all(calls, timeout_s=WAIT_S)) == 2


def test_a_name_that_is_never_looked_up_is_waited_for_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, may_end = socket.getaddrinfo, threading.Event()

    def look_up(*arguments: Any, flags: int = 0, **options: Any) -> list[Any]:
        if not flags:
            may_end.wait(WAIT_S)
        return real(*arguments, flags=flags, **options)

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    with RpcClient(name="w") as client, pytest.raises(Unavailable, match="is being looked up"):
        client.call("server.example:6000", "echo", timeout_s=0.3)
    may_end.set()


def test_a_name_that_is_loopback_here_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    info = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [info])
    assert numeric_address("ps0:0", None, insecure=False) == "127.0.1.1:0"
    assert "ps0 is 127.0.1.1 here, which no other machine reaches: listen on 0.0.0.0" in caplog.text
    caplog.clear()
    assert numeric_address("127.0.1.1:0", None, insecure=False) == "127.0.1.1:0"
    assert caplog.text == ""
