"""ZeroMQ sockets, their options, and the limit of open files that they need."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import socket as sockets
import struct
from concurrent.futures import Future
from threading import Thread
from typing import TypeAlias

import zmq

from trireme.errors import BadRequest, start_thread
from trireme.rpc.limits import Limits

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[Socket]"

# Smaller parts are copied: sending a buffer without a copy wakes a thread (pyzmq's collector) when
# it is free again, which costs more than copying the rows of a small batch: 80 of 570 us of a pull.
COPY_BYTES_MAX = 1 << 18

# The kernel notices hosts that vanish (power, network): it probes idle connections after 30 s, 3
# times, 10 s apart, and closes a connection that accepts no bytes for 60 s. ZeroMQ's own heartbeats
# are off: they count a peer as dead while one large part is still arriving.
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_COUNT = 30, 10, 3
_UNACKNOWLEDGED_MS_MAX = 60_000

_READABLE = int(zmq.POLLIN)  # as an enum, its "&" would cost more than asking the socket

_CONNECT_TIMEOUT_MS = 5_000

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux: see netdevice(7)

OTHER_FILES = 1024  # of data, logs and checkpoints


def allow_descriptors(num: int, purpose: str) -> None:
    """Raise the soft limit so that `num` connections' descriptors and others fit. Raises
    BadRequest: the hard limit is lower; it names `purpose`.
    """
    needed = num + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise BadRequest(
                f"{purpose}: expected a hard limit of {needed} open files or more, found {hard}:"
                " raise it (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def own_host(server: str, interface: str | None = None) -> str:
    """The address of this machine at which other processes can reach it: that of the network
    device, or the one on the way to a server. Raises BadRequest: as `interface_address`.
    """
    if interface is not None:
        return interface_address(interface)
    host, _, port = server.rpartition(":")
    family, kind, _, _, address = sockets.getaddrinfo(
        host.strip("[]"), int(port), type=sockets.SOCK_DGRAM
    )[0]
    with sockets.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        own = str(probe.getsockname()[0])
    return f"[{own}]" if family == sockets.AF_INET6 else own


def interface_address(interface: str) -> str:
    """The IPv4 address of a network device. Raises BadRequest: there is none."""
    name = struct.pack("256s", interface.encode()[:15])
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _GET_ADDRESS, name)
        except OSError as error:
            names = ", ".join(name for _, name in sockets.if_nameindex())
            raise BadRequest(
                f"interface: expected a network device with an IPv4 address, of {names}, found"
                f" {interface!r}: {error.strerror}"
            ) from error
    return sockets.inet_ntoa(answer[20:24])


def new_context() -> Context:
    """A context with one I/O thread, which moves several gigabytes a second."""
    context: Context = zmq.Context(io_threads=1)
    # ZeroMQ's default is 1023; this is its limit. A client's connection takes three.
    context.set(zmq.MAX_SOCKETS, 65535)
    return context


def looked_up(endpoint: str) -> Future[list[str]]:
    """The numeric addresses of "host:port", which ZeroMQ would look up as IPv4 alone, or as IPv6
    alone. Names in a thread: a resolver may take long. Its errors: OSError, the host has none.
    """
    host, _, port = endpoint.rpartition(":")
    addresses = Future[list[str]]()

    def look_up(flags: int = 0) -> None:
        kind = sockets.SOCK_STREAM
        infos = sockets.getaddrinfo(host.strip("[]"), int(port), type=kind, flags=flags)
        numbers = dict.fromkeys(str(info[4][0]) for info in infos)
        addresses.set_result([f"[{n}]:{port}" if ":" in n else f"{n}:{port}" for n in numbers])

    def look_name_up() -> None:
        try:
            look_up()
        except (OSError, UnicodeError) as error:
            addresses.set_exception(error)

    try:
        look_up(sockets.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        start_thread(Thread(target=look_name_up, name="trireme-lookup", daemon=True))
    return addresses


def url(socket: Socket, address: str) -> str:
    """ZeroMQ's name of "host:port"; enables IPv6 for an address in brackets."""
    socket.setsockopt(zmq.IPV6, int(address.startswith("[")))
    return f"tcp://{address}"


def listening(address: str, limits: Limits, listen_fd: int | None) -> sockets.socket:
    """A socket that listens at "host:port", new or handed over, for ROUTER to accept from. Raises
    OSError.
    """
    if listen_fd is not None:
        os.set_inheritable(listen_fd, False)
        return sockets.socket(fileno=listen_fd)
    host, _, port = address.rpartition(":")
    family = sockets.AF_INET6 if host.startswith("[") else sockets.AF_INET
    made = sockets.socket(family, sockets.SOCK_STREAM)
    try:
        made.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        if family == sockets.AF_INET6:
            made.setsockopt(sockets.IPPROTO_IPV6, sockets.IPV6_V6ONLY, 0)  # [::] is 0.0.0.0 too
        made.bind((host.strip("[]"), int(port)))
        # The backlog: all workers of a job may connect at the same moment.
        made.listen(limits.connections_max)
    except OSError:
        made.close()
        raise
    return made


def router(context: Context, limits: Limits) -> Socket:
    """A server's socket, not yet bound."""
    socket: Socket = context.socket(zmq.ROUTER)
    _common(socket, limits)
    # A full or unknown destination is an error; without this ROUTER drops replies silently.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A new connection may not take over the routing id of an open one.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    # Complete messages of one connection that wait inside ZeroMQ, which then stops reading it. A
    # client within its credit never gets there.
    socket.setsockopt(zmq.RCVHWM, limits.requests_max + 1)
    # Replies that wait for one connection: twice the credit, since sent replies free credit.
    socket.setsockopt(zmq.SNDHWM, 2 * limits.requests_max)
    # Time for the last replies to leave on close.
    socket.setsockopt(zmq.LINGER, 500)
    return socket


def dealer(context: Context, limits: Limits) -> Socket:
    """A client's socket for one connection, not yet connected."""
    socket: Socket = context.socket(zmq.DEALER)
    _common(socket, limits)
    # One socket is one connection: the client reconnects itself, since it knows what to send again.
    # ZeroMQ would do so in an hour; with "never" it would drop the queue of a lost connection, and
    # with it a reply that came just before.
    socket.setsockopt(zmq.RECONNECT_IVL, 3_600_000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    # The client counts requests and bytes (its credit); ZeroMQ need not.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    # A request that was given up must not be sent.
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def edges(*sources: Socket | int) -> select.epoll:
    """An edge-triggered epoll over sockets and eventfds: each event wakes one waiting thread, which
    must process all input. An eventfd needs no reading: each write is an edge.
    """
    epoll = select.epoll()
    for source in sources:
        descriptor = source if isinstance(source, int) else source.getsockopt(zmq.FD)
        epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)  # type: ignore[arg-type]
    return epoll


def has_input(socket: Socket) -> bool:
    events: int = socket.getsockopt(zmq.EVENTS)  # type: ignore[assignment]
    return events & _READABLE != 0


def _common(socket: Socket, limits: Limits) -> None:
    socket.copy_threshold = COPY_BYTES_MAX
    # Of one part. The sum is checked when a message is complete, and bounded by peers.py before.
    socket.setsockopt(zmq.MAXMSGSIZE, limits.message_bytes_max)
    # A connection without a handshake of ZMTP is closed.
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(limits.handshake_timeout_s * 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_COUNT)
    socket.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS_MAX)
    # SNDBUF and RCVBUF are left to the kernel, which adapts them.
