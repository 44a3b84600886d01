"""The bucket map, and the division of keys among bucket owners."""

from __future__ import annotations

import numpy as np
import pytest

from trireme import _core
from trireme.protocol.job_limits import SERVERS_MAX
from trireme.protocol.routing import NUM_BUCKETS, BucketMap, Split

SERVERS = ("a:1", "b:2", "c:3")


def some_keys(count: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 2**63, count).astype(np.uint64)
    return _core.unique(values, _core.Pool(1))[0]


def test_even_maps_differ_by_one_bucket_at_most() -> None:
    counts = np.bincount(BucketMap.even(SERVERS).buckets)
    assert counts.sum() == NUM_BUCKETS
    assert counts.max() - counts.min() <= 1


def test_blocks_keep_their_owner_and_known_ones_make_no_new_version() -> None:
    first = BucketMap.even(SERVERS).with_blocks(["x@0", "y@0"])
    second = first.with_blocks(["y@0", "z@0"])
    assert second.blocks == {"x@0": 0, "y@0": 1, "z@0": 2}
    assert second.version == first.version + 1
    assert second.with_blocks(["x@0"]) is second


@pytest.mark.parametrize("num_keys", [0, 1, 5000])
def test_parts_belong_to_their_owner_and_join_to_the_whole(num_keys: int) -> None:
    pool = _core.Pool(2)
    keys = some_keys(num_keys)
    generator = np.random.default_rng(3)
    scattered = generator.integers(0, 3, NUM_BUCKETS).astype(np.uint16)
    for owners in (BucketMap.even(SERVERS).buckets, scattered):
        split = Split(keys, BucketMap(1, SERVERS, owners), pool)
        parts = split.parts(keys)
        for server, part in enumerate(parts):
            buckets = np.empty(len(part), dtype=np.uint16)
            _core.buckets(np.ascontiguousarray(part), buckets)
            assert np.all(owners[buckets] == server)
        np.testing.assert_array_equal(split.join(parts), keys)
        rows = generator.normal(size=(num_keys, 4)).astype(np.float32)
        np.testing.assert_array_equal(split.join(split.parts(rows)), rows)


def test_a_job_has_at_most_a_server_for_each_bucket() -> None:
    assert SERVERS_MAX == NUM_BUCKETS
