"""Whole rows of keys from the servers: weights, state and statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.errors import Unavailable
from trireme.protocol.routing import Keys, Split, buckets_of
from trireme.protocol.wire import Arrays
from trireme.rpc import Call
from trireme.worker.client import WorkerClient

log = logging.getLogger("trireme.worker")

MESSAGE_BYTES = 16 << 20
TIMEOUT_S = 3600.0
ATTEMPTS = 3

Marks = dict[str, str]
"""endpoint -> the server's mark of a table: see `ps.rows`."""


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


class ReadRows(NamedTuple):
    """rows: (K, row_bytes) uint8, wide rows, zeros for a key without. version: rows that change now
    are stamped with. marks: of the moment that the rows are of.
    """

    rows: npt.NDArray[np.uint8]
    is_present: npt.NDArray[np.bool_]
    version: int
    marks: Marks


def read_wide_rows(
    client: WorkerClient,
    table: str,
    keys_K: Keys,
    row_bytes: int,
    pool: _core.Pool,
    *,
    aside: bool = False,
    stop: Callable[[], bool] = never,
    staged: str | None = None,
) -> ReadRows:
    """The rows of distinct keys, (K,) uint64, as of one moment.

    aside: over the way for calls that take long. stop: whether to give up. staged: the id of an
    import whose rows come before those of the table.

    Raises Unavailable: others change the rows meanwhile, or it had to stop. NotReady: a server has
    lost the import.
    """
    for _ in range(ATTEMPTS):
        reader = _Reader(client, table, keys_K, row_bytes, pool, aside, staged)
        for begin in range(0, max(1, len(keys_K)), reader.keys_per_message):
            if stop():
                raise Unavailable(f"rows of table {table!r}: the reading was stopped")
            reader.read(begin)
        if reader.is_of_one_moment:
            return ReadRows(reader.rows, reader.is_present, reader.version, reader.marks)
        log.info("rows of table %r have changed while they were read, once more", table)
    raise Unavailable(
        f"rows of table {table!r}: expected nobody to change them while they are read, found that"
        f" somebody did, {ATTEMPTS} times"
    )


class _Reader:
    def __init__(
        self,
        client: WorkerClient,
        table: str,
        keys_K: Keys,
        row_bytes: int,
        pool: _core.Pool,
        aside: bool,
        staged: str | None,
    ) -> None:
        self._client, self._table = client, table
        # Servers read each bucket once.
        self._order = np.argsort(buckets_of(keys_K), kind="stable")
        self._keys = keys_K[self._order]
        self._row_bytes, self._pool, self._aside = row_bytes, pool, aside
        self._staged = staged
        self.keys_per_message = max(1, MESSAGE_BYTES // row_bytes)
        self.rows = np.zeros((len(keys_K), row_bytes), np.uint8)
        self.is_present, self.version = np.zeros(len(keys_K), np.bool_), 0
        self.marks: Marks = {}
        self.is_of_one_moment = True

    def read(self, begin: int) -> None:
        """Read the rows of one message."""
        part = slice(begin, begin + self.keys_per_message)
        if self._staged is not None:
            self._attempt(part, TIMEOUT_S)
            return
        servers = self._client.servers
        servers.until_current("ps.rows", lambda left_s: self._attempt(part, left_s), TIMEOUT_S)

    def _attempt(self, part: slice, left_s: float) -> None:
        servers, keys = self._client.servers, self._keys[part]
        bucket_map = servers.map
        split = Split(keys, bucket_map, self._pool)
        method, body = "ps.rows", {"table": self._table, "map": bucket_map.version}
        if self._staged is not None:
            method, body = "import.read", {"table": self._table, "id": self._staged}
        calls = [
            Call(endpoint, method, body, [np.ascontiguousarray(own)])
            for endpoint, own in zip(bucket_map.servers, split.parts(keys), strict=True)
        ]
        call_all = servers.call_all_aside if self._aside else servers.call_all
        replies = call_all(calls, left_s)
        arrays = [Arrays(reply.arrays) for reply in replies]
        present = [one.take("present", np.uint8, (None,)) > 0 for one in arrays]
        to = self._order[part]
        self.is_present[to] = split.join(present)
        rows = [one.take("rows", np.uint8, (None, self._row_bytes)) for one in arrays]
        self.rows[to] = split.join(rows)
        for endpoint, reply in zip(bucket_map.servers, replies, strict=True):
            self.version = max(self.version, int(reply.body["version"]))
            mark = str(reply.body["mark"])
            self.is_of_one_moment &= self.marks.setdefault(endpoint, mark) == mark
