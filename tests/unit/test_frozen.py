"""Frozen tables: read-only lookups from the bytes of their files."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

from trireme import _core
from trireme.errors import BadRequest, Corruption
from trireme.rows.frozen_rows import encode

DIM = 5
POOL = _core.Pool(2)
Rows = dict[int, "np.ndarray[Any, Any] | None"]  # None: removed


def bucket_of(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    out = np.empty(len(keys), np.uint16)
    _core.buckets(keys, out)
    return out


def frozen(
    rows: Rows,
    *,
    dtype: str = "float32",
    has_flags: bool = False,
    buckets: range = range(4096),
) -> np.ndarray[Any, Any]:
    """The bytes of a file of these buckets."""
    writer = _core.FrozenWriter(
        encoding=dtype, dim=DIM, has_flags=has_flags, first_bucket=buckets.start
    )
    keys = np.array(list(rows), np.uint64)
    keys = keys[np.argsort(bucket_of(keys), kind="stable")]
    zeros = np.zeros(DIM, np.float32)
    weights = [zeros if (row := rows[key]) is None else row for key in keys.tolist()]
    encoded, _ = encode(np.array(weights, np.float32).reshape(-1, DIM), dtype, "t")
    values = np.zeros((len(keys), writer.value_bytes), np.uint8)
    at = 8 if has_flags else 0
    values[:, at : at + encoded.shape[1]] = encoded
    if has_flags:
        values[:, 0] = [rows[key] is None for key in keys.tolist()]
    bounds = np.searchsorted(bucket_of(keys), np.arange(buckets.start, buckets.stop + 1))
    pieces = [writer.add(keys[a:b], values[a:b]) for a, b in itertools.pairwise(bounds)]
    return np.concatenate([*pieces, writer.finish()])


def opened(data: np.ndarray[Any, Any], name: str = "file") -> _core.FrozenRows:
    return _core.FrozenRows([name], [data])


def table_of(*layers: _core.FrozenRows, **options: Any) -> _core.FrozenTable:
    options = {"initial_weights": DIM, **options}
    return _core.FrozenTable(list(layers), init_a=-1.0, init_b=1.0, seed=7, **options)


def random_rows(rng: np.random.Generator, num: int) -> Rows:
    keys = rng.integers(0, 2**64, num, dtype=np.uint64)
    keys[:2] = 0, 2**64 - 1
    return {int(k): rng.normal(size=DIM).astype(np.float32) for k in keys}


def looked_up(table: _core.FrozenTable, keys: np.ndarray[Any, Any]) -> tuple[Any, int]:
    out = np.full((len(keys), DIM), np.nan, np.float32)
    return out, table.lookup(keys, out, POOL)


def initial(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What a training table answers for absent keys."""
    table = _core.Table(
        dims=[DIM], rule="sgd", initializer="uniform", init_a=-1.0, init_b=1.0, seed=7
    )
    out = np.empty((len(keys), DIM), np.float32)
    table.lookup(keys, out, POOL)
    return out


@pytest.mark.parametrize("simd", ["auto", "scalar"])
@pytest.mark.parametrize("num", [2, 50, 60_000])
def test_rows_are_found_and_absent_keys_answer_as_in_training(num: int, simd: str) -> None:
    rng = np.random.default_rng(num)
    rows = random_rows(rng, num)
    table = table_of(opened(frozen(rows)), simd=simd)
    present = np.array(list(rows), np.uint64)
    absent = rng.integers(0, 2**64, 5000, dtype=np.uint64)
    keys = rng.permutation(np.concatenate([present, absent, present[:100]]))
    out, missing = looked_up(table, keys)
    expected = initial(keys)
    for i, key in enumerate(keys.tolist()):
        expected[i] = rows.get(key, expected[i])
    np.testing.assert_array_equal(out, expected)
    assert missing == sum(key not in rows for key in keys.tolist())


def test_absent_keys_answer_zeros_where_the_table_says_so() -> None:
    table = table_of(opened(frozen({})), initial_weights=0)
    out, missing = looked_up(table, np.arange(10, dtype=np.uint64))
    assert missing == 10
    assert not out.any()


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_smaller_rows_are_read_as_they_were_written(dtype: str) -> None:
    rng = np.random.default_rng(1)
    rows = random_rows(rng, 3000)
    rows[5] = np.zeros(DIM, np.float32)
    rows[6] = np.array([1e-7, -3e-5, 65504, -65504, 6e-8], np.float32)
    keys = np.array(list(rows), np.uint64)
    weights = np.array(list(rows.values()), np.float32)
    _, stored = encode(weights, dtype, "t")
    for simd in ("auto", "scalar"):
        out, missing = looked_up(table_of(opened(frozen(rows, dtype=dtype)), simd=simd), keys)
        assert missing == 0
        np.testing.assert_array_equal(out, stored)
    limit = {"float16": 2**-11, "int8": 1 / 254}[dtype]
    largest = np.abs(weights).max(1, keepdims=True)
    assert (np.abs(stored - weights) <= limit * largest * 1.001 + 6e-8).all()


def test_keys_of_equal_tags_and_lines_with_more_rows_than_tags() -> None:
    """mix64 is inverted to put 200 keys on one line, with few tags."""
    hashes = [(3 << 52) | (i << 16) | i % 20 for i in range(200)]
    keys = [unmix(h) for h in hashes]
    rows: Rows = {k: np.full(DIM, i, np.float32) for i, k in enumerate(keys)}
    table = table_of(opened(frozen(rows)))
    out, missing = looked_up(table, np.array(keys, np.uint64))
    assert missing == 0
    np.testing.assert_array_equal(out[:, 0], np.arange(len(keys)))
    near = np.array([unmix(h ^ 1 << 30) for h in hashes], np.uint64)
    assert looked_up(table, near)[1] == len(near)


def unmix(hash_: int) -> int:
    """The key of a hash: mix64 backwards."""
    mask = 2**64 - 1
    x = hash_ ^ (hash_ >> 31) ^ (hash_ >> 62)
    x = x * pow(0x94D049BB133111EB, -1, 2**64) & mask
    x = x ^ (x >> 27) ^ (x >> 54)
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return x ^ (x >> 30) ^ (x >> 60)


@pytest.mark.parametrize("seed", range(3))
def test_layers_answer_as_a_dict_that_was_changed_as_often(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    model = random_rows(rng, 2000)
    layers = [opened(frozen(model))]
    for _ in range(4):
        some = [int(k) for k in rng.choice(np.array(list(model), np.uint64), 300, replace=False)]
        delta: Rows = {
            key: None if i % 3 == 0 else -model[key]
            for i, key in enumerate(some)
            if model[key] is not None
        }  # type: ignore[operator]
        delta |= random_rows(rng, 200)
        layers.insert(0, opened(frozen(delta, has_flags=True)))
        model |= delta
    keys = np.array(list(model), np.uint64)
    expected = initial(keys)
    for i, key in enumerate(keys.tolist()):
        expected[i] = expected[i] if model[key] is None else model[key]
    out, missing = looked_up(table_of(*layers), keys)
    np.testing.assert_array_equal(out, expected)
    assert missing == sum(row is None for row in model.values())


def test_files_of_parts_of_the_buckets_make_one_table() -> None:
    rows = random_rows(np.random.default_rng(0), 1000)
    parts = [frozen(rows, buckets=b) for b in (range(1000), range(1000, 1001), range(1001, 4096))]
    table = table_of(_core.FrozenRows(["a", "b", "c"], parts))
    assert looked_up(table, np.array(list(rows), np.uint64))[1] == 0
    with pytest.raises(BadRequest, match="4096 buckets in the last layer, found 1001"):
        table_of(_core.FrozenRows(["a", "b"], parts[:2]))
    with pytest.raises(Corruption, match="b: expected one file with bucket 0, found two"):
        _core.FrozenRows(["a", "b"], [parts[0], parts[0]])


def test_damaged_bytes_are_refused_by_name_or_read_within_the_file() -> None:
    rng = np.random.default_rng(0)
    rows = random_rows(rng, 300)
    whole = frozen(rows, buckets=range(4096))
    keys = np.array(list(rows), np.uint64)
    messages = []
    for at in [*range(len(whole) - 64, len(whole)), *rng.integers(0, len(whole), 300)]:
        damaged = whole.copy()
        damaged[at] ^= 1 << rng.integers(0, 8)
        try:
            looked_up(table_of(opened(damaged, "the/file")), keys)
        except (Corruption, BadRequest) as error:
            messages.append(str(error))
    assert len(messages) > 64
    assert all(re.match("the/file: expected|.* in the last layer", text) for text in messages)
    for size in (0, 1, 63, 64, len(whole) - 8, len(whole) - 64):
        with pytest.raises(Corruption, match="the/file: expected"):
            opened(whole[:size].copy(), "the/file")


def test_the_writer_refuses_wrong_keys() -> None:
    writer = _core.FrozenWriter(encoding="float32", dim=DIM)
    key = unmix(1 << 52)
    value = np.zeros((1, writer.value_bytes), np.uint8)
    with pytest.raises(BadRequest, match=f"expected keys of bucket 0, found key {key}"):
        writer.add(np.array([key], np.uint64), value)
    twice = np.array([unmix(5)] * 2, np.uint64)
    with pytest.raises(BadRequest, match="distinct keys, found key"):
        writer.add(twice, np.repeat(value, 2, 0))
    with pytest.raises(BadRequest, match="float32, float16 or int8, found half"):
        _core.FrozenWriter(encoding="half", dim=DIM)
