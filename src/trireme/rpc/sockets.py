"""ZeroMQ sockets with every option chosen on purpose."""

from __future__ import annotations

import os
import select
import socket as sockets
from typing import TypeAlias

import zmq

from trireme.rpc.limits import Limits

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[Socket]"

# Below this many bytes ZeroMQ gets a copy: handing a buffer over and hearing back when it is free
# wakes a thread (pyzmq's collector), which costs more than copying a small array.
COPY_BYTES_MAX = 1 << 16

# A host that vanished (power, network) is noticed by the kernel: idle connections are probed after
# 30 s, three times, 10 s apart; a connection that takes no bytes for 60 s is closed. ZeroMQ's own
# heartbeats are off: they count a peer as dead while one large part is still arriving.
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_COUNT = 30, 10, 3
_UNACKNOWLEDGED_MS_MAX = 60_000

_READABLE = int(zmq.POLLIN)  # as an enum, its "&" would cost more than asking the socket

_CONNECT_TIMEOUT_MS = 5_000


def new_context() -> Context:
    """One I/O thread: it moves several gigabytes a second, and more of them only take cores from
    the others.
    """
    context: Context = zmq.Context(io_threads=1)
    # A socket beyond ZeroMQ's default of 1023 is an error; an embedded cluster may have more
    # servers.
    context.set(zmq.MAX_SOCKETS, 8192)
    return context


def url(socket: Socket, address: str) -> str:
    """ZeroMQ's name of "host:port"; turns IPv6 on for an address in brackets."""
    socket.setsockopt(zmq.IPV6, int(address.startswith("[")))
    return f"tcp://{address}"


def listening(address: str, limits: Limits, listen_fd: int | None) -> sockets.socket:
    """A socket that listens at "host:port", made here or handed over; for ROUTER to accept from.

    Raises:
        OSError: nothing can listen there.
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
        # Those that wait for accept(): all workers of a job may come in the same moment.
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
    # A newcomer may not take over the routing id of a connection that lives.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    # Complete messages of one connection that wait inside ZeroMQ: it stops reading the connection
    # there. A client within its credit never gets so far.
    socket.setsockopt(zmq.RCVHWM, limits.requests_max + 1)
    # Replies that wait for one connection: the credit twice, since replies that were sent free it.
    socket.setsockopt(zmq.SNDHWM, 2 * limits.requests_max)
    # On close: how long the last replies may take to leave.
    socket.setsockopt(zmq.LINGER, 500)
    return socket


def dealer(context: Context, limits: Limits) -> Socket:
    """A client's socket for one connection, not yet connected."""
    socket: Socket = context.socket(zmq.DEALER)
    _common(socket, limits)
    # One socket is one connection: the client reconnects by itself, since only it knows what to
    # send again. ZeroMQ would in an hour: told never to, it ends the connection's queue when the
    # connection is lost, and a reply that came just before is lost with it.
    socket.setsockopt(zmq.RECONNECT_IVL, 3_600_000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    # The client counts requests and bytes (its credit); ZeroMQ need not.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    # A request that was given up is not to be sent any more.
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def edges(*sources: Socket | int) -> select.epoll:
    """An edge-triggered epoll over sockets and eventfds: each event wakes one waiting thread.

    Whoever is woken handles all that is there. An eventfd needs no reading: each write is an edge.
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
    # One part; the sum of a message's parts is checked when it is complete (and peers.py bounds it
    # before).
    socket.setsockopt(zmq.MAXMSGSIZE, limits.message_bytes_max)
    # A connection that says nothing, or not ZMTP, is closed.
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(limits.handshake_timeout_s * 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_COUNT)
    socket.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS_MAX)
    # SNDBUF and RCVBUF stay with the kernel, which adapts them; fixed sizes would be cut to its
    # maximum.
