"""Core tables as the tests make and compare them."""

from __future__ import annotations

from typing import Any

import numpy as np

from trireme import _core
from trireme.errors import BadRequest
from trireme.table import RowClassId

MASK = 2**64 - 1
T_ROWS = RowClassId("t")
POOL = _core.Pool(2)
RULES: dict[str, dict[str, Any]] = {
    "sgd": {"rule": "sgd"},
    "momentum": {"rule": "momentum"},
    "nesterov": {"rule": "momentum", "nesterov": True},
    "adagrad": {"rule": "adagrad", "initial_accumulator": 0.1},
    "shared adagrad": {"rule": "adagrad", "shared": True},
    "adam": {"rule": "adam"},
    "row adam": {"rule": "adam", "bias_correction": "row"},
    "shared adam": {"rule": "adam", "shared": True},
    "shared row adam": {"rule": "adam", "shared": True, "bias_correction": "row"},
    "ftrl": {"rule": "ftrl"},
    "count": {"rule": "count"},
    "fleet sgd": {"rule": "fleet_sgd"},
    "fleet adagrad": {"rule": "fleet_adagrad"},
    "shared fleet adagrad": {"rule": "fleet_adagrad", "shared": True},
    "fleet adagrad v2": {"rule": "fleet_adagrad_v2"},
    "fleet adam": {"rule": "fleet_adam"},
    "shared fleet adam": {"rule": "fleet_shared_adam"},
}
INITIALIZERS = {
    "uniform": {"initializer": "uniform", "init_a": -0.5, "init_b": 0.25},
    "normal": {"initializer": "normal", "init_a": 0.5, "init_b": 0.2},
    "constant": {"initializer": "constant", "init_a": 0.75, "init_b": 0.0},
}

Snapshot = dict[int, tuple[bytes, bytes, bytes, bytes, dict[int, int]]]


def make_table(dim: int = 4, rule: str = "sgd", **options: Any) -> _core.Table:
    """A table of a rule of RULES, with weights that start uniform in [-0.5, 0.25)."""
    plain = {"dims": [dim], **INITIALIZERS["uniform"], "seed": 1, **RULES[rule]}
    return _core.Table(**{**plain, **options})


def mix64(x: Any) -> Any:
    """The hash of a key, an int or uint64s: splitmix64's finalizer, from its definition."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def unmix64(x: int) -> int:
    """The key of a hash."""
    x = (x ^ (x >> 31) ^ (x >> 62)) * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    x = (x ^ (x >> 27) ^ (x >> 54)) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return x ^ (x >> 30) ^ (x >> 60)


def keys_of(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def random_keys(rng: np.random.Generator, n: int) -> np.ndarray:
    """Distinct keys, the extreme ones among them, in random order."""
    extreme = keys_of(0, 1, 2**63 - 1, 2**63, MASK - 1, MASK)[:n]
    others = rng.integers(2, MASK - 1, n - len(extreme), np.uint64)
    keys = np.concatenate([extreme, others])
    assert len(np.unique(keys)) == n
    return rng.permutation(keys)


def buckets_of(keys: np.ndarray) -> np.ndarray:
    out = np.empty(len(keys), np.uint16)
    _core.buckets(keys, out)
    return out


def keys_in(buckets: list[int], num_keys: int, seed: int = 0) -> np.ndarray:
    """So many random keys of these buckets together."""
    rng = np.random.default_rng(seed)
    actual = np.empty(0, np.uint64)
    while len(actual) < num_keys:
        keys = rng.integers(0, 2**64, 1 << 20, np.uint64)
        actual = np.concatenate([actual, keys[np.isin(buckets_of(keys), buckets)]])
    return actual[:num_keys]


def lookup(table: _core.Table, keys: np.ndarray, pool: _core.Pool = POOL) -> np.ndarray:
    """The weights of each key; `out` starts as NaN, so that what is not written shows."""
    out = np.full((len(keys), table.dim), np.nan, np.float32)
    table.lookup(keys, out, pool)
    return out


def contains(table: _core.Table, keys: np.ndarray) -> np.ndarray:
    out = np.empty(len(keys), bool)
    table.contains(keys, out, POOL)
    return out


def snapshot(table: _core.Table) -> Snapshot:
    """Everything in a table: keys, classes, rows, pending state and marks of each bucket."""
    content = {}
    for bucket in range(_core.NUM_BUCKETS):
        actual = table.snapshot(bucket)
        arrays = (actual.keys, actual.classes, actual.rows, actual.pending)
        content[bucket] = (*(array.tobytes() for array in arrays), actual.marks)
    return content


def rows_of(table: _core.Table) -> tuple[np.ndarray, np.ndarray]:
    """The keys of all rows, (K,) uint64, and their bytes, (K, row_bytes) uint8."""
    content = _core.snapshot_columns(table, 0, _core.NUM_BUCKETS, 0, 0, [table.row_bytes])
    return content.keys, content.columns[0].reshape(len(content.keys), table.row_bytes)


def restore(table: _core.Table, bucket: int, content: Any) -> None:
    """Give a bucket the content of a snapshot."""
    table.restore(
        bucket, content.keys, content.classes, content.rows, content.marks, content.pending
    )


def clear(table: _core.Table, bucket: int) -> None:
    """Give a bucket no content."""
    rows = np.empty((0, table.row_bytes), np.uint8)
    table.restore(bucket, np.empty(0, np.uint64), np.empty(0, np.uint8), rows, {})


def instruction_sets() -> dict[str, str]:
    """Those of the core, each with "" or why it cannot run here."""
    reasons = {}
    for simd in ("scalar", "avx2", "avx512"):
        try:
            make_table(simd=simd)
            reasons[simd] = ""
        except BadRequest as error:
            reasons[simd] = str(error)
    return reasons
