"""Addresses of this machine, and sockets bound to them.

The launcher binds the addresses of the processes that listen. So a port in use is an error before
anything has started, and the kernel gives the port to no other program while its process is down.
The launcher never listens on this socket: connections to a process that is down are refused. A
process gets another socket, which listens (TRIREME_LISTEN_FD).
"""

import contextlib
import errno
import socket
from collections.abc import Sequence

from trireme.errors import BadRequest

_BACKLOG = 128


def listen_at(address: str, held: socket.socket) -> socket.socket:
    """A socket that listens at the address to which another one is bound. The caller closes it.
    Raises BadRequest: another program listens there.
    """
    listening = _open(held.family)
    try:
        listening.bind(held.getsockname())
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise _refused(address, error) from error
    return listening


def _open(family: int) -> socket.socket:
    """A TCP socket that may share its address with one that does not listen or has just closed."""
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return opened


def bind_free(
    num: int, interface: str | None, stack: contextlib.ExitStack
) -> tuple[tuple[str, ...], dict[int, socket.socket]]:
    """Free ports of this machine: their addresses, and sockets bound to them."""
    host = "127.0.0.1"
    if interface is not None:
        from trireme.rpc import interface_address  # loads ZeroMQ

        host = interface_address(interface)
    sockets = {i: stack.enter_context(_open(socket.AF_INET)) for i in range(num)}
    for held in sockets.values():
        held.bind((host, 0))
    return tuple(f"{host}:{held.getsockname()[1]}" for held in sockets.values()), sockets


def bind_local(
    option: str, addresses: Sequence[str], host: str | None, stack: contextlib.ExitStack
) -> dict[int, socket.socket]:
    """Sockets bound to the addresses of the option that belong to this machine, by position. host:
    as of `is_local`.
    """
    if len(set(addresses)) != len(addresses):
        raise BadRequest(
            f"launch: expected different addresses in {option}, found {','.join(addresses)}"
        )
    sockets = {}
    for index, address in enumerate(addresses):
        held = _bind(address) if _may_be_local(address, host) else None
        if held is not None:
            sockets[index] = stack.enter_context(held)
    return sockets


def is_local(address: str, host: str | None = None) -> bool:
    """Whether the host of `host:port` is this machine; any port will do. host: of this machine
    alone, if it has several.
    """
    held = _bind(address, any_port=True) if _may_be_local(address, host) else None
    if held is None:
        return False
    held.close()
    return True


def _may_be_local(address: str, host: str | None) -> bool:
    return host is None or address.rpartition(":")[0] == host


def _bind(address: str, *, any_port: bool = False) -> socket.socket | None:
    """A socket bound to the address; None: the kernel refuses it, as of another machine.

    any_port: bound to a port that the kernel chooses, which other machines do not know.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not (0 if any_port else 1) <= int(port) < 65536:
        number = "; a number of processes: --server_num, --worker_num" if not host else ""
        raise BadRequest(
            "launch: expected host:port,host:port,... with ports of 1 to 65535, found"
            f" {address!r}{number}"
        )
    try:
        infos = socket.getaddrinfo(
            host.strip("[]"), 0 if any_port else int(port), type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise BadRequest(f"launch: expected a host that has an address, found {host!r}") from error
    family, _, _, _, sockaddr = infos[0]
    held = _open(family)
    try:
        held.bind(sockaddr)
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise _refused(address, error) from error
    return held


def _refused(address: str, error: OSError) -> BadRequest:
    advice = "choose another port"
    if error.errno == errno.EADDRINUSE:
        from trireme.rpc.port_user import advice_on_port  # it comes with ZeroMQ and NumPy

        advice = advice_on_port(int(address.rpartition(":")[2]))
    return BadRequest(f"launch: expected to listen on {address}, found: {error.strerror}; {advice}")
