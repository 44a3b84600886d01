"""Core tables: keys, lookups, updates, and refused calls."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from tests.tables import (
    MASK,
    POOL,
    RULES,
    buckets_of,
    contains,
    keys_in,
    keys_of,
    lookup,
    make_table,
    random_keys,
    snapshot,
)
from trireme import _core
from trireme.errors import BadRequest, TriremeError

RATES = _core.RuleValues(lr=0.1)
ONE = _core.RuleValues(lr=1.0)


def ones(n: int, dim: int = 4) -> np.ndarray:
    return np.ones((n, dim), np.float32)


def filled(rule: str = "adagrad", num_keys: int = 5000) -> tuple[_core.Table, np.ndarray]:
    """A table with some rows, and their keys."""
    rng = np.random.default_rng(1)
    keys = random_keys(rng, num_keys)
    table = make_table(4, rule)
    for sequence in (1, 2):
        grads = rng.standard_normal((num_keys, 4), np.float32)
        table.update(keys, grads, [(0, sequence)], RATES, POOL)
    return table, keys


@pytest.mark.parametrize("key", [0, 1, 2**63 - 1, 2**63, MASK - 1, MASK])
def test_any_64_bit_number_is_a_key(key: int) -> None:
    table = make_table(4, "count", initializer="constant", init_a=0.0, init_b=0.0)
    one = keys_of(key)
    assert not contains(table, one)[0]
    assert table.lookup(one, np.empty((1, 4), np.float32), POOL) == 1
    for count in (1, 2):
        assert table.update(one, ones(1), [(0, count)], RATES, POOL) == 1
        assert (lookup(table, one) == count).all()
    assert table.rows == 1
    assert contains(table, one)[0]
    neighbours = keys_of((key - 1) & MASK, (key + 1) & MASK, key ^ 2**63)
    assert not contains(table, neighbours).any()
    assert table.erase(one, POOL) == 1
    assert table.erase(one, POOL) == 0
    assert table.rows == 0


def test_calls_without_keys_do_nothing() -> None:
    table, _ = filled()
    before = snapshot(table)
    none, no_rows = np.empty(0, np.uint64), np.empty((0, 4), np.float32)
    assert table.lookup(none, no_rows, POOL) == 0
    assert table.erase(none, POOL) == 0
    table.contains(none, np.empty(0, bool), POOL)
    assert snapshot(table) == before
    assert table.update(none, no_rows, [(0, 9)], RATES, POOL) == 0
    assert (table.marks(0) == 9).all(), "but for the marks of an empty push"


def test_lookup_answers_duplicates_in_the_order_of_the_keys() -> None:
    table, keys = filled()
    rng = np.random.default_rng(2)
    wanted = rng.choice(np.concatenate([keys, random_keys(rng, 3000)]), 50_000)
    unique, inverse = np.unique(wanted, return_inverse=True)
    np.testing.assert_array_equal(lookup(table, wanted), lookup(table, unique)[inverse])


def test_lookup_counts_the_keys_without_rows() -> None:
    table, keys = filled()
    absent = random_keys(np.random.default_rng(3), 700)[6:]
    absent = absent[~np.isin(absent, keys)]
    mixed = np.random.default_rng(4).permutation(np.concatenate([keys, absent, absent]))
    out = np.empty((len(mixed), 4), np.float32)
    assert table.lookup(mixed, out, POOL) == 2 * len(absent)


@pytest.mark.parametrize("rule", RULES)
def test_a_lookup_changes_nothing(rule: str) -> None:
    table, keys = filled(rule)
    before, rows, size = snapshot(table), table.rows, table.bytes
    mixed = np.concatenate([keys, random_keys(np.random.default_rng(5), 20_000)])
    for pool in (POOL, _core.Pool(1)):
        lookup(table, mixed, pool)
        contains(table, mixed)
    assert snapshot(table) == before
    assert (table.rows, table.bytes) == (rows, size)


def test_a_key_that_occurs_twice_in_an_update_has_the_rule_applied_twice_in_order() -> None:
    """As if the occurrences came one by one; also where the row is new."""
    rng = np.random.default_rng(6)
    some = random_keys(rng, 300)
    keys = rng.choice(some, 20_000)
    grads = rng.standard_normal((len(keys), 3), np.float32)
    at_once, one_by_one = make_table(3, "row adam"), make_table(3, "row adam")
    for sequence in (1, 2):
        assert at_once.update(keys, grads, [(0, sequence)], RATES, POOL) == len(keys)
    rounds = np.zeros(len(keys), int)  # of each position: how often its key came before
    seen: dict[int, int] = {}
    for i, key in enumerate(keys.tolist()):
        rounds[i] = seen.get(key, 0)
        seen[key] = rounds[i] + 1
    sequence = 0
    for _ in (1, 2):
        for number in range(rounds.max() + 1):
            chosen = rounds == number
            sequence += 1
            one_by_one.update(keys[chosen], grads[chosen], [(0, sequence)], RATES, POOL)
    np.testing.assert_array_equal(lookup(at_once, some), lookup(one_by_one, some))
    assert at_once.rows == one_by_one.rows == len(np.unique(keys))


def test_the_order_of_distinct_keys_and_the_number_of_threads_do_not_matter() -> None:
    rng = np.random.default_rng(7)
    keys = random_keys(rng, 30_000)
    grads = rng.standard_normal((len(keys), 4), np.float32)
    by_bucket = np.argsort(buckets_of(keys), kind="stable")
    actual = []
    for order, pool in ((np.arange(len(keys)), _core.Pool(1)), (by_bucket, _core.Pool(3))):
        table = make_table(4, "adam")
        for sequence in (1, 2, 3):
            table.update(keys[order], grads[order], [(0, sequence)], RATES, pool)
        actual.append(lookup(table, keys))
    np.testing.assert_array_equal(actual[0], actual[1])


def test_erased_rows_are_gone_and_others_stay() -> None:
    table, keys = filled(num_keys=30_000)
    weights = lookup(table, keys)
    gone, kept = keys[::3].copy(), np.delete(keys, np.s_[::3])
    assert table.erase(np.concatenate([gone, gone]), POOL) == len(gone)
    assert table.rows == len(kept)
    assert not contains(table, gone).any()
    assert contains(table, kept).all()
    np.testing.assert_array_equal(lookup(table, kept), np.delete(weights, np.s_[::3], axis=0))
    np.testing.assert_array_equal(lookup(table, gone), lookup(make_table(4), gone))
    size = table.bytes
    table.update(gone, ones(len(gone)), [(0, 3)], RATES, POOL)
    assert table.rows == len(keys)
    assert table.bytes == size, "freed rows are used again"


def test_rows_are_found_after_growth() -> None:
    """A million rows, inserted in pieces of all sizes; all found, and nothing else."""
    rng = np.random.default_rng(8)
    keys = random_keys(rng, 1_000_000)
    table = make_table(2, "count", initializer="constant", init_a=0.0, init_b=0.0)
    start = 0
    while start < len(keys):
        part = keys[start : start + int(rng.choice([1, 100, 10_000, 100_000]))]
        table.update(part, ones(len(part), 2), [(0, start + 1)], RATES, POOL)
        start += len(part)
    assert table.rows == len(keys)
    assert (lookup(table, keys) == 1).all()
    others = rng.integers(0, 2**64, len(keys), np.uint64)
    actual = contains(table, others)
    assert not actual[~np.isin(others, keys)].any()
    # Rows of 2 floats: at most 16 bytes beside what a row says.
    assert table.bytes / table.rows - table.row_bytes <= 16


def test_a_growing_table_keeps_its_overhead() -> None:
    """At most 16 bytes beside what a row says, whatever pages its memory has at that moment."""
    keys = random_keys(np.random.default_rng(9), 1_100_000)
    table = make_table(16, "adagrad")
    overheads = []
    for sequence, part in enumerate(np.array_split(keys, 64), 1):
        table.update(part, ones(len(part), 16), [(0, sequence)], RATES, POOL)
        if table.rows >= 1_000_000:
            overheads.append(table.bytes / table.rows - table.row_bytes)
    assert max(overheads) <= 16, overheads


def test_one_bucket_holds_as_many_rows_as_all_others() -> None:
    keys = keys_in([7], 3000)
    table = make_table(1, "count", initializer="constant", init_a=0.0, init_b=0.0)
    for sequence, part in enumerate(np.array_split(keys, 50), 1):
        table.update(part, ones(len(part), 1), [(0, sequence)], RATES, POOL)
    assert (lookup(table, keys) == 1).all()
    assert table.rows == len(table.snapshot(7).keys) == len(keys)


# ---- what is refused ----


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


KEYS = keys_of(3, 4, 5)
WRONG_KEYS = {
    "int64": KEYS.astype(np.int64),
    "float64": KEYS.astype(np.float64),
    "uint32": KEYS.astype(np.uint32),
    "two dimensions": KEYS[None],
    "every second": keys_of(3, 0, 4, 0, 5, 0)[::2],
    "big endian": KEYS.astype(">u8"),
    "a list": [3, 4, 5],
}
WRONG_ROWS = {
    "float64": ones(3).astype(np.float64),
    "one dimension": ones(3).ravel(),
    "transposed": np.asfortranarray(ones(3)),
    "every second": ones(6)[::2],
    "big endian": ones(3).astype(">f4"),
}
WRONG_SIZES = {
    "rows": (ones(2), "expected as many rows as keys: 3, found 2"),
    "dim": (ones(3, 5), "expected rows of dim 4, found 5"),
}


def refused(table: _core.Table, error: type[Exception], match: str, call: Any) -> None:
    before = snapshot(table)
    with pytest.raises(error, match=match):
        call()
    assert snapshot(table) == before


@pytest.mark.parametrize("kind", WRONG_KEYS)
def test_keys_of_another_type_or_layout_are_refused_and_nothing_changes(kind: str) -> None:
    table, _ = filled()
    keys, out, answers = WRONG_KEYS[kind], ones(3), np.zeros(3, bool)
    for call in (
        lambda: table.lookup(keys, out, POOL),
        lambda: table.update(keys, ones(3), [(0, 9)], RATES, POOL),
        lambda: table.erase(keys, POOL),
        lambda: table.contains(keys, answers, POOL),
    ):
        refused(table, TypeError, "incompatible function arguments", call)
    assert (out == 1).all()
    assert not answers.any()


@pytest.mark.parametrize("kind", WRONG_ROWS)
def test_rows_of_another_type_or_layout_are_refused_and_nothing_changes(kind: str) -> None:
    table, _ = filled()
    rows = WRONG_ROWS[kind]
    for call in (
        lambda: table.lookup(KEYS, rows, POOL),
        lambda: table.update(KEYS, rows, [(0, 9)], RATES, POOL),
    ):
        refused(table, TypeError, "incompatible function arguments", call)
    assert (rows == 1).all()


@pytest.mark.parametrize("kind", WRONG_SIZES)
def test_rows_of_another_size_are_refused_with_both_sizes(kind: str) -> None:
    table, _ = filled()
    rows, message = WRONG_SIZES[kind]
    for who, call in (
        ("lookup", lambda: table.lookup(KEYS, rows, POOL)),
        ("update", lambda: table.update(KEYS, rows, [(0, 9)], RATES, POOL)),
    ):
        refused(table, BadRequest, f"Table.{who}: {message}", call)
    refused(
        table,
        BadRequest,
        "Table.contains: expected one answer per key: 3, found 2",
        lambda: table.contains(KEYS, np.zeros(2, bool), POOL),
    )


def test_read_only_arrays_are_taken_as_input_and_refused_as_output() -> None:
    table, _ = filled()
    keys = read_only(KEYS.copy())
    assert table.update(keys, read_only(ones(3)), [(0, 9)], RATES, POOL) == 3
    lookup(table, keys)
    refused(
        table,
        TypeError,
        "incompatible function arguments",
        lambda: table.lookup(keys, read_only(ones(3)), POOL),
    )
    refused(
        table,
        TypeError,
        "incompatible function arguments",
        lambda: table.contains(keys, read_only(np.zeros(3, bool)), POOL),
    )


FILL_UNTIL_THE_LIMIT = """
import resource
import numpy as np
from tests.tables import POOL, contains, lookup, make_table, random_keys, snapshot
from trireme import _core
from trireme.errors import ResourceExhausted

rng = np.random.default_rng(0)
table = make_table(64, "count", initializer="constant", init_a=0.0, init_b=0.0)
rates = _core.RuleValues(lr=0.1)
size = 20_000
keys = random_keys(rng, size * 20)
grads = np.ones((size, 64), np.float32)
table.update(keys[:size], grads, [(0, 1)], rates, POOL)
usage = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_DATA)
before, everything = snapshot(table), np.ones((len(keys), 64), np.float32)
resource.setrlimit(resource.RLIMIT_DATA, (usage, limits[1]))
try:  # not even the scratch of the call
    table.update(keys, everything, [(0, 99)], rates, POOL)
except ResourceExhausted as error:
    print(error)
resource.setrlimit(resource.RLIMIT_DATA, limits)
assert snapshot(table) == before
del before, everything

resource.setrlimit(resource.RLIMIT_DATA, (usage + (20 << 20), limits[1]))
sequence, messages = 1, []
while not messages:
    sequence += 1
    part = keys[(sequence - 1) * size : sequence * size]
    try:
        table.update(part, grads, [(0, sequence)], rates, POOL)
    except ResourceExhausted as error:
        messages.append(str(error))
resource.setrlimit(resource.RLIMIT_DATA, limits)
# What the call could not apply, it did not mark: the same call again finishes it.
applied = contains(table, part).sum()
assert applied < size, applied
assert table.rows == (sequence - 1) * size + applied
assert table.update(part, grads, [(0, sequence)], rates, POOL) == size - applied
assert table.rows == sequence * size
done = keys[: sequence * size]
out = np.empty((len(done), 64), np.float32)
assert table.lookup(done, out, POOL) == 0
assert (out == 1).all()
assert sum(len(content[0]) for content in snapshot(table).values()) == len(done) * 8
print(messages[0])
"""


def test_a_table_out_of_memory_raises_and_stays_intact() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILL_UNTIL_THE_LIMIT],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    scratch, rows = done.stdout.splitlines()
    assert scratch.endswith("expected memory for a call's scratch or result, found none")
    assert rows.endswith("bytes from the system, found: Cannot allocate memory")


def test_readers_do_not_keep_writers_waiting() -> None:
    """PendingLookups that overlap all the time, until the updates are through."""
    table, keys = filled(num_keys=40_000)
    done = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        out, pool = np.empty((len(keys), 4), np.float32), _core.Pool(1)
        while not done.is_set():
            try:
                table.lookup(keys, out, pool)
            except TriremeError as error:
                errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for sequence in range(3, 203):
        table.update(keys[:200], ones(200), [(0, sequence)], ONE, POOL)
    done.set()
    for reader in readers:
        reader.join()
    assert errors == []
