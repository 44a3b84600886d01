"""The output of `trireme inspect`: paragraphs of plain text."""

from collections.abc import Callable, Iterator

import numpy as np

from trireme import drawing
from trireme.inspect.difference import Difference
from trireme.inspect.saved_checkpoint import shown_time
from trireme.inspect.saved_model import RowBatch, SavedModel, SavedTable
from trireme.inspect.value_statistics import QUANTILES, ScoreHistogram, ValueStatistics
from trireme.inspect.wanted import Wanted, key_of
from trireme.protocol.wire import Array

Watch = Callable[[int], None]
SHOWN_FLOATS = 16


def overview(source: SavedModel) -> Iterator[str]:
    """A summary from the manifest alone."""
    yield from source.headline()
    yield ""
    lines: list[list[str]] = []
    for table in source.tables.values():
        shown = {
            "table": table.name,
            "rows": f"{table.num_rows:,}",
            "removed": f"{table.num_removed:,}",
            "bytes": drawing.size(table.num_bytes),
            **table.properties(),
        }
        lines = [*(lines or [list(shown)]), list(shown.values())]
    yield from drawing.columns(lines)


def table_values(table: SavedTable, watch: Watch) -> Iterator[str]:
    """Statistics of every column of a table; for a scored table also a histogram of its scores.

    A scored table is read twice: the decay of shows depends on the newest push.
    """
    parts = {
        name: ValueStatistics()
        for name in ("weights", "state", "updates", "show", "click", "score")
    }
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
        scores = ScoreHistogram(table.policy, newest)
        for rows in table.rows():
            parts["score"].add(scores.add(rows))
            watch(len(rows.keys))
    pushes = f"last pushes at data time {shown_time(min(oldest, newest))} to {shown_time(newest)}"
    yield f"table {table.name}" + (f": {pushes}" if newest else "")
    yield from _statistics_table({name: values for name, values in parts.items() if values.is_used})
    if scores is not None:
        yield ""
        yield from _score_bars(table.name, scores)


def _statistics_table(parts: dict[str, ValueStatistics]) -> list[str]:
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


def _score_bars(name: str, scores: ScoreHistogram) -> Iterator[str]:
    policy = scores.policy
    yield (
        f"scores of {name} at data time {shown_time(scores.time)}:"
        f" {scores.num_below_threshold:,} rows are below delete_threshold"
        f" {policy.delete_threshold:g}"
    )
    yield from drawing.bars(*scores.bars())


def rows_of_keys(table: SavedTable, wanted: list[Wanted]) -> Iterator[str]:
    """The rows of these keys, or of (feature, value), or a line that there is none. Raises
    BadRequest: a value, where nobody knows whether features have keys of their own.
    """
    if table.has_all_features:  # another table may have it
        wanted = [one for one in wanted if isinstance(one, int) or one[0] in table.features]
    keys = [key_of(table.name, one, table.salt) for one in wanted]
    rows = table.find(np.array(keys, np.uint64))
    for one, key in dict(zip(wanted, keys, strict=True)).items():
        row = rows.get(key)
        named = f"key {key}" if isinstance(one, int) else f"{one[0]}={one[1]}, key {key}"
        if not isinstance(one, int) and table.features and one[0] not in table.features:
            named += f" (no feature that training noted, which are {', '.join(table.features)})"
        missing = ": no row"
        if isinstance(one, int) and table.salt:
            missing += "; each feature has keys of its own here: ask for FEATURE=VALUE"
        if not isinstance(one, int) and isinstance(one[1], int) and one[0] in table.string_features:
            missing += f"; training took strings here: ask for \"{one[0]}='{one[1]}'\""
        yield f"table {table.name}, {named}" + (missing if row is None else "")
        if row is not None:
            [(weights, state)] = table.floats(row)
            has_classes = len(table.class_dims) > 1
            lines = _row_lines(row, weights[0], state[0], has_classes=has_classes)
            yield from (f"  {line}" for line in lines)


def _row_lines(row: RowBatch, weights: Array, state: Array, *, has_classes: bool) -> Iterator[str]:
    for name, values in (("weights", weights), ("state", state)):
        if len(values):
            shown = " ".join(drawing.number(float(value)) for value in values[:SHOWN_FLOATS])
            more = len(values) - SHOWN_FLOATS
            yield f"{name} ({len(values)}): {shown}" + (f" ... {more} more" if more > 0 else "")
    statistics = row.statistics[0]
    if row.updates.size:
        yield f"updates: {', '.join(f'{count:,}' for count in row.updates[0].tolist())}"
    # A class is one of the lengths of the rows, of which most tables have one.
    parts = [f"class {row.classes[0]}"] if has_classes else []
    for name in statistics.dtype.names or ():
        value = statistics[name].item()
        parts.append(f"{name} {shown_time(value) if name == 'time' else format(value, '.6g')}")
    if parts:
        yield ", ".join(parts)


def difference_lines(difference: Difference, old: SavedModel, new: SavedModel) -> Iterator[str]:
    yield f"from {old.path} (version {old.version})"
    yield f"to   {new.path} (version {new.version})"
    yield ""
    head = ["table", "added", "removed", "changed", "statistics alone", "same", "largest change"]
    lines = [[*head, "of key"]]
    for name, table in difference.tables.items():
        counts = (table.added, table.removed, table.changed, table.touched, table.same)
        largest = drawing.number(table.largest) if table.changed else "-"
        key = "-" if table.largest_key is None else str(table.largest_key)
        lines.append([name, *(f"{count:,}" for count in counts), largest, key])
    yield from drawing.columns(lines)
    for what, names in (
        ("in the first alone", difference.only_old),
        ("in the second alone", difference.only_new),
        ("with another schema", difference.other_schema),
    ):
        if names:
            yield f"tables {what}: {', '.join(names)}"
    if difference.dense:
        yield ""
        lines = [["parameter", "elements", "changed", "largest change", "in one alone"]]
        for name, dense in sorted(difference.dense.items()):
            largest = drawing.number(dense.largest) if dense.changed else "-"
            lines.append(
                [name, f"{dense.elements:,}", f"{dense.changed:,}", largest, f"{dense.others:,}"]
            )
        yield from drawing.columns(lines)
