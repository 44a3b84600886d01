"""Memory that a client shares with a server on its machine: large arrays lie there, and messages
say where (docs/protocol.md). That is more than twice as fast as sending them.

The client makes the memory and alone allocates in it: for the arrays of a call, and for those of
its reply. Both are free again once the call is answered, because the server copies a call's arrays
before it handles them, and answers once. A connection's memory ends with it.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import resource
import secrets
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.errors import BadRequest
from trireme.rpc import frames
from trireme.rpc.frames import Array, Header, Place

_log = logging.getLogger("trireme.rpc")

Bytes = NDArray[np.uint8]

ARRAY_BYTES_MIN = 1 << 16
"""Of an array that is put there: a smaller one costs less as a part of the message."""

_ALIGNMENT = 64  # a cache line
_NAME = re.compile(r"trireme-[0-9a-f]{32}")
# Committed at a time. Before Linux 6.9 a signal undoes what is not complete, so a profiler's timer
# could undo a larger step again and again.
_COMMIT_BYTES = 1 << 20
_ROOM_MARGIN = 1.25  # a reply's size changes from batch to batch


class SharedMemory:
    """The memory of a client's connection. Not thread-safe. Raises OSError: the system has none."""

    def __init__(self, num_bytes: int) -> None:
        self._name = f"trireme-{secrets.token_hex(16)}"
        self._descriptor = _new_memory(self._name)
        # At the latest when this is dropped, also by what interrupts a call.
        self._close = weakref.finalize(self, os.close, self._descriptor)
        open_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if open_max != resource.RLIM_INFINITY and self._descriptor > open_max // 2:
            raise OSError(f"file descriptors are for connections: {open_max} may be open")
        os.ftruncate(self._descriptor, num_bytes)
        # So that a server's access cannot fail later.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
        self.bytes = _mapped(self._descriptor, num_bytes)
        self._free = [(0, 0)]  # (start, size) in order; no bytes until the server says how many
        self._allocated: dict[int, int] = {}  # start -> size
        self._num_committed = 0
        self._reply_bytes: dict[str, int] = {}  # by method: the room that its replies needed

    def offer(self) -> Header:
        """What a server opens it by; see `opened`."""
        return {
            "pid": os.getpid(),
            "fd": self._descriptor,
            "name": self._name,
            "bytes": len(self.bytes),
        }

    def use(self, num_bytes: int) -> None:
        """Allocate in the first bytes, which the server has opened."""
        self._free = [(0, min(num_bytes, len(self.bytes)))]

    def put(self, arrays: Sequence[Array]) -> tuple[list[Place], int | None]:
        """Copy the large ones of these arrays; returns the place of each, and the start of what is
        allocated for all. None: nothing is.
        """
        num_bytes = sum(_padded(array.nbytes) for array in arrays if _is_large(array))
        if not num_bytes or (start := self._allocate(num_bytes)) is None:
            return [], None
        return copy_into(self.bytes, start, num_bytes, arrays), start

    def reserve(self, method: str) -> tuple[int, int] | None:
        """Allocate room for a reply to this method; returns (start, size). None: its replies need
        none, or there is none.
        """
        size = self._reply_bytes.get(method, 0)
        if not size or (start := self._allocate(size)) is None:
            return None
        return start, size

    def note_reply(self, method: str, arrays: Sequence[Array]) -> None:
        """Remember how much room a reply needed."""
        num_bytes = sum(_padded(array.nbytes) for array in arrays if _is_large(array))
        if num_bytes > self._reply_bytes.get(method, 0) / _ROOM_MARGIN:
            self._reply_bytes[method] = _padded(int(num_bytes * _ROOM_MARGIN))

    def free(self, start: int) -> None:
        """Free what `put` or `reserve` has allocated."""
        size = self._allocated.pop(start)
        joined: list[tuple[int, int]] = []
        for first, length in sorted([*self._free, (start, size)]):
            if joined and sum(joined[-1]) == first:
                first, length = joined[-1][0], joined.pop()[1] + length
            joined.append((first, length))
        self._free = joined

    def close(self) -> None:
        """Return the memory to the system, once the server has closed it, too."""
        self._close()

    def _allocate(self, size: int) -> int | None:
        """The start of `size` bytes, the lowest: what was used before is in the caches. None: there
        are no such bytes.
        """
        for i, (start, length) in enumerate(self._free):
            if length >= size and self._commit(start + size):
                self._free[i] = (start + size, length - size)
                self._allocated[start] = size
                return start
        return None

    def _commit(self, end: int) -> bool:
        """Have the system back the memory up to here. Otherwise a process that touches it would end
        where the system has no more.
        """
        try:
            while (left := end - self._num_committed) > 0:
                step = min(left, _COMMIT_BYTES)
                os.posix_fallocate(self._descriptor, self._num_committed, step)
                self._num_committed += step
        except OSError as error:
            _log.warning("shared memory: no more than %d bytes: %s", self._num_committed, error)
            self._free = [
                (start, min(size, self._num_committed - start))
                for start, size in self._free
                if start < self._num_committed
            ]
            return False
        return True


def opened(offer: Any, num_bytes_max: int) -> Bytes:
    """The memory that a client of this machine offers, or its first part.

    The server may be allowed to open more than the client: so it opens only memory that bears the
    name that the client says, which nobody else can know, and that cannot shrink. What else stands
    there is not even opened: a terminal, say, would become that of the server.

    Raises:
        BadRequest: no valid offer.
        OSError: there is no such memory: the client is in a container, or of another user.
    """
    if type(offer) is not dict:
        raise BadRequest(f"rpc: expected shared as a map, found {repr(offer)[:80]}")
    offer = {"t": frames.HELLO, **offer}
    pid, descriptor = (frames.int_field(offer, name, high=1 << 31) for name in ("pid", "fd"))
    name, size = frames.str_field(offer, "name"), frames.int_field(offer, "bytes", low=1)
    if not _NAME.fullmatch(name):
        raise BadRequest(f"rpc: expected the name of shared memory, found {name[:80]!r}")
    with ExitStack() as undo:
        path = f"/proc/{pid}/fd/{descriptor}"
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)  # which does not open the file
        undo.callback(os.close, place)
        undo.callback(os.close, sample := _new_memory("trireme"))
        # Only the kernel makes files there. Huge pages lie elsewhere: they can run out.
        is_memory = "" != _mount(place) == _mount(sample)
        place_path = f"/proc/self/fd/{place}"
        if not is_memory or os.readlink(place_path) != f"/memfd:{name} (deleted)":
            raise FileNotFoundError(f"{path} is something else")
        undo.callback(os.close, own := os.open(place_path, os.O_RDWR | os.O_CLOEXEC))
        is_sealed = fcntl.fcntl(own, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not is_sealed or os.fstat(own).st_size < size:
            raise PermissionError(f"{path} can shrink, or is smaller than {size} bytes")
        return _mapped(own, min(size, num_bytes_max))


def copy_into(memory: Bytes, start: int, num_bytes: int, arrays: Sequence[Array]) -> list[Place]:
    """Copy large arrays to memory[start : start + num_bytes], as many as fit; returns the places of
    all, none if none fits. Those that `frames.pack` refuses are left to it.
    """
    places: list[Place] = []
    end = start + num_bytes
    for array in arrays:
        if not _is_large(array) or start + array.nbytes > end:
            places.append(None)
            continue
        memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        places.append(start)
        start += _padded(array.nbytes)
    return places if any(place is not None for place in places) else []


def _is_large(array: Array) -> bool:
    return array.nbytes >= ARRAY_BYTES_MIN and frames.can_send(array)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _new_memory(name: str) -> int:
    """The descriptor of memory that has a name. Raises OSError."""
    if not hasattr(os, "memfd_create"):  # a Python that was built for an old system
        raise OSError("this Python has no os.memfd_create")
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _mount(descriptor: int) -> str:
    """The mount in which a file lies, without asking its file system, which may not answer."""
    with open(f"/proc/self/fdinfo/{descriptor}") as info:
        return next((line for line in info if line.startswith("mnt_id:")), "")


def _mapped(descriptor: int, num_bytes: int) -> Bytes:
    # Children of a fork get it, too: one that did not would still unmap it at its end, and thereby
    # whatever it has put there.
    return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
