"""A port in use is reported with the process that has it."""

from __future__ import annotations

import os
import socket

import pytest

from trireme.rpc import port_user
from trireme.rpc.port_user import advice_on_port


def test_the_process_that_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        advice = advice_on_port(taken.getsockname()[1])
    assert advice.startswith(f"process {os.getpid()} listens there (")
    assert advice.endswith(f"`kill {os.getpid()}` ends it; or choose another port")


def test_a_port_of_nobody_whom_this_user_sees_is_left_to_ss() -> None:
    with socket.socket() as bound:  # which does not listen
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert f"`ss -ltnp 'sport = :{port}'` names it" in advice_on_port(port)


def test_a_long_command_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_user, "_COMMAND_CHARACTERS", 3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "...)" in advice_on_port(taken.getsockname()[1])
