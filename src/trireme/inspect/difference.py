"""What differs between two checkpoints: rows by their keys, dense parameters element by element.

Both are read once, bucket by bucket, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from trireme.inspect.source import Rows, Source, TableSource
from trireme.protocol.wire import Array

Watch = Callable[[int], None]


@dataclass
class TableDifference:
    """Counts of rows by key. `changed`: weights, state or class differ; `touched`: statistics
    alone do.
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
    """Of one parameter. `elements`: in both; `others`: in one of the two alone."""

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


def compare(old: Source, new: Source, watch: Watch) -> Difference:
    """What `new` has that `old` has not, and the other way round.

    watch: told how many rows have been read.
    """
    found = Difference(
        only_old=sorted(old.tables.keys() - new.tables.keys()),
        only_new=sorted(new.tables.keys() - old.tables.keys()),
    )
    for name in sorted(old.tables.keys() & new.tables.keys()):
        if old.tables[name].comparable != new.tables[name].comparable:
            found.other_schema.append(name)
        else:
            found.tables[name] = _compare_tables(old.tables[name], new.tables[name], watch)
    _compare_dense(old, new, found.dense)
    return found


def _compare_tables(old: TableSource, new: TableSource, watch: Watch) -> TableDifference:
    found = TableDifference()
    for before, after in _side_by_side(old.buckets(), new.buckets()):
        if before is None or after is None:
            found.removed += 0 if before is None else len(before.keys)
            found.added += 0 if after is None else len(after.keys)
        else:
            _compare_bucket(before, after, found)
        watch(sum(len(rows.keys) for rows in (before, after) if rows is not None))
    return found


def _side_by_side(
    old: Iterator[tuple[int, Rows]], new: Iterator[tuple[int, Rows]]
) -> Iterator[tuple[Rows | None, Rows | None]]:
    """The rows of each bucket in both; None where one has none."""
    end = (1 << 16, None)
    before, after = next(old, end), next(new, end)
    while before[1] is not None or after[1] is not None:
        bucket = min(before[0], after[0])
        yield (
            before[1] if before[0] == bucket else None,
            after[1] if after[0] == bucket else None,
        )
        before, after = (
            next(rows, end) if of[0] == bucket else of for of, rows in ((before, old), (after, new))
        )


def _compare_bucket(before: Rows, after: Rows, found: TableDifference) -> None:
    common, at_old, at_new = np.intersect1d(
        before.keys, after.keys, assume_unique=True, return_indices=True
    )
    found.removed += len(before.keys) - len(common)
    found.added += len(after.keys) - len(common)
    old, new = before.take(at_old), after.take(at_new)
    is_changed = old.classes != new.classes
    for name in ("weights", "state", "updates"):
        is_changed |= (_bytes(getattr(old, name)) != _bytes(getattr(new, name))).any(axis=1)
    is_touched = ~is_changed & (_bytes(old.statistics) != _bytes(new.statistics)).any(axis=1)
    found.changed += int(is_changed.sum())
    found.touched += int(is_touched.sum())
    found.same += int((~is_changed & ~is_touched).sum())
    if not is_changed.any():
        return
    with np.errstate(invalid="ignore"):  # infinities
        changes = np.abs(new.weights[is_changed].astype(np.float64) - old.weights[is_changed])
    largest = np.nan_to_num(changes.max(axis=1), nan=np.inf)
    at = int(largest.argmax())
    if largest[at] > found.largest:
        found.largest = float(largest[at])
        found.largest_key = int(new.keys[is_changed][at])


def _bytes(values: Array) -> Array:
    """(n, bytes of a row): NaNs are equal if their bits are."""
    if values.dtype.itemsize == 0 or values.size == 0:
        return np.empty((len(values), 0), np.uint8)
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def _compare_dense(old: Source, new: Source, found: dict[str, DenseDifference]) -> None:
    """One block at a time of the new, beside the whole dense part of the old, which may be cut
    otherwise.
    """
    before = _whole(old)
    left = {param: len(weights) for param, weights in before.items()}
    for param, start, weights in new.dense():
        of = found.setdefault(param, DenseDifference())
        known = before.get(param, weights[:0])[start : start + len(weights)]
        of.others += len(weights) - len(known)
        left[param] = left.get(param, 0) - len(known)
        weights = weights[: len(known)]
        is_changed = (_bytes(known) != _bytes(weights)).any(axis=1)
        of.elements += len(weights)
        of.changed += int(is_changed.sum())
        if is_changed.any():
            with np.errstate(invalid="ignore"):
                changes = np.abs(weights[is_changed].astype(np.float64) - known[is_changed])
            of.largest = max(of.largest, float(np.nan_to_num(changes, nan=np.inf).max()))
    for param, num_left in left.items():
        found.setdefault(param, DenseDifference()).others += num_left


def _whole(source: Source) -> dict[str, Array]:
    """Each dense parameter, flat."""
    parts: dict[str, dict[int, Array]] = {}
    for param, start, weights in source.dense():
        parts.setdefault(param, {})[start] = weights
    return {
        param: np.concatenate([of[start] for start in sorted(of)]) for param, of in parts.items()
    }
