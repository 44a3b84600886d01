"""What messages say of all blocks of a server or job: their ids, their specs and the bucket map. A
large model has more of them than a header holds, so they travel as arrays.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from trireme.errors import BadRequest, ResourceExhausted
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.routing import NUM_BUCKETS, BucketMap
from trireme.protocol.wire import Array, Arrays, need, need_list

ID_BYTES = 128
"""About what Python needs for the id of a block, beside its characters."""


# ---- ids ----


def ids_to_wire(ids: Sequence[str]) -> list[Array]:
    """Arrays for `ids_from_wire`: distinct names of parameters one after the other (uint8, UTF-8),
    the end of each in bytes (int64); of each block its parameter's number (uint32), and the first
    element (int64).
    """
    params: dict[str, int] = {}
    numbers, starts = np.empty(len(ids), np.uint32), np.empty(len(ids), np.int64)
    for i, block_id in enumerate(ids):
        param, _, start = block_id.rpartition("@")
        numbers[i], starts[i] = params.setdefault(param, len(params)), int(start)
    names = [param.encode() for param in params]
    text = np.frombuffer(b"".join(names), np.uint8)
    return [text, np.cumsum([len(name) for name in names], dtype=np.int64), numbers, starts]


def ids_from_wire(arrays: Arrays, num_bytes_max: int) -> list[str]:
    """The inverse of `ids_to_wire`. Raises BadRequest, and ResourceExhausted before they are made:
    they would take more than num_bytes_max.
    """
    text = arrays.take("names of parameters", np.uint8, (None,)).tobytes()
    ends = arrays.take("ends of names", np.int64, (None,))
    numbers = arrays.take("parameters of blocks", np.uint32, (None,))
    starts = arrays.take("first elements of blocks", np.int64, numbers.shape)
    lengths = np.diff(ends, prepend=0)
    end = ends[-1] if len(ends) else 0
    if min(ends.min(initial=0), lengths.min(initial=0)) < 0 or end != len(text):
        raise BadRequest(f"blocks: expected names of {len(text)} bytes, found other ends of them")
    if numbers.max(initial=0) >= max(len(ends), 1) or starts.min(initial=0) < 0:
        raise BadRequest(
            f"blocks: expected parameters below {len(ends)} and first elements >= 0, found"
            f" {numbers.max(initial=0)} and {starts.min(initial=0)}"
        )
    if (num_bytes := int(lengths[numbers].sum()) + ID_BYTES * len(numbers)) > num_bytes_max:
        raise ResourceExhausted(
            f"blocks: held_bytes_max leaves {num_bytes_max} bytes, found {num_bytes} of"
            f" {len(numbers)} ids; --limits or TRIREME_LIMITS of the server says how much it holds"
        )
    try:
        names = [text[end - n : end].decode() for end, n in zip(ends, lengths, strict=True)]
    except UnicodeDecodeError as error:
        raise BadRequest(f"blocks: expected names in UTF-8, found {error}") from error
    pairs = zip(numbers.tolist(), starts.tolist(), strict=True)
    return [f"{names[number]}@{start}" for number, start in pairs]


# ---- specs ----


def specs_to_wire(specs: Sequence[BlockSpec]) -> tuple[dict[str, list[int]], list[Array]]:
    """Shapes by parameter, and arrays for `specs_from_wire`: ids, sizes and groups (int64)."""
    sizes = np.array([spec.size for spec in specs], np.int64)
    groups = np.array([spec.group for spec in specs], np.int64)
    shapes = {spec.param: list(spec.shape) for spec in specs if spec.shape}
    return shapes, [*ids_to_wire([spec.id for spec in specs]), sizes, groups]


def specs_from_wire(
    shapes: Mapping[str, Any], arrays: Arrays, num_bytes_max: int
) -> list[BlockSpec]:
    """The inverse of `specs_to_wire`. Raises as `ids_from_wire`, and BadRequest: invalid specs."""
    ids = ids_from_wire(arrays, num_bytes_max)
    sizes = arrays.take("sizes of blocks", np.int64, (len(ids),)).tolist()
    groups = arrays.take("groups of blocks", np.int64, (len(ids),)).tolist()
    specs = []
    for block_id, size, group in zip(ids, sizes, groups, strict=True):
        param, _, start = block_id.rpartition("@")
        shape = [shapes[param]] if param in shapes else []
        specs.append(BlockSpec.from_wire([param, int(start), size, group, *shape]))
    return specs


# ---- tensors ----

BlockTensors = dict[str, dict[str, Array]]
"""By block id, then by name: flat weights and states of an optimizer."""


def tensors_to_wire(blocks: Mapping[str, Mapping[str, Array]]) -> tuple[list[str], list[Array]]:
    """Names of tensors, and arrays for `tensors_from_wire`: ids; then for each name the blocks that
    have it (uint32), the sizes of theirs (int64), and all values.
    """
    names = list(dict.fromkeys(name for tensors in blocks.values() for name in tensors))
    arrays = ids_to_wire(list(blocks))
    for name in names:
        having = [(i, t[name].reshape(-1)) for i, t in enumerate(blocks.values()) if name in t]
        arrays.append(np.array([i for i, _ in having], np.uint32))
        arrays.append(np.array([len(values) for _, values in having], np.int64))
        arrays.append(np.concatenate([values for _, values in having]))
    return names, arrays


def tensors_from_wire(
    names: Sequence[str], arrays: Arrays, dtype: type | None, num_bytes_max: int = 1 << 62
) -> BlockTensors:
    """The inverse of `tensors_to_wire`. dtype: of all; None: any. Raises as `ids_from_wire`, and
    BadRequest: the values of a name are not those of its blocks.
    """
    ids = ids_from_wire(arrays, num_bytes_max)
    blocks: BlockTensors = {block_id: {} for block_id in ids}
    for name in names:
        having = arrays.take(f"blocks with {name}", np.uint32, (None,))
        sizes = arrays.take(f"sizes of {name}", np.int64, having.shape)
        values = arrays.take(f"values of {name}", dtype, (None,))
        if having.max(initial=0) >= max(len(ids), 1) or not _are_sizes(sizes, len(values)):
            raise BadRequest(
                f"blocks: expected {name} of {len(values)} values in all of blocks below"
                f" {len(ids)}, found other blocks or sizes"
            )
        parts = np.split(values, np.cumsum(sizes)[:-1]) if len(sizes) else []
        for i, part in zip(having.tolist(), parts, strict=True):
            blocks[ids[i]][name] = part
    return blocks


def _are_sizes(sizes: Array, total: int) -> bool:
    is_each = sizes.min(initial=0) >= 0 and sizes.max(initial=0) <= total
    return bool(is_each) and sum(sizes.tolist()) == total


# ---- the bucket map ----


@lru_cache(maxsize=1)  # the coordinator sends one map to a thousand workers
def map_to_wire(bucket_map: BucketMap) -> tuple[dict[str, Any], tuple[Array, ...]]:
    """A head for a body, and arrays: the owners of buckets (uint16), the ids of blocks, and their
    owners (uint16).
    """
    head = {"version": bucket_map.version, "servers": list(bucket_map.servers)}
    owners = np.fromiter(bucket_map.blocks.values(), np.uint16, len(bucket_map.blocks))
    return head, (bucket_map.buckets, *ids_to_wire(list(bucket_map.blocks)), owners)


def map_from_wire(head: Any, arrays: Arrays, num_bytes_max: int = 1 << 62) -> BucketMap:
    """The inverse of `map_to_wire`. Raises as `ids_from_wire`, and BadRequest: the map is
    incomplete, or names an owner that does not exist.
    """
    version, servers = need(head, "version", int), need_list(head, "servers", str)
    buckets = arrays.take("owners of buckets", np.uint16, (NUM_BUCKETS,)).copy()
    ids = ids_from_wire(arrays, num_bytes_max)
    owners = arrays.take("owners of blocks", np.uint16, (len(ids),))
    owners_max = max(buckets.max(initial=0), owners.max(initial=0))
    if owners_max >= len(servers):
        raise BadRequest(f"BucketMap: expected owners below {len(servers)}, found {owners_max}")
    blocks = dict(zip(ids, owners.tolist(), strict=True))
    return BucketMap(version, tuple(servers), buckets, blocks)


_KEPT_DTYPES = (np.uint16, np.uint8, np.int64, np.uint32, np.int64, np.uint16)


def map_to_kept(bucket_map: BucketMap) -> dict[str, Any]:
    """The map as part of a file."""
    head, arrays = map_to_wire(bucket_map)
    return {**head, "arrays": [array.tobytes() for array in arrays]}


def map_from_kept(kept: Mapping[str, Any]) -> BucketMap:
    """The inverse of `map_to_kept`."""
    columns = zip(kept["arrays"], _KEPT_DTYPES, strict=True)
    return map_from_wire(kept, Arrays([np.frombuffer(data, dtype) for data, dtype in columns]))
