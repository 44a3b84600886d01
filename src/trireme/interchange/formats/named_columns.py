"""Rows as named columns, in Parquet files and NumPy arrays of other systems.

key          (n,) uint64, or int64 with the same bits
weights      (n, D) float32; in Parquet a list per row
state        (n, W) float32; default the state of a new row
show, click, delta_score, feature    of a table with a ScorePolicy; default 0
time         data time of the last push in seconds; show and click are as of that day
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from trireme.errors import BadRequest
from trireme.interchange.formats.fleet_rows import RowError
from trireme.interchange.formats.fleet_state import WITH_POWERS, WITHOUT_POWERS, head_and_tail
from trireme.protocol.wire import Array
from trireme.rows.wide_rows import SCORE, RowLayout, WideRows
from trireme.table import TableSchema

STATISTICS: Mapping[str, type] = {
    "show": np.float64,
    "click": np.float64,
    "delta_score": np.float32,
    "feature": np.uint32,
    "time": np.uint32,
}
DTYPES: Mapping[str, type] = {
    "key": np.uint64,
    "weights": np.float32,
    "state": np.float32,
    **STATISTICS,
}
RANK2 = ("weights", "state")


def checked(name: str, values: Array) -> Array:
    """A column in its dtype, contiguous. Raises BadRequest if the conversion would lose values."""
    dtype = DTYPES.get(name)
    if dtype is None:
        raise BadRequest(f"import: expected columns of {sorted(DTYPES)}, found {name!r}")
    rank = 2 if name in RANK2 else 1
    if rank == 2 and values.dtype == object and len({np.shape(row) for row in values}) == 1:
        values = np.stack(list(values))  # lists in a column of a DataFrame
    if values.ndim != rank:
        raise BadRequest(
            f"import: expected column {name!r} of rank {rank}, found shape {values.shape}"
        )
    if name == "key" and values.dtype == np.int64:
        return np.ascontiguousarray(values).view(np.uint64)
    if values.dtype == bool or not np.can_cast(values.dtype, dtype, "same_kind"):
        raise BadRequest(
            f"import: expected column {name!r} of {np.dtype(dtype).name}, found {values.dtype}"
        )
    with np.errstate(over="ignore"):  # rows_of refuses infinite values
        return np.ascontiguousarray(values.astype(dtype, copy=False))


def rows_of(
    schema: TableSchema,
    layout: RowLayout,
    class_dims: Sequence[int],
    columns: Mapping[str, Array],
    time: int,
) -> tuple[npt.NDArray[np.uint8], WideRows]:
    """Row classes and wide rows of `checked` columns.

    class_dims: weights of each row class.
    columns: also `num_weights` (n,): how many weights a row has; default all of its column.
    time: data time in seconds of rows that have none.

    Raises BadRequest: columns of a wrong width or length, or columns that the table does not have.
    RowError: an invalid value; names the row.
    """
    weights = columns["weights"]
    num_weights = columns.get("num_weights", np.full(len(weights), weights.shape[1]))
    missing = layout.dim - weights.shape[1]
    if missing > 0 and ("num_weights" in columns or weights.shape[1] in class_dims):
        weights = np.pad(weights, ((0, 0), (0, missing)))
    columns = {**columns, "weights": weights}
    _check_shapes(schema, layout, columns)
    classes = _classes(class_dims, num_weights)
    rows = np.zeros((len(weights), layout.row_bytes), np.uint8)
    layout.weights(rows)[:] = weights
    state = layout.state(rows)
    if "state" in columns:
        state[:] = columns["state"]
        squares = state[:, _squares(schema, layout)]
        wrong = np.flatnonzero(~(np.isfinite(squares) & (squares >= 0)).all(1))
        if len(wrong):
            row = int(wrong[0])
            expected = "a state with finite sums of squares >= 0"
            raise RowError(row, expected, f"{squares[row].tolist()}")
    else:
        _begin(schema, state, np.array(class_dims)[classes, None])
    for name, low in (("weights", -np.inf), ("show", 0), ("click", 0), ("delta_score", -np.inf)):
        if name in columns:
            values = columns[name] if name in RANK2 else columns[name][:, None]
            wrong = np.flatnonzero(~(np.isfinite(values) & (values >= low)).all(1))
            if len(wrong):
                row, expected = int(wrong[0]), f"finite {name}" + " >= 0" * (low == 0)
                raise RowError(row, expected, f"{values[row].tolist()}")
    statistics = layout.statistics(rows)
    statistics["time"] = time
    for name in STATISTICS:
        if name in columns:
            statistics[name] = columns[name]
    return classes, rows


def _squares(schema: TableSchema, layout: RowLayout) -> list[int]:
    """The columns of the state that are sums or means of squares."""
    rule, size = str(schema.rule["name"]), layout.state_floats
    if rule in (*WITHOUT_POWERS, *WITH_POWERS):
        return [
            target + i
            for part in head_and_tail(schema)
            for source, target, count in part.copies
            for i in range(count)
            if source + i >= part.unsigned
        ]
    if rule == "adagrad":
        return list(range(size))
    if rule in ("adam", "ftrl"):  # first moments or sums, those of squares, and perhaps a count
        half = size // 2
        return list(range(half, 2 * half))
    return []


def _classes(class_dims: Sequence[int], num_weights: Array) -> npt.NDArray[np.uint8]:
    """The last class with as many weights as each row has. Rows of one weight become heads where
    there are both; a head that should be a row of one weight can still become one. Raises
    RowError where no class fits.
    """
    class_of_dim = np.full(max(class_dims) + 1, len(class_dims), np.int64)
    class_of_dim[list(class_dims)] = np.arange(len(class_dims))
    classes = class_of_dim[num_weights]
    wrong = np.flatnonzero(classes == len(class_dims))
    if len(wrong):
        expected = " or ".join(map(str, sorted(set(class_dims))))
        raise RowError(int(wrong[0]), f"{expected} weights", f"{num_weights[wrong[0]]}")
    return classes.astype(np.uint8)


def _check_shapes(schema: TableSchema, layout: RowLayout, columns: Mapping[str, Array]) -> None:
    num_rows = len(columns["key"])
    widths = {"weights": layout.dim, "state": layout.state_floats}
    for name, values in columns.items():
        expected = (num_rows, widths[name]) if name in widths else (num_rows,)
        if values.shape != expected:
            raise BadRequest(
                f"table {schema.name!r}: expected column {name!r} of shape {expected},"
                f" found {values.shape}"
            )
    if not layout.is_scored:
        scores = sorted({name for name, _ in SCORE} & columns.keys())
        if scores:
            raise BadRequest(
                f"table {schema.name!r}: it has no ScorePolicy, and so no place for the"
                f" columns {scores}"
            )


def _begin(schema: TableSchema, state: Array, dims: Array) -> None:
    """Fill in the state of rows that have `dims` (n, 1) weights, but no updates yet."""
    rule = str(schema.rule["name"])
    if rule == "ftrl":
        raise BadRequest(
            f"table {schema.name!r}: expected a column 'state', found none; weights of"
            " FTRL follow from its state"
        )
    if rule in (*WITHOUT_POWERS, *WITH_POWERS):
        # One update of both parts, or the next update would initialize the tail.
        head, tail = head_and_tail(schema)
        begun = np.uint32(1).view(np.float32)
        if head.count is not None:
            state[:, head.count] = begun
        if tail.count is not None:
            state[dims[:, 0] > 1, tail.count] = begun
    elif rule == "adagrad":
        has_sum = schema.rule["shared"] | (np.arange(state.shape[1]) < dims)
        state[:] = has_sum * np.float32(schema.rule["initial_accumulator"])
