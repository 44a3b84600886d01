"""The bucket map, which names the server of each bucket and block; and the split of keys by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core

NUM_BUCKETS: int = _core.NUM_BUCKETS

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
NO_KEYS: Keys = np.empty(0, np.uint64)
IDS_BELOW = 1 << 32  # of keys with salt one in 2**32 is below


@dataclass(frozen=True, eq=False)
class BucketMap:
    """The owner of each bucket and block. Immutable: a change makes a map of the next version."""

    version: int  # counts changes; every request carries the version it was planned with
    servers: tuple[str, ...]  # endpoints; an owner is an index into them
    buckets: npt.NDArray[np.uint16]  # (4096,), the owner of each
    blocks: Mapping[str, int] = field(default_factory=dict)  # owner by block id

    @staticmethod
    def even(servers: tuple[str, ...]) -> BucketMap:
        """Contiguous ranges of equal length, in the order of the servers."""
        owners = np.arange(NUM_BUCKETS, dtype=np.int64) * len(servers) // NUM_BUCKETS
        return BucketMap(1, servers, owners.astype(np.uint16))

    def with_blocks(
        self, block_ids: Sequence[str], owners: Sequence[int] | None = None
    ) -> BucketMap:
        """This map plus the blocks that it lacks; itself if it lacks none. owners: of these blocks;
        None: round robin.
        """
        blocks = dict(self.blocks)
        for number, block_id in enumerate(block_ids):
            owner = len(blocks) % len(self.servers) if owners is None else owners[number]
            blocks.setdefault(block_id, owner)
        if len(blocks) == len(self.blocks):
            return self
        return BucketMap(self.version + 1, self.servers, self.buckets, blocks)

    def renewed(self, *, blocks: bool = True) -> BucketMap:
        """The same as the next version, with or without blocks."""
        kept = self.blocks if blocks else {}
        return BucketMap(self.version + 1, self.servers, self.buckets, kept)

    @property
    def num_bytes(self) -> int:
        """About what a process needs to hold it."""
        return self.buckets.nbytes + sum(map(len, self.blocks)) + 256 * len(self.blocks)

    def owned_by(self, server: int) -> npt.NDArray[np.int64]:
        """Buckets of a server, ascending."""
        return np.flatnonzero(self.buckets == server)

    def blocks_of(self, server: int) -> Sequence[str]:
        """Blocks of a server, in the map's order."""
        return self._blocks_by_owner.get(server, ())

    @cached_property
    def _blocks_by_owner(self) -> dict[int, list[str]]:
        # Each pull and push asks for them: the time of a request must not grow with the model.
        by_owner: dict[int, list[str]] = {}
        for block, owner in self.blocks.items():
            by_owner.setdefault(owner, []).append(block)
        return by_owner


def buckets_of(keys: Keys) -> npt.NDArray[np.uint16]:
    """(n,) the bucket of each key."""
    buckets = np.empty(len(keys), np.uint16)
    _core.buckets(keys, buckets)
    return buckets


class Split:
    """Splits the keys of one table by server, and joins the answers. If the owners are in bucket
    order (no bucket was moved), parts are slices without a copy.
    """

    def __init__(self, keys_K: Keys, bucket_map: BucketMap, pool: _core.Pool) -> None:
        self.num_keys = len(keys_K)
        num_servers = len(bucket_map.servers)
        if num_servers == 1:
            self._order = None
            counts = np.array([self.num_keys])
        else:
            order_K, counts = _core.split(keys_K, bucket_map.buckets, num_servers, pool)
            in_order = bool(np.all(order_K[1:] > order_K[:-1]))
            self._order = None if in_order else order_K
        self.bounds = np.concatenate([[0], np.cumsum(counts)])

    def parts(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """(K, ...) in key order -> one array per server."""
        if self._order is not None:
            values = values[self._order]
        return [values[low:high] for low, high in zip(self.bounds, self.bounds[1:], strict=False)]

    def join(self, parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """One array per server -> (K, ...) in key order; the inverse of `parts`."""
        if len(parts) == 1:
            return parts[0]
        values = np.concatenate(parts)
        if self._order is None:
            return values
        joined = np.empty_like(values)
        joined[self._order] = values
        return joined
