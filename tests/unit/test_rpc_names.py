"""Names of servers: looked up by those who listen and by those who connect."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from trireme.errors import Unavailable
from trireme.rpc import Reply, RpcClient, Server
from trireme.rpc.auth import numeric_address


@pytest.mark.parametrize("names", [["::1"], ["127.0.0.1", "::1"], ["::1", "127.0.0.1"]])
def test_a_server_is_reached_at_whichever_address_of_its_name_it_listens(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last one, as servers bind the first that their own machine looks up."""
    real = socket.getaddrinfo
    absent = ["no address yet"]

    def look_up(host: str, *arguments: Any, **options: Any) -> list[Any]:
        if host != "server.example":
            return real(host, *arguments, **options)
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


def test_a_name_without_an_address_is_named() -> None:
    with RpcClient(name="w") as client, pytest.raises(Unavailable, match="the name has no address"):
        client.call("trireme.invalid:6000", "echo", timeout_s=0.3)


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
