"""Ids, specs and the bucket map survive the wire as arrays; what is damaged is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from trireme.errors import BadRequest, ResourceExhausted
from trireme.protocol.block_messages import (
    ids_from_wire,
    ids_to_wire,
    map_from_kept,
    map_from_wire,
    map_to_kept,
    map_to_wire,
    specs_from_wire,
    specs_to_wire,
    tensors_from_wire,
    tensors_to_wire,
)
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.routing import NUM_BUCKETS, BucketMap
from trireme.protocol.wire import Array, Arrays
from trireme.rpc import Limits, frames

SERVERS = ("a:1", "b:2", "c:3")
IDS = ["x@0", "x@65536", "y@0", "a@b.weight@64", "gr\u00f6sse@0", "@0", "x@9223372036854775807"]
ROOM = 1 << 20


@pytest.mark.parametrize("ids", [[], IDS])
def test_ids_survive_the_wire(ids: list[str]) -> None:
    assert ids_from_wire(Arrays(ids_to_wire(ids)), ROOM) == ids


def test_tensors_survive_the_wire() -> None:
    blocks = {
        "x@0": {"weights": np.arange(3, dtype=np.float32), "step": np.ones(1, np.float64)},
        "y@0": {"weights": np.arange(2, dtype=np.float32)},
        "z@0": {},
    }
    names, arrays = tensors_to_wire(blocks)
    assert len(arrays) == 4 + 3 * len(names)
    received = tensors_from_wire(names, Arrays(arrays), None)
    np.testing.assert_equal(received, blocks)
    with pytest.raises(BadRequest, match="expected values of step as float32"):
        tensors_from_wire(names, Arrays(arrays), np.float32)
    for damaged in (
        changed(4, [0, 3], np.uint32),
        changed(5, [2, 2], np.int64),
        changed(5, [-1, 6], np.int64),
        changed(5, [5], np.int64),
        changed(6, [0] * 4, np.float32),
    ):
        broken = list(arrays)
        damaged(broken)
        with pytest.raises(BadRequest, match="expected"):
            tensors_from_wire(names, Arrays(broken), None)


def test_specs_survive_the_wire() -> None:
    specs = [BlockSpec("x", 0, 64, 0), BlockSpec("x", 64, 3, 1), BlockSpec("y", 0, 6, 0, (2, 3))]
    shapes, arrays = specs_to_wire(specs)
    assert specs_from_wire(shapes, Arrays(arrays), ROOM) == specs


@pytest.mark.parametrize("is_file", [False, True])
def test_a_map_survives_the_wire_and_files(is_file: bool) -> None:
    made = BucketMap.even(SERVERS).with_blocks(IDS)
    head, arrays = map_to_wire(made)
    received = map_from_kept(map_to_kept(made)) if is_file else map_from_wire(head, Arrays(arrays))
    assert (received.version, received.servers) == (2, SERVERS)
    assert received.blocks == {block_id: number % 3 for number, block_id in enumerate(IDS)}
    np.testing.assert_array_equal(received.buckets, made.buckets)


def test_the_map_of_half_a_million_blocks_fits_a_message() -> None:
    """2 G parameters in blocks of 4 Ki, on 100 servers."""
    params = [f"encoder.layers.{layer}.linear.weight" for layer in range(512)]
    ids = [f"{param}@{start << 12}" for param in params for start in range(1024)]
    servers = tuple(f"server-{number}.example.org:7001" for number in range(100))
    head, arrays = map_to_wire(BucketMap.even(servers).with_blocks(ids))
    parts = frames.pack({"t": frames.REPLY, "id": 1, "b": {"map": head}}, arrays)
    assert len(parts[0]) < Limits().header_bytes_max / 10
    assert sum(map(len, parts)) < 16 * len(ids)
    assert list(map_from_wire(head, Arrays(arrays)).blocks) == ids


def changed(number: int, values: object, dtype: type) -> Callable[[list[Array]], None]:
    def change(arrays: list[Array]) -> None:
        arrays[number] = np.array(values, dtype)

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed(0, [0] * 100, np.uint16),
        changed(0, [3] * NUM_BUCKETS, np.uint16),
        changed(0, [0] * NUM_BUCKETS, np.uint64),
        changed(1, [0xFF, 0xFF], np.uint8),
        changed(1, [], np.uint8),
        changed(2, [2, 1], np.int64),
        changed(2, [-1, 2], np.int64),
        changed(2, [2**63 - 1, -(2**63), -1, 2], np.int64),
        changed(3, [0, 2], np.uint32),
        changed(3, [0], np.uint32),
        changed(4, [0, -1], np.int64),
        changed(5, [0, 3], np.uint16),
        changed(5, [0], np.uint16),
        list.pop,
        list.clear,
    ],
)
def test_a_damaged_map_is_refused(change: Callable[[list[Array]], None]) -> None:
    head, arrays = map_to_wire(BucketMap.even(SERVERS).with_blocks(["x@0", "y@0"]))
    damaged = list(arrays)
    change(damaged)
    with pytest.raises(BadRequest, match="expected"):
        map_from_wire(head, Arrays(damaged))


@pytest.mark.parametrize("head", [None, {}, {"version": 1}, {"version": "1", "servers": ["a:1"]}])
def test_a_damaged_head_is_refused(head: object) -> None:
    _, arrays = map_to_wire(BucketMap.even(SERVERS))
    with pytest.raises(BadRequest, match="expected"):
        map_from_wire(head, Arrays(arrays))


def test_ids_that_would_take_more_than_there_is_room_are_refused_before_they_are_made() -> None:
    count = 100_000
    text = np.full(1 << 20, ord("x"), np.uint8)  # a name of 1 MiB, a hundred thousand times
    arrays: Sequence[Array] = [
        text,
        np.array([len(text)], np.int64),
        np.zeros(count, np.uint32),
        np.arange(count, dtype=np.int64),
    ]
    with pytest.raises(ResourceExhausted, match="of 100000 ids"):
        ids_from_wire(Arrays(arrays), 1 << 30)
