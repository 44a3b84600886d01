"""The difference between two checkpoints: rows by key, dense parameters by element.

Both are read once, side by side, bucket by bucket.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from trireme.inspect.saved_model import RowBatch, SavedModel, SavedTable
from trireme.protocol.wire import Array

Watch = Callable[[int], None]


@dataclass
class TableDifference:
    """Counts of rows by key. changed: weights, state or class differ. touched: only statistics
    differ.
    """

    added: int = 0
    removed: int = 0
    changed: int = 0
    touched: int = 0
    same: int = 0
    largest: float = 0.0  # change of a weight
    largest_key: int | None = None


@dataclass
class DenseDifference:
    """Counts of one parameter's elements: in both, and in only one of the two."""

    elements: int = 0
    others: int = 0
    changed: int = 0
    largest: float = 0.0


@dataclass
class Difference:
    tables: dict[str, TableDifference] = field(default_factory=dict)
    only_old: list[str] = field(default_factory=list)
    only_new: list[str] = field(default_factory=list)
    other_schema: list[str] = field(default_factory=list)
    dense: dict[str, DenseDifference] = field(default_factory=dict)


def compare(old: SavedModel, new: SavedModel, watch: Watch) -> Difference:
    """Compare two models. watch: called with the number of rows read."""
    difference = Difference(
        only_old=sorted(old.tables.keys() - new.tables.keys()),
        only_new=sorted(new.tables.keys() - old.tables.keys()),
    )
    for name in sorted(old.tables.keys() & new.tables.keys()):
        if old.tables[name].comparable != new.tables[name].comparable:
            difference.other_schema.append(name)
        else:
            difference.tables[name] = _compare_tables(old.tables[name], new.tables[name], watch)
    _compare_dense(old, new, difference.dense)
    return difference


def _compare_tables(old: SavedTable, new: SavedTable, watch: Watch) -> TableDifference:
    counts = TableDifference()
    for before, after in _side_by_side(old.buckets(), new.buckets()):
        if before is None or after is None:
            counts.removed += 0 if before is None else len(before.keys)
            counts.added += 0 if after is None else len(after.keys)
        else:
            _compare_bucket(before, after, counts)
        watch(sum(len(rows.keys) for rows in (before, after) if rows is not None))
    return counts


def _side_by_side(
    old: Iterator[tuple[int, RowBatch]], new: Iterator[tuple[int, RowBatch]]
) -> Iterator[tuple[RowBatch | None, RowBatch | None]]:
    """The rows of each bucket in both; None where one of them has none."""
    end = (1 << 16, None)
    before, after = next(old, end), next(new, end)
    while before[1] is not None or after[1] is not None:
        bucket = min(before[0], after[0])
        yield (before[1] if before[0] == bucket else None, after[1] if after[0] == bucket else None)
        before = next(old, end) if before[0] == bucket else before
        after = next(new, end) if after[0] == bucket else after


def _compare_bucket(before: RowBatch, after: RowBatch, counts: TableDifference) -> None:
    common, at_old, at_new = np.intersect1d(
        before.keys, after.keys, assume_unique=True, return_indices=True
    )
    counts.removed += len(before.keys) - len(common)
    counts.added += len(after.keys) - len(common)
    old, new = before.take(at_old), after.take(at_new)
    is_changed = old.classes != new.classes
    for name in ("weights", "state", "updates"):
        is_changed |= (_bytes(getattr(old, name)) != _bytes(getattr(new, name))).any(axis=1)
    is_touched = ~is_changed & (_bytes(old.statistics) != _bytes(new.statistics)).any(axis=1)
    counts.changed += int(is_changed.sum())
    counts.touched += int(is_touched.sum())
    counts.same += int((~is_changed & ~is_touched).sum())
    if not is_changed.any():
        return
    largest = _changes(old.weights[is_changed], new.weights[is_changed]).max(axis=1)
    at = int(largest.argmax())
    if largest[at] > counts.largest:
        counts.largest = float(largest[at])
        counts.largest_key = int(new.keys[is_changed][at])


def _changes(old: Array, new: Array) -> Array:
    """How far weights moved; infinite where a difference is not a number."""
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.abs(new.astype(np.float64) - old), nan=np.inf)


def _bytes(values: Array) -> Array:
    """(n, bytes of a row). NaNs with the same bits are equal."""
    if values.dtype.itemsize == 0 or values.size == 0:
        return np.empty((len(values), 0), np.uint8)
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def _compare_dense(
    old: SavedModel, new: SavedModel, differences: dict[str, DenseDifference]
) -> None:
    """Compare one block of the new at a time with the whole dense part of the old, whose blocks may
    be cut at other places.
    """
    before = _whole(old)
    left = {param: len(weights) for param, weights in before.items()}
    for param, start, weights in new.dense():
        difference = differences.setdefault(param, DenseDifference())
        known = before.get(param, weights[:0])[start : start + len(weights)]
        difference.others += len(weights) - len(known)
        left[param] = left.get(param, 0) - len(known)
        weights = weights[: len(known)]
        is_changed = (_bytes(known) != _bytes(weights)).any(axis=1)
        difference.elements += len(weights)
        difference.changed += int(is_changed.sum())
        if is_changed.any():
            largest = float(_changes(known[is_changed], weights[is_changed]).max())
            difference.largest = max(difference.largest, largest)
    for param, num_left in left.items():
        differences.setdefault(param, DenseDifference()).others += num_left


def _whole(source: SavedModel) -> dict[str, Array]:
    """Each dense parameter, flat."""
    blocks: dict[str, list[Array]] = {}
    for param, _, weights in sorted(source.dense(), key=lambda block: block[:2]):
        blocks.setdefault(param, []).append(weights)
    return {param: np.concatenate(weights) for param, weights in blocks.items()}
