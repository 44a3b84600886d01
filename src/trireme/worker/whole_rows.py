"""Whole rows of keys from the servers: weights, state and statistics."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.protocol.routing import Keys, Split
from trireme.protocol.wire import Arrays
from trireme.rpc import Call
from trireme.worker.client import WorkerClient

MESSAGE_BYTES = 16 << 20
TIMEOUT_S = 3600.0


class ReadRows(NamedTuple):
    """rows: (K, row_bytes) uint8, wide rows, zeros for a key without. version: rows that change now
    are stamped with.
    """

    rows: npt.NDArray[np.uint8]
    is_present: npt.NDArray[np.bool_]
    version: int


def read_wide_rows(
    client: WorkerClient, table: str, keys_K: Keys, row_bytes: int, pool: _core.Pool
) -> ReadRows:
    """The rows of distinct keys, (K,) uint64."""
    rows = np.zeros((len(keys_K), row_bytes), np.uint8)
    is_present, version = np.zeros(len(keys_K), np.bool_), 0
    per_message = max(1, MESSAGE_BYTES // row_bytes)
    for begin in range(0, max(1, len(keys_K)), per_message):
        part = slice(begin, begin + per_message)

        def read(left_s: float, part: slice = part) -> int:
            bucket_map = client.servers.map
            split = Split(keys_K[part], bucket_map, pool)
            body = {"table": table, "map": bucket_map.version}
            calls = [
                Call(endpoint, "ps.rows", body, [np.ascontiguousarray(keys)])
                for endpoint, keys in zip(
                    bucket_map.servers, split.parts(keys_K[part]), strict=True
                )
            ]
            replies = client.servers.call_all(calls, left_s)
            all_arrays = [Arrays(reply.arrays) for reply in replies]
            is_present[part] = split.join(
                [arrays.take("present", np.uint8, (None,)) > 0 for arrays in all_arrays]
            )
            rows[part] = split.join(
                [arrays.take("rows", np.uint8, (None, row_bytes)) for arrays in all_arrays]
            )
            return max(int(reply.body["version"]) for reply in replies)

        version = max(version, client.servers.until_current("ps.rows", read, TIMEOUT_S))
    return ReadRows(rows, is_present, version)
