"""Calls between processes over ZeroMQ: deadlines, retries, limits, authentication."""

from trireme.rpc.auth import (
    ClientKeys,
    KeyPair,
    ServerKeys,
    make_keys,
    new_keys,
    read_keys,
    write_keys,
)
from trireme.rpc.held_bytes import HeldBytes
from trireme.rpc.limits import Limits
from trireme.rpc.messages import (
    Call,
    CallObserver,
    Deferred,
    Ended,
    Handler,
    Reply,
    Request,
    RequestObserver,
    Usage,
    Waiting,
)
from trireme.rpc.rpc_client import RpcClient
from trireme.rpc.server import Server, connections_within, open_files_needed
from trireme.rpc.sockets import allow_descriptors, interface_address, own_host

__all__ = [
    "Call",
    "CallObserver",
    "ClientKeys",
    "Deferred",
    "Ended",
    "Handler",
    "HeldBytes",
    "KeyPair",
    "Limits",
    "Reply",
    "Request",
    "RequestObserver",
    "RpcClient",
    "Server",
    "ServerKeys",
    "Usage",
    "Waiting",
    "allow_descriptors",
    "connections_within",
    "interface_address",
    "make_keys",
    "new_keys",
    "open_files_needed",
    "own_host",
    "read_keys",
    "write_keys",
]
