"""Blocks addresses for a while: the kernel drops their attempts to connect.

A connection costs its server a tenth of a millisecond before the server knows that the peer is not
admitted. If connections from an address fail repeatedly, a socket filter (classic BPF, Linux) on
the listening socket drops further ones before this process runs. Open connections stay open: those
accepted meanwhile inherit the filter, but their addresses pass it. IPv6 addresses with the same
first 64 bits count as one, since a peer usually owns all of them; except local ones (fe80::/10,
fc00::/7), because all hosts of a network share these bits.

Threads: everything here is guarded by the server's lock.
"""

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket as sockets
import struct
import time
from collections.abc import Callable, Sequence

from trireme.rpc.rate_limited_log import RateLimitedLog

WINDOW_S = 1.0
BLOCK_S = 5.0
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


class AddressFilter:
    """Counts failed connections by address, and blocks addresses with more than `failures_max` in a
    second for 5 s.

    listener: the listening socket. If an earlier process left a filter on it, that is removed.
    """

    def __init__(
        self,
        listener: sockets.socket,
        failures_max: int,
        log: RateLimitedLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener, self._failures_max, self._log = listener, failures_max, log
        self._clock = clock
        self._failures: dict[bytes, int] = {}
        self._window_ends = 0.0
        self._blocked: dict[bytes, float] = {}  # address -> end of the block, in order of time
        self._is_possible = True
        self._filter()

    def __len__(self) -> int:
        return len(self._blocked)

    def failed(self, host: str) -> None:
        """A connection from this host ended before it was admitted, or broke the protocol."""
        now, source = self._clock(), _source(host)
        if now >= self._window_ends:
            self._failures.clear()
            self._window_ends = now + WINDOW_S
        count = self._failures.get(source, 0) + 1
        if count > 1 or len(self._failures) < _COUNTED_MAX:
            self._failures[source] = count
        if count > self._failures_max and source not in self._blocked and self._is_possible:
            self._block(source, now + BLOCK_S)
            if self._is_possible:
                self._log.warning(
                    "%d connections from %s have failed within a second: it is blocked for %g s",
                    count,
                    host,
                    BLOCK_S,
                )

    def check(self) -> None:
        """Unblock addresses whose time is over."""
        now = self._clock()
        over = [source for source, until in self._blocked.items() if until <= now]
        for source in over:
            del self._blocked[source]
        if over:
            self._filter()

    def close(self) -> None:
        """Unblock all: another process may share the socket."""
        self._blocked.clear()
        with contextlib.suppress(OSError):  # where none can be attached, which the log has said
            self._detach()

    def _block(self, source: bytes, until: float) -> None:
        while len(self._blocked) >= ADDRESSES_MAX:
            del self._blocked[next(iter(self._blocked))]
        self._blocked[source] = until
        self._filter()

    def _filter(self) -> None:
        """Make the kernel drop connections from the blocked addresses only."""
        if not self._is_possible:
            return
        try:
            if self._blocked:
                self._attach_what_fits()
            else:
                self._detach()
        except OSError as error:
            self._is_possible = False
            self._blocked.clear()
            self._log.warning("this system cannot block addresses, so all may connect: %s", error)

    def _attach_what_fits(self) -> None:
        """Attach a filter of as many addresses as the kernel has room for (net.core.optmem_max),
        for two filters while one replaces another. A filter that cannot be replaced is detached.
        """
        if self._takes_filter():
            return
        self._detach()
        while not self._takes_filter():
            num = len(self._blocked)
            if num == 1:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            for source in list(self._blocked)[: num // 2]:
                del self._blocked[source]
            self._log.warning(
                "the kernel has no room to block %d addresses: the older half may connect again",
                num,
            )

    def _takes_filter(self) -> bool:
        """Attach a filter of all blocked addresses; False: the kernel has no room for it."""
        try:
            self._attach(filter_of(list(self._blocked)))
        except OSError as error:
            if error.errno == errno.ENOMEM:
                return False
            self._detach()
            raise
        return True

    def _attach(self, program: list[Instruction]) -> None:
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *op) for op in program))
        described = struct.pack("@HP", len(program), ctypes.addressof(code))
        self._listener.setsockopt(sockets.SOL_SOCKET, _SO_ATTACH_FILTER, described)

    def _detach(self) -> None:
        try:
            self._listener.setsockopt(sockets.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        except OSError as error:
            if error.errno != errno.ENOENT:  # there is none
                raise


def filter_of(sources: Sequence[bytes]) -> list[Instruction]:
    """A BPF program that drops packets from these addresses: 4 bytes, or 8 or 16 of IPv6."""
    drop, take = (_RETURN, 0, 0, 0), (_RETURN, 0, 0, _ALL)
    ipv4: list[Instruction] = [(_LOAD_WORD, 0, 0, _IP + _IPV4_SOURCE)]
    ipv6: list[Instruction] = []
    for source in sources:
        if len(source) == 4:
            ipv4 += [(_JUMP_IF_EQUAL, 0, 1, _word(source)), drop]
        else:
            for at in range(0, len(source), 4):
                num_left = (len(source) - at) // 2 - 1  # instructions up to and including the drop
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
    """The bytes of an address that are compared."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped.packed
        is_local = address.is_link_local or address in _UNIQUE_LOCAL
        return address.packed if is_local else address.packed[:8]
    return address.packed
