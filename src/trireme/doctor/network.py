"""How processes of a job reach each other."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

from trireme.doctor.devices import rdma
from trireme.doctor.finding import Finding, note, ok, problem
from trireme.doctor.software import has
from trireme.errors import BadRequest

_LOOPBACK_TIMEOUT_S = 2.0
_NAME_TIMEOUT_S = 1.0


def network() -> Iterator[Finding]:
    yield _loopback()
    yield _addresses()
    yield _host_name(socket.gethostname())
    if devices := rdma():
        yield ok(f"RDMA: {', '.join(devices)}, for NCCL; servers and workers use TCP")
    else:
        yield ok("no device for RDMA; jobs use TCP")


def _loopback() -> Finding:
    """Connects to a socket of its own."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), _LOOPBACK_TIMEOUT_S).close()
    except OSError as error:
        return problem(
            f"127.0.0.1 cannot be reached: {error}",
            "processes of one machine talk over it: ip link set lo up, or no firewall there",
        )
    return ok("127.0.0.1 can be reached")


def _addresses() -> Finding:
    if not has("pyzmq"):
        return note("addresses are not listed: pyzmq cannot be imported", "install pyzmq first")
    from trireme.rpc import interface_address

    addresses = []
    for _, name in socket.if_nameindex():
        try:
            addresses.append(f"{name} {interface_address(name)}")
        except BadRequest:  # it has no IPv4 address
            continue
    others = [one for one in addresses if not one.startswith("lo ")]
    if not others:
        return note("no network device with an IPv4 address but loopback", "jobs stay on a machine")
    return ok(", ".join(addresses))


def _host_name(name: str) -> Finding:
    addresses: list[str] = []
    errors: list[Exception] = []

    def resolve() -> None:
        try:
            addresses.extend(str(info[4][0]) for info in socket.getaddrinfo(name, None))
        except (OSError, UnicodeError) as error:  # the latter of a name that is none
            errors.append(error)

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(_NAME_TIMEOUT_S)
    if addresses:
        return ok(f"the host name {name} is {addresses[0]}")
    why = errors[0] if errors else f"no answer in {_NAME_TIMEOUT_S:g} s"
    return note(
        f"the host name {name} has no address: {why}",
        "workers that meet each other (hybrid, collective) need it: name it in /etc/hosts, or give"
        " --interface",
    )
