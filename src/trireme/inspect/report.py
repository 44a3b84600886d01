"""What `trireme inspect` writes: paragraphs of plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from trireme import drawing
from trireme.inspect.checkpoint_source import moment
from trireme.inspect.difference import Difference
from trireme.inspect.scores import Scores
from trireme.inspect.source import Rows, Source, TableSource
from trireme.inspect.values import QUANTILES, Values
from trireme.protocol.wire import Array

Watch = Callable[[int], None]
SHOWN_FLOATS = 16


def overview(source: Source) -> Iterator[str]:
    """What the manifest says: nothing else is read."""
    yield from source.headline()
    yield ""
    lines: list[list[str]] = []
    for table in source.tables.values():
        says = {
            "table": table.name,
            "rows": f"{table.num_rows:,}",
            "removed": f"{table.num_removed:,}",
            "bytes": drawing.size(table.num_bytes),
            **table.says(),
        }
        lines = [*(lines or [list(says)]), list(says.values())]
    yield from drawing.columns(lines)


def table_values(table: TableSource, watch: Watch) -> Iterator[str]:
    """Statistics of every column of a table; of a scored one, how its scores are spread.

    Reads the rows twice: how far shows have faded depends on the newest push.
    """
    parts = {name: Values() for name in ("weights", "state", "updates", "show", "click", "score")}
    oldest, newest = 1 << 32, 0
    for rows in table.rows():
        for weights, state in table.floats(rows):
            parts["weights"].add(weights)
            parts["state"].add(state)
        parts["updates"].add(rows.updates)
        for name in set(rows.statistics.dtype.names or ()) & parts.keys():
            parts[name].add(rows.statistics[name])
        if "time" in (rows.statistics.dtype.names or ()):
            times = rows.statistics["time"]
            oldest, newest = min(oldest, int(times.min())), max(newest, int(times.max()))
        watch(len(rows.keys))
    scores = None
    if table.policy is not None:
        scores = Scores(table.policy, newest)
        for rows in table.rows():
            parts["score"].add(scores.add(rows))
            watch(len(rows.keys))
    pushes = f"last pushes at data time {moment(min(oldest, newest))} to {moment(newest)}"
    yield f"table {table.name}" + (f": {pushes}" if newest else "")
    yield from _of_parts({name: values for name, values in parts.items() if values.is_used})
    if scores is not None:
        yield ""
        yield from _of_scores(table.name, scores)


def _of_parts(parts: dict[str, Values]) -> list[str]:
    quantiles = [f"{100 * q:g} %" for q in QUANTILES]
    lines = [["", "count", "mean", "std", "min", *quantiles, "max", "NaN", "inf"]]
    for name, values in parts.items():
        is_empty = values.count == 0
        numbers = [values.mean, values.std, np.nan if is_empty else values.lowest]
        numbers += [*values.quantiles(), np.nan if is_empty else values.highest]
        shown = [drawing.number(value) for value in numbers]
        others = [f"{values.num_nan:,}", f"{values.num_infinite:,}"]
        lines.append([name, f"{values.count:,}", *shown, *others])
    return drawing.columns(lines)


def _of_scores(name: str, scores: Scores) -> Iterator[str]:
    policy = scores.policy
    yield (
        f"scores of {name} at data time {moment(scores.time)}: {scores.num_below_threshold:,} rows"
        f" are below delete_threshold {policy.delete_threshold:g}"
    )
    yield from drawing.bars(*scores.bars())


def rows_of_keys(table: TableSource, keys: list[int]) -> Iterator[str]:
    """The rows of these keys, or that there is none."""
    found = table.find(np.array(keys, np.uint64))
    for key in dict.fromkeys(keys):
        row = found.get(key)
        yield f"table {table.name}, key {key}: " + ("no row" if row is None else "")
        if row is not None:
            [(weights, state)] = table.floats(row)
            yield from (f"  {line}" for line in _of_row(row, weights[0], state[0]))


def _of_row(row: Rows, weights: Array, state: Array) -> Iterator[str]:
    for name, values in (("weights", weights), ("state", state)):
        if len(values):
            shown = " ".join(drawing.number(float(value)) for value in values[:SHOWN_FLOATS])
            more = len(values) - SHOWN_FLOATS
            yield f"{name} ({len(values)}): {shown}" + (f" ... {more} more" if more > 0 else "")
    statistics = row.statistics[0]
    if row.updates.size:
        yield f"updates: {', '.join(f'{count:,}' for count in row.updates[0].tolist())}"
    parts = [f"class {row.classes[0]}"]
    for name in statistics.dtype.names or ():
        value = statistics[name].item()
        parts.append(f"{name} {moment(value) if name == 'time' else format(value, '.6g')}")
    yield ", ".join(parts)


def of_difference(found: Difference, old: Source, new: Source) -> Iterator[str]:
    yield f"from {old.path} (version {old.version})"
    yield f"to   {new.path} (version {new.version})"
    yield ""
    head = ["table", "added", "removed", "changed", "statistics alone", "same", "largest change"]
    lines = [[*head, "of key"]]
    for name, table in found.tables.items():
        counts = (table.added, table.removed, table.changed, table.touched, table.same)
        largest = drawing.number(table.largest) if table.changed else "-"
        key = "-" if table.largest_key is None else str(table.largest_key)
        lines.append([name, *(f"{count:,}" for count in counts), largest, key])
    yield from drawing.columns(lines)
    for what, names in (
        ("in the first alone", found.only_old),
        ("in the second alone", found.only_new),
        ("with another schema", found.other_schema),
    ):
        if names:
            yield f"tables {what}: {', '.join(names)}"
    if found.dense:
        yield ""
        lines = [["parameter", "elements", "changed", "largest change", "in one alone"]]
        for name, dense in sorted(found.dense.items()):
            largest = drawing.number(dense.largest) if dense.changed else "-"
            lines.append(
                [name, f"{dense.elements:,}", f"{dense.changed:,}", largest, f"{dense.others:,}"]
            )
        yield from drawing.columns(lines)
