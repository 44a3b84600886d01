"""The per-key columns of a push: values of each of its K keys besides the gradient.

| Column | | Of tables with |
|---|---|---|
| show_click | float32 (K, 2): shows and clicks of the key | a ScorePolicy |
| feature | uint32 (K,): the feature that it came from | a ScorePolicy |
| count | uint32 (K,): occurrences of the key | a CountFilter |

The table's schema says which of them its pushes carry (`TableSchema.columns`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.protocol.routing import Floats, Keys

KeyColumns = Mapping[str, npt.NDArray[Any]]

# Name -> dtype, and the shape after K.
FORMS: dict[str, tuple[type, tuple[int, ...]]] = {
    "show_click": (np.float32, (2,)),
    "feature": (np.uint32, ()),
    "count": (np.uint32, ()),
}


def no_columns(names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """The columns of these names of no keys."""
    return {name: np.empty((0, *FORMS[name][1]), FORMS[name][0]) for name in names}


def merge(
    parts: Sequence[tuple[Keys, Floats, KeyColumns, float]], pool: _core.Pool
) -> tuple[Keys, Floats, KeyColumns]:
    """Sum several pushes to one table.

    parts: of each push: distinct keys (K_i,), gradients (K_i, D), columns, and the weight of its
    gradients.

    Returns:
        The union of the keys; the weighted sums of their gradients; the sums of shows, clicks and
        counts; the feature in the first push that has the key.
    """
    if len(parts) == 1 and parts[0][3] == 1.0:
        return parts[0][:3]
    keys_K, gradients_KD, index = _core.merge(
        [(keys, gradients, scale) for keys, gradients, _, scale in parts], pool
    )
    rows = np.split(index, np.cumsum([len(keys) for keys, *_ in parts[:-1]]))
    own = [(row, part[2]) for row, part in zip(rows, parts, strict=True)]
    return keys_K, gradients_KD, merge_columns(own, len(keys_K))


def merge_columns(
    parts: Sequence[tuple[npt.NDArray[np.int32], KeyColumns]], num_keys: int
) -> dict[str, npt.NDArray[Any]]:
    """The columns of several pushes as `merge` has them. parts: of each push: where its keys are
    among all keys, each once; its columns.
    """
    columns: dict[str, npt.NDArray[Any]] = {}
    for name in parts[0][1]:
        dtype, shape = FORMS[name]
        merged = columns[name] = np.zeros((num_keys, *shape), dtype)
        values = [(row, own[name]) for row, own in parts]
        if name == "feature":
            for row, column in reversed(values):
                merged[row] = column
        else:
            for row, column in values:  # keys of a part are distinct
                merged[row] += column
    return columns


def fleet_scale(rule: Mapping[str, Any], show_click: npt.NDArray[Any], examples: int) -> Floats:
    """The factor of gradients of a mean over `examples` with scale="fleet": the number of examples,
    divided by the key's shows if the rule is `per_show` and the shows are not 0. (K, 1), or (1, 1)
    for all keys.
    """
    scale = np.full((1, 1), examples, np.float32)
    if not rule["per_show"]:
        return scale
    shows_K1 = show_click[:, :1]
    return np.divide(scale, np.where(shows_K1 > 0, shows_K1, np.float32(1)))
