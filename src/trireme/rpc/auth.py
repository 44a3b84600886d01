"""CurveZMQ: keys in files, and admission of clients.

A server has one key pair and a list of the clients' public keys. A peer without a listed key fails
in ZeroMQ's handshake: no byte of it reaches a handler.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket as sockets
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from trireme.errors import BadRequest
from trireme.rpc.rate_limited_log import RateLimitedLog
from trireme.rpc.sockets import Socket, has_input

_log = logging.getLogger("trireme.rpc")
_ZAP_DOMAIN = b"trireme"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPair:
    """A CURVE key pair, each half 40 characters of Z85. The secret half is left out of repr()."""

    public: str
    secret: str

    def __post_init__(self) -> None:
        _check("KeyPair", "public", self.public)
        _check("KeyPair", "secret", self.secret, is_secret=True)

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerKeys:
    """A server's key pair, and the public keys of the clients that it admits."""

    own: KeyPair
    admitted: frozenset[str]

    def __post_init__(self) -> None:
        for key in self.admitted:
            _check("ServerKeys", "admitted", key)

    @staticmethod
    def read(own: str | Path, admitted: str | Path) -> ServerKeys:
        """Read a file of `make_keys`, and a text file with one admitted public key per line.

        Lines that are empty or start with "# " are skipped (a key may start with "#"), as is text
        after a key.
        """
        return ServerKeys(own=read_keys(own), admitted=frozenset(_lines(Path(admitted))))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientKeys:
    """A client's key pair, and the public key of the servers."""

    own: KeyPair
    server: str

    def __post_init__(self) -> None:
        _check("ClientKeys", "server", self.server)

    @staticmethod
    def read(own: str | Path, server: str | Path) -> ClientKeys:
        """Read a file of `make_keys`, and a text file whose one line is the servers' public key."""
        keys = _lines(Path(server))
        if len(keys) != 1:
            raise BadRequest(
                f"ClientKeys.read: {server} must hold one public key, found {len(keys)}"
            )
        return ClientKeys(own=read_keys(own), server=keys[0])


def new_keys() -> KeyPair:
    """A new pair, from the kernel's random source."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return KeyPair(public=public, secret=secret)


def write_keys(path: str | Path, keys: KeyPair) -> None:
    """Write a pair to `path`, readable by its owner only. Raises BadRequest: the file exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise BadRequest(f"make_keys: {path} must not exist yet, found a file") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(f"public {keys.public}\nsecret {keys.secret}\n")


def make_keys(path: str | Path) -> KeyPair:
    """Make a new pair. Both halves are written to `path` (readable by its owner only), the public
    one to `path`.pub. `trireme keys` writes whole folders.

    Raises:
        BadRequest: the file exists; keys are never overwritten.
    """
    keys = new_keys()
    write_keys(path, keys)
    Path(f"{path}.pub").write_text(f"{keys.public}\n")
    return keys


def read_keys(path: str | Path) -> KeyPair:
    """Read a pair of `make_keys` or `trireme keys`; warns if others may read it too."""
    path = Path(path)
    words = _read(path).split()
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        _log.warning("%s holds a secret key and others may read it: mode %o, not 600", path, mode)
    if len(words) != 4 or words[0] != "public" or words[2] != "secret":
        raise BadRequest(
            f"read_keys: {path} must hold 'public KEY' and 'secret KEY', found other text"
        )
    return KeyPair(public=words[1], secret=words[3])


def secure_server(socket: Socket, keys: ServerKeys | None) -> None:
    """Make a server's socket require CURVE, if there are keys."""
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)


def secure_client(socket: Socket, keys: ClientKeys | None) -> None:
    """Make a client's socket prove its key and require the server's, if there are keys."""
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())


def answer_zap(socket: Socket, keys: ServerKeys, log: RateLimitedLog) -> None:
    """Answer the authentication requests at a server's ZAP socket (ZeroMQ RFC 27). libzmq makes one
    per CURVE connection, before it accepts any message of the peer.
    """
    while has_input(socket):
        parts = socket.recv_multipart(zmq.NOBLOCK)
        version, request_id, domain, address, _, mechanism, *credentials = parts
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and credentials else ""
        if version == b"1.0" and domain == _ZAP_DOMAIN and key in keys.admitted:
            answer = [b"200", b"OK", key.encode(), b""]
        else:
            log.warning(
                "refused a connection from %s: key %s is not admitted", address.decode(), key
            )
            answer = [b"400", b"key is not admitted", b"", b""]
        socket.send_multipart([b"1.0", request_id, *answer], zmq.NOBLOCK)


def numeric_address(bind: str, keys: ServerKeys | None, insecure: bool) -> str:
    """The "host:port" to bind, with the host as a number. A server without keys must not be
    reachable from other machines.

    Raises:
        BadRequest: `bind` is not "host:port" with a known host; or the host is not loopback, there
            are no keys, and `insecure` is not set.
    """
    host, colon, port = bind.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise BadRequest(f"Server: bind must be 'host:port', found {bind!r}")
    host = {"*": "0.0.0.0", "": "0.0.0.0"}.get(host, host.strip("[]"))
    try:
        number = sockets.getaddrinfo(host, int(port), type=sockets.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise BadRequest(f"Server: bind needs a known host, found {bind!r}: {error}") from error
    address = ipaddress.ip_address(str(number).partition("%")[0])
    if address.is_loopback and host not in ("localhost", str(number)):  # as Debian's /etc/hosts
        _log.warning(
            "%s is %s here, which no other machine reaches: listen on 0.0.0.0:%s instead, or change"
            " /etc/hosts",
            *(host, address, port),
        )
    if not address.is_loopback and keys is None:
        if not insecure:
            raise BadRequest(
                f"Server: without keys only a loopback address may be bound, found {bind!r}; "
                "give keys (--keys), or, on a network where every machine is trusted, "
                "insecure=True (--insecure)"
            )
        _log.warning("%s is open to everyone who can reach it: no keys, insecure=True", bind)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _check(subject: str, name: str, key: str, is_secret: bool = False) -> None:
    try:
        decoded = z85.decode(key.encode("ascii"))
    except (ValueError, KeyError, struct.error):
        decoded = b""
    if len(key) != 40 or len(decoded) != 32:
        shown = f"{len(key)} characters" if is_secret else repr(key)[:60]
        raise BadRequest(f"{subject}: {name} must be 40 characters of Z85, found {shown}")


def _lines(path: Path) -> list[str]:
    lines = (line.strip() for line in _read(path).splitlines())
    return [line.split()[0] for line in lines if line and not line.startswith("# ")]


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        there = ", ".join(one.name for one in sorted(path.parent.glob("*"))[:8])
        raise BadRequest(
            f"keys: {path} must be a readable text file, found: {error}; {path.parent} has"
            f" {there or 'nothing'} (servers need server.key and clients.pub, workers"
            " client.key and server.pub: `trireme keys`)"
        ) from error
