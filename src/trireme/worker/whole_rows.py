"""Whole rows of keys from the servers: weights, state and statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.errors import Unavailable
from trireme.protocol.routing import NO_KEYS, Keys, Split, buckets_of
from trireme.protocol.wire import Arrays
from trireme.rpc import Call
from trireme.worker.client import WorkerClient
from trireme.worker.transport import LOCAL

log = logging.getLogger("trireme.worker")

MESSAGE_BYTES = 8 << 20
"""Of rows: both sides work on a part while it is in cache."""
IN_PLACE_BYTES = 1 << 30
"""Of rows that a server in this process puts where they stay."""
TIMEOUT_S = 3600.0
ATTEMPTS = 3

Marks = dict[str, str]
"""endpoint -> the server's mark of a table: see `ps.rows`."""


def rows_per_message(row_bytes: int) -> int:
    return max(1, MESSAGE_BYTES // row_bytes)


def never() -> bool:
    return False


def have_changed(before: Marks, now: Marks) -> bool:
    """Whether rows have changed between two moments, as servers say that were not restarted."""
    for endpoint, mark in before.items():
        contents, _, count = mark.partition(":")
        contents_now, _, count_now = now.get(endpoint, "").partition(":")
        if contents == contents_now and count != count_now:
            return True
    return False


class ReadPart(NamedTuple):
    """Some of the keys that were asked for, from number `begin` on; order: of all, (K,) int32,
    where it is another one. is_present: (n,). rows: (n, row_bytes) uint8, wide rows, zeros for a
    key without; where there is room for them.
    """

    begin: int
    order: npt.NDArray[np.int32] | None
    is_present: npt.NDArray[np.bool_]
    rows: npt.NDArray[np.uint8]

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """(n,) of the keys."""
        end = self.begin + len(self.rows)
        if self.order is not None:
            return self.order[self.begin : end]
        return np.arange(self.begin, end, dtype=np.int32)


class Read(NamedTuple):
    """version: rows that change now are stamped with. marks: of the moment that the rows are of."""

    version: int
    marks: Marks


class ReadRows(NamedTuple):
    """All rows of K keys, as in a `ReadPart`; and as in a `Read`."""

    rows: npt.NDArray[np.uint8]
    is_present: npt.NDArray[np.bool_]
    version: int
    marks: Marks

    def part(self) -> ReadPart:
        return ReadPart(0, None, self.is_present, self.rows)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows of a table are read.

    row_bytes: of a wide row. aside: over the way for calls that take long. stop: whether to give
    up. staged: the id of an import whose rows come before those of the table.
    """

    client: WorkerClient
    table: str
    row_bytes: int
    pool: _core.Pool
    aside: bool = False
    stop: Callable[[], bool] = never
    staged: str | None = None


def read_wide_rows(how: Reading, keys_K: Keys) -> ReadRows:
    """The rows of distinct keys, (K,) uint64, as of one moment. Raises as `read_parts`."""
    is_present, rows, take = _room_for(how, keys_K)
    return ReadRows(rows, is_present, *read_parts(how, keys_K, take))


def read_parts(
    how: Reading,
    keys_K: Keys,
    take: Callable[[ReadPart], None],
    room: npt.NDArray[np.uint8] | None = None,
) -> Read:
    """Read the rows of distinct keys, (K,) uint64, part by part, as of one moment. take: gets each
    part; all of them again, if rows have changed meanwhile. room: (K, row_bytes) uint8, where the
    rows go, of keys in the order of their buckets.

    Raises Unavailable: others change the rows meanwhile, or it had to stop. NotReady: a server has
    lost the import.
    """
    for _ in range(ATTEMPTS):
        reader = _Reader(how, keys_K, room)
        for begin in range(0, max(1, len(keys_K)), reader.keys_per_message):
            if how.stop():
                raise Unavailable(f"rows of table {how.table!r}: the reading was stopped")
            take(reader.read(begin))
        if reader.is_of_one_moment:
            return Read(reader.version, reader.marks)
        log.info("rows of table %r have changed while they were read, once more", how.table)
    raise Unavailable(
        f"rows of table {how.table!r}: expected nobody to change them while they are read, found"
        f" that somebody did, {ATTEMPTS} times"
    )


def read_now(how: Reading, keys_K: Keys) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]:
    """Whether each of (K,) distinct keys has a row, and the (K, row_bytes) rows, while others may
    change them: each row is as of one moment, different rows of different ones.
    """
    is_present, rows, take = _room_for(how, keys_K)
    reader = _Reader(how, keys_K)
    for begin in range(0, len(keys_K), reader.keys_per_message):
        take(reader.read(begin))
    return is_present, rows


def _room_for(
    how: Reading, keys_K: Keys
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8], Callable[[ReadPart], None]]:
    """(K,) whether keys have rows, and the (K, row_bytes) rows; and what puts parts there."""
    is_present = np.zeros(len(keys_K), np.bool_)
    rows = np.zeros((len(keys_K), how.row_bytes), np.uint8)

    def take(part: ReadPart) -> None:
        is_present[part.positions], rows[part.positions] = part.is_present, part.rows

    return is_present, rows, take


class _Reader:
    def __init__(
        self, how: Reading, keys_K: Keys, room: npt.NDArray[np.uint8] | None = None
    ) -> None:
        self._how, self._keys, self._room = how, keys_K, room
        self._order: npt.NDArray[np.int32] | None = None
        buckets = buckets_of(keys_K if room is None else NO_KEYS)
        if (buckets[1:] < buckets[:-1]).any():  # servers read each bucket once
            self._order = np.argsort(buckets, kind="stable").astype(np.int32)
            self._keys = keys_K[self._order]
        self.keys_per_message = rows_per_message(how.row_bytes)
        if room is not None and how.client.servers.map.servers == (LOCAL,):
            self.keys_per_message = max(1, IN_PLACE_BYTES // how.row_bytes)
        self.version = 0
        self.marks: Marks = {}
        self.is_of_one_moment = True

    def read(self, begin: int) -> ReadPart:
        """Read the rows of one message."""
        part = slice(begin, begin + self.keys_per_message)
        if self._how.staged is not None:
            return self._attempt(part, TIMEOUT_S)
        servers = self._how.client.servers
        return servers.until_current(
            "ps.rows", lambda left_s: self._attempt(part, left_s), TIMEOUT_S
        )

    def _attempt(self, part: slice, left_s: float) -> ReadPart:
        how, keys = self._how, self._keys[part]
        servers = how.client.servers
        bucket_map = servers.map
        split = Split(keys, bucket_map, how.pool)
        method, body = "ps.rows", {"table": how.table, "map": bucket_map.version}
        if how.staged is not None:
            method, body = "import.read", {"table": how.table, "id": how.staged}
        room = None if self._room is None else self._room[part]
        calls = [
            Call(endpoint, method, body, [np.ascontiguousarray(own)])
            for endpoint, own in zip(bucket_map.servers, split.parts(keys), strict=True)
        ]
        if len(calls) == 1:
            calls[0].room = room
        replies = servers.call_all(calls, left_s, aside=how.aside)
        arrays = [Arrays(reply.arrays) for reply in replies]
        present = [one.take("present", np.uint8, (None,)) > 0 for one in arrays]
        rows = [one.take("rows", np.uint8, (None, how.row_bytes)) for one in arrays]
        for endpoint, reply in zip(bucket_map.servers, replies, strict=True):
            self.version = max(self.version, int(reply.body["version"]))
            mark = str(reply.body["mark"])
            self.is_of_one_moment &= self.marks.setdefault(endpoint, mark) == mark
        joined = split.join(rows)
        if room is not None and not np.may_share_memory(joined, room):
            room[:] = joined
        rows_read = joined if room is None else room
        return ReadPart(part.start, self._order, split.join(present), rows_read)
