"""Addresses that are not heard for a while: the kernel drops their attempts to connect.

A connection costs its server a tenth of a millisecond before it turns out that its peer is not
admitted. From an address whose connections fail again and again they are therefore dropped by a
socket filter (classic BPF, Linux) on the listening socket, before anything of this process runs.
Connections that are open stay so: the kernel gives a copy of the filter to those that it accepts
meanwhile, which are of addresses that pass. IPv6 addresses are taken for one another if their first
64 bits are equal: a peer usually has all the others too. Not so local ones (fe80::/10, fc00::/7):
all hosts of a network have these bits in common.

Threads: everything here is guarded by the server's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket as sockets
import struct
import time
from collections.abc import Callable, Sequence

from trireme.rpc.sparse_log import SparseLog

WINDOW_S = 1.0
SHUN_S = 5.0
ADDRESSES_MAX = 256  # of 9 instructions at most; the kernel takes 4096
_COUNTED_MAX = 4096

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
# Instructions of classic BPF: linux/bpf_common.h. Loads are relative to the IP header.
_LOAD_WORD, _LOAD_BYTE, _SHIFT_RIGHT = 0x20, 0x30, 0x74
_JUMP, _JUMP_IF_EQUAL, _RETURN = 0x05, 0x15, 0x06
_IP = 0xFFF00000  # SKF_NET_OFF
_IPV4_SOURCE, _IPV6_SOURCE = 12, 8
_ALL = 0xFFFFFFFF
_UNIQUE_LOCAL = ipaddress.IPv6Network("fc00::/7")

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


class Shun:
    """Counts failed connections by address, and shuns those that have more than `failures_max`
    in a second, for 5 s.

    listener: the listening socket. If it was handed over, it may bring a filter of whoever had it
        before, which is taken off.
    """

    def __init__(
        self,
        listener: sockets.socket,
        failures_max: int,
        log: SparseLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener, self._failures_max, self._log = listener, failures_max, log
        self._clock = clock
        self._failures: dict[bytes, int] = {}
        self._window_ends = 0.0
        self._shunned: dict[bytes, float] = {}  # address -> until when, the first to end first
        self._is_possible = True
        self._filter()

    def __len__(self) -> int:
        return len(self._shunned)

    def failed(self, host: str) -> None:
        """A connection from there has ended without having been admitted, or broke the protocol."""
        now, source = self._clock(), _source(host)
        if now >= self._window_ends:
            self._failures.clear()
            self._window_ends = now + WINDOW_S
        count = self._failures.get(source, 0) + 1
        if count > 1 or len(self._failures) < _COUNTED_MAX:
            self._failures[source] = count
        if count > self._failures_max and source not in self._shunned and self._is_possible:
            self._shun(source, now + SHUN_S)
            if self._is_possible:
                self._log.warning(
                    "%d connections from %s have failed within a second: it is not heard for %g s",
                    count,
                    host,
                    SHUN_S,
                )

    def check(self) -> None:
        """Hear those again whose time is over."""
        now = self._clock()
        over = [source for source, until in self._shunned.items() if until <= now]
        for source in over:
            del self._shunned[source]
        if over:
            self._filter()

    def close(self) -> None:
        """Hear all: the socket may be another process' too."""
        self._shunned.clear()
        with contextlib.suppress(OSError):  # where none can be attached, which the log has said
            self._detach()

    def _shun(self, source: bytes, until: float) -> None:
        while len(self._shunned) >= ADDRESSES_MAX:
            del self._shunned[next(iter(self._shunned))]
        self._shunned[source] = until
        self._filter()

    def _filter(self) -> None:
        """Have the kernel drop those that are shunned, and nobody else."""
        if not self._is_possible:
            return
        try:
            if self._shunned:
                self._attach_what_fits()
            else:
                self._detach()
        except OSError as error:
            self._is_possible = False
            self._shunned.clear()
            self._log.warning("this system can shun no address, so all are heard: %s", error)

    def _attach_what_fits(self) -> None:
        """The kernel has room for so much per socket (net.core.optmem_max), and while a filter
        takes another's place for both. A filter that cannot be replaced may not stay.
        """
        if self._takes_filter():
            return
        self._detach()
        while not self._takes_filter():
            num = len(self._shunned)
            if num == 1:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            for source in list(self._shunned)[: num // 2]:
                del self._shunned[source]
            self._log.warning(
                "the kernel has no room to shun %d addresses: the older half is heard again", num
            )

    def _takes_filter(self) -> bool:
        """Whether the kernel had room for it."""
        try:
            self._attach(filter_of(list(self._shunned)))
        except OSError as error:
            if error.errno == errno.ENOMEM:
                return False
            self._detach()
            raise
        return True

    def _attach(self, program: Sequence[Instruction]) -> None:
        code = ctypes.create_string_buffer(
            b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
        )
        described = struct.pack("@HP", len(program), ctypes.addressof(code))
        self._listener.setsockopt(sockets.SOL_SOCKET, _SO_ATTACH_FILTER, described)

    def _detach(self) -> None:
        try:
            self._listener.setsockopt(sockets.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        except OSError as error:
            if error.errno != errno.ENOENT:  # there is none
                raise


def filter_of(sources: Sequence[bytes]) -> list[Instruction]:
    """A program that drops what comes from one of these (4 bytes, or of IPv6 the first 8 or 16)."""
    drop, take = (_RETURN, 0, 0, 0), (_RETURN, 0, 0, _ALL)
    ipv4: list[Instruction] = [(_LOAD_WORD, 0, 0, _IP + _IPV4_SOURCE)]
    ipv6: list[Instruction] = []
    for source in sources:
        if len(source) == 4:
            ipv4 += [(_JUMP_IF_EQUAL, 0, 1, _word(source)), drop]
        else:
            for at in range(0, len(source), 4):
                num_left = (len(source) - at) // 2 - 1  # instructions, to behind the drop
                ipv6.append((_LOAD_WORD, 0, 0, _IP + _IPV6_SOURCE + at))
                ipv6.append((_JUMP_IF_EQUAL, 0, num_left, _word(source[at:])))
            ipv6.append(drop)
    ipv4.append(take)
    return [
        *((_LOAD_BYTE, 0, 0, _IP), (_SHIFT_RIGHT, 0, 0, 4)),  # the version of IP
        *((_JUMP_IF_EQUAL, 1, 0, 4), (_JUMP, 0, 0, len(ipv4))),
        *ipv4,
        *ipv6,
        take,
    ]


def _word(data: bytes) -> int:
    return int.from_bytes(data[:4], "big")


def _source(host: str) -> bytes:
    """What of an address is shunned."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped.packed
        is_local = address.is_link_local or address in _UNIQUE_LOCAL
        return address.packed if is_local else address.packed[:8]
    return address.packed
