"""The per-key columns of a push: what it says of each of its K keys besides the gradient.

| Column | | Of tables with |
|---|---|---|
| show_click | float32 (K, 2): how often the key was shown and clicked | a ScorePolicy |
| feature | uint32 (K,): which feature it came from | a ScorePolicy |
| count | uint32 (K,): how often it occurred | a CountFilter |

Which of them the pushes of a table carry is part of its schema (`TableSchema.columns`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.errors import BadRequest
from trireme.protocol.routing import Floats, Keys

KeyColumns = Mapping[str, npt.NDArray[Any]]

# Name -> dtype, and the shape behind K.
FORMS: dict[str, tuple[type, tuple[int, ...]]] = {
    "show_click": (np.float32, (2,)),
    "feature": (np.uint32, ()),
    "count": (np.uint32, ()),
}


def merge(
    parts: Sequence[tuple[Keys, Floats, KeyColumns, float]], pool: _core.Pool
) -> tuple[Keys, Floats, KeyColumns]:
    """One push out of several for one table.

    Args:
        parts: of each its distinct keys (K_i,), gradients (K_i, D), columns, and what its gradients
            are multiplied by.

    Returns:
        The union of the keys; the sums of their gradients, shows, clicks and counts; of each the
        feature that the first part with it names.
    """
    if len(parts) == 1 and parts[0][3] == 1.0:
        return parts[0][:3]
    keys_K, gradients_KD, index = _core.merge(
        [(keys, gradients, scale) for keys, gradients, _, scale in parts], pool
    )
    rows = np.split(index, np.cumsum([len(keys) for keys, *_ in parts[:-1]]))
    columns = {
        name: _merged(
            name, len(keys_K), [(row, part[2][name]) for row, part in zip(rows, parts, strict=True)]
        )
        for name in parts[0][2]
    }
    return keys_K, gradients_KD, columns


def _merged(
    name: str, num_keys: int, parts: list[tuple[npt.NDArray[np.int32], npt.NDArray[Any]]]
) -> npt.NDArray[Any]:
    dtype, shape = FORMS[name]
    merged: npt.NDArray[Any] = np.zeros((num_keys, *shape), dtype)
    if name == "feature":
        for row, values in reversed(parts):
            merged[row] = values
    else:
        for row, values in parts:  # a part has a key once
            merged[row] += values
    return merged


def nothing(dim: int, names: Sequence[str]) -> tuple[Keys, Floats, KeyColumns]:
    """A push of no keys, to a table whose pushes carry the columns of these names."""
    columns: KeyColumns = {name: np.empty((0, *FORMS[name][1]), FORMS[name][0]) for name in names}
    return np.empty(0, np.uint64), np.empty((0, dim), np.float32), columns


def joined(
    of_classes: Sequence[tuple[Keys, Floats, KeyColumns]],
) -> tuple[Keys, list[Floats], KeyColumns]:
    """The keys of a table's row classes, one class behind the other; the gradients of each; the
    columns of all keys.
    """
    keys, _, columns = of_classes[0]
    if len(of_classes) > 1:
        keys = np.concatenate([keys for keys, _, _ in of_classes])
        columns = {
            name: np.concatenate([of_class[name] for _, _, of_class in of_classes])
            for name in columns
        }
    return keys, [gradients for _, gradients, _ in of_classes], columns


def check(table: str, expected: Sequence[str], columns: KeyColumns) -> None:
    """Raises BadRequest unless the columns of a push are those of the table, with shows and clicks
    that can be added up.
    """
    if tuple(columns) != tuple(expected):
        raise BadRequest(
            f"push: table {table!r} has the columns {list(expected)}, found {list(columns)}"
        )
    shows = columns.get("show_click")
    if shows is not None and shows.size and not 0 <= shows.min() <= shows.max() < np.inf:
        raise BadRequest(
            f"push: expected finite shows and clicks >= 0 of table {table!r},"
            f" found {shows.min()} to {shows.max()}"
        )


def fleet_scale(rule: Mapping[str, Any], show_click: npt.NDArray[Any], examples: int) -> Floats:
    """What scale="fleet" multiplies the gradients of a mean over `examples` by: their number,
    divided by the key's shows if the rule says so (`per_show`). (K, 1), or (1, 1) for all keys.

    Nothing is divided for a key whose examples were not shown at all.
    """
    scale = np.full((1, 1), examples, np.float32)
    if not rule["per_show"]:
        return scale
    shows_K1 = show_click[:, :1]
    return np.divide(scale, np.where(shows_K1 > 0, shows_K1, np.float32(1)))
