"""Whole rows of many keys, for a pass on a device.

A row on SSD costs a read of a page. Where a pass wants more than about a hundredth of the rows that
a bucket has there, all its pages are read in the order in which they lie, and no row moves to
memory. Servers are asked for keys in the order of their buckets, so each bucket is read once.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.errors import ResourceExhausted
from trireme.protocol.routing import Keys, buckets_of
from trireme.rows.wide_rows import WideRows
from trireme.rpc import Request

SCANNED = 0.01
"""Of a bucket's rows on SSD: if more are wanted, it is scanned."""
NO_CLASS = 255
"""The row class that the core gives a key without a row."""


def check_reply(method: str, request: Request, num_rows: int, rows: _core.Table) -> None:
    """Raises ResourceExhausted: too many rows for a message."""
    num_bytes = num_rows * (1 + rows.row_bytes)
    if num_bytes > request.reply_bytes_max:
        raise ResourceExhausted(
            f"{method}: expected rows of at most {request.reply_bytes_max} bytes, which both sides"
            f" take as a message, found {num_bytes}"
        )


def read_rows(
    rows: _core.Table,
    keys_K: Keys,
    num_buckets: int,
    pool: _core.Pool,
    room: WideRows | None = None,
) -> tuple[npt.NDArray[np.bool_], WideRows]:
    """Whether each of (K,) distinct keys has a row, and the (K, row_bytes) wide rows; zeros for a
    key without. num_buckets: that the table has here. room: for the rows. Raises Corruption: a page
    is damaged.
    """
    classes = np.empty(len(keys_K), np.uint8)
    wide = np.empty((len(keys_K), rows.row_bytes), np.uint8) if room is None else room
    is_scanned = _are_scanned(rows, keys_K, num_buckets)
    if not is_scanned.any():
        rows.read_wide(keys_K, classes, wide, pool)
        return classes != NO_CLASS, wide
    single = np.flatnonzero(~is_scanned)
    some_classes, some = classes[single], wide[single]
    rows.read_wide(keys_K[single], some_classes, some, pool)
    classes[single], wide[single] = some_classes, some
    _scan(rows, keys_K, np.flatnonzero(is_scanned), classes, wide)
    return classes != NO_CLASS, wide


def _are_scanned(rows: _core.Table, keys_K: Keys, num_buckets: int) -> npt.NDArray[np.bool_]:
    """Whether the bucket of each key is scanned."""
    if (tier := rows.tier) is None or tier["rows"] == 0:
        return np.zeros(len(keys_K), np.bool_)
    buckets = buckets_of(keys_K)
    num_wanted = np.bincount(buckets)
    return np.asarray(num_wanted[buckets] > SCANNED * tier["rows"] / num_buckets)


def _scan(
    rows: _core.Table,
    keys_K: Keys,
    positions: npt.NDArray[np.intp],
    classes: npt.NDArray[np.uint8],
    wide: WideRows,
) -> None:
    """Read the keys at these positions, bucket by bucket, into `classes` and `wide`."""
    buckets = buckets_of(keys_K[positions])
    order = np.argsort(buckets, kind="stable")
    positions, buckets = positions[order], buckets[order]
    ends = np.flatnonzero(np.diff(buckets)) + 1
    for low, high in pairwise([0, *ends.tolist(), len(positions)]):
        content = rows.snapshot(int(buckets[low]))
        in_bucket = positions[low:high]
        _, of_wanted, of_content = np.intersect1d(
            keys_K[in_bucket], content.keys, assume_unique=True, return_indices=True
        )
        classes[in_bucket], wide[in_bucket] = NO_CLASS, 0
        classes[in_bucket[of_wanted]] = content.classes[of_content]
        wide[in_bucket[of_wanted]] = content.rows[of_content]
