"""Calls and replies that are larger than a message: cut into pieces, and put together again.

The bytes of all parts of such a message, one after the other, are the stream that is cut. The first
piece announces the parts, so that a receiver decides whether to take them before it holds any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trireme.errors import BadRequest, ResourceExhausted
from trireme.rpc import frames
from trireme.rpc.frames import Array, Header
from trireme.rpc.limits import Limits

# Most bytes of a piece's header: its fields; and the size of each part, and the form of its slice.
_FIELDS_BYTES, _PART_BYTES = 128, 64
# Arrays of one piece: fewer than any receiver takes.
_SLICES_MAX = 64


def cut(parts: Sequence[Any], message_id: int, bytes_max: int) -> Iterator[list[Any]]:
    """The messages, of at most `bytes_max` bytes each, that carry the parts of a packed message.
    They hold views of the parts. Raises ResourceExhausted: so short a message has no room.
    """
    room = bytes_max - _FIELDS_BYTES - _PART_BYTES * len(parts)
    if room <= 0:
        raise ResourceExhausted(
            f"a message of {len(parts)} parts cannot be sent in pieces of {bytes_max} bytes"
        )
    header: Header = {"sizes": [len(part) for part in parts]}
    slices: list[Array] = []
    start = at = 0
    for part in parts:
        rest = np.frombuffer(part, np.uint8) if len(part) else np.empty(0, np.uint8)
        while len(rest):
            slices.append(rest[: room - (at - start)])
            at += len(slices[-1])
            rest = rest[len(slices[-1]) :]
            if at - start == room or len(slices) == _SLICES_MAX:
                yield _piece(message_id, start, header, slices)
                header, slices, start = {}, [], at
    if slices:
        yield _piece(message_id, start, header, slices)


def _piece(message_id: int, at: int, header: Header, slices: list[Array]) -> list[Any]:
    return frames.pack({"t": frames.PIECE, "id": message_id, "at": at, **header}, slices)


def announced_bytes(header: Header, limits: Limits) -> int:
    """The bytes of the message that a first piece announces, in total. Raises BadRequest, and
    ResourceExhausted beyond `total_bytes_max`.
    """
    sizes = header.get("sizes")
    if type(sizes) is not list or not all(
        type(n) is int and 0 <= n <= frames.ID_MAX for n in sizes
    ):
        raise BadRequest("rpc: a first piece needs 'sizes', the bytes of each part")
    if not 0 < len(sizes) <= limits.arrays_max + 1 or sizes[0] > limits.header_bytes_max:
        raise ResourceExhausted(
            f"a message may have {limits.arrays_max} arrays (arrays_max) and a header of"
            f" {limits.header_bytes_max} bytes (header_bytes_max), found {len(sizes) - 1} and"
            f" {sizes[:1]}"
        )
    if (total := sum(sizes)) > limits.total_bytes_max:
        raise ResourceExhausted(
            f"a message in pieces may have {limits.total_bytes_max} bytes (total_bytes_max),"
            f" found {total}"
        )
    return total


class Assembly:
    """A message of which some pieces have arrived.

    header: of the first one, which `announced_bytes` has checked. give_up_at: when more must have
    come, by time.monotonic(), than the num_read bytes that its connection had brought.
    """

    def __init__(self, header: Header) -> None:
        self.id = frames.int_field(header, "id", low=1)
        self.give_up_at, self.num_read = math.inf, 0
        self.parts = [np.empty(size, np.uint8) for size in header["sizes"]]
        self.num_bytes = sum(header["sizes"])
        self._num_taken = 0
        self._part = self._filled = 0  # where the next byte belongs

    def add(self, header: Header, slices: Sequence[Array]) -> bool:
        """Take the next piece; True: the message is complete. Raises BadRequest."""
        at = frames.int_field(header, "at")
        num_bytes = sum(s.nbytes for s in slices)
        expected = (self.id, self._num_taken)
        is_next = (frames.int_field(header, "id", low=1), at) == expected
        if not is_next or not num_bytes or at + num_bytes > self.num_bytes:
            raise BadRequest(
                f"rpc: expected a piece of message {self.id} at byte {self._num_taken} of"
                f" {self.num_bytes}, found {num_bytes} bytes of message {header['id']} at {at}"
            )
        for piece in slices:
            self._fill(piece.reshape(-1).view(np.uint8))
        self._num_taken += num_bytes
        return self._num_taken == self.num_bytes

    def _fill(self, piece: Array) -> None:
        while len(piece):
            part = self.parts[self._part]
            if self._filled == len(part):
                self._part, self._filled = self._part + 1, 0
                continue
            taken = piece[: len(part) - self._filled]
            part[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            piece = piece[len(taken) :]
