"""Free ports for processes whose addresses have to be known before they start."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence


def free_ports(hosts: Sequence[str], num: int) -> int:
    """The first of `num` ports in a row that are free on all hosts."""
    for _ in range(100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = stack.enter_context(socket.socket())
            first.bind((hosts[0], 0))
            port = int(first.getsockname()[1])
            others = [(host, port + i) for host in hosts for i in range(num)][1:]
            for address in others:
                stack.enter_context(socket.socket()).bind(address)
            return port
    raise AssertionError(f"no {num} free ports in a row on {hosts}")
