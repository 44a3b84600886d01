"""Which rows of a scored table a base or delta takes, by their statistics at a data time."""

from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.errors import BadRequest
from trireme.policy import ScorePolicy, policy_of
from trireme.table import TableSchema

DAY_S = 86_400
MODES = ("full", "delta", "base", "batch", "hot")


def unseen_days(statistics: npt.NDArray[Any], time: int) -> npt.NDArray[np.uint32]:
    """(n,) whole days since the last push of each row; 0 where one of the two has no data time."""
    return _core.days_between(np.ascontiguousarray(statistics["time"]), time)


def faded(
    policy: ScorePolicy, statistics: npt.NDArray[Any], time: int, day_over: bool
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(n,) shows and clicks of each row decayed to a data time, with the same bits as in shrink."""
    decay = _core.decay(policy.decay_rate, unseen_days(statistics, time) + np.uint32(day_over))
    return statistics["show"] * decay, statistics["click"] * decay


def selected(
    schema: TableSchema, statistics: npt.NDArray[Any], mode: str, time: int, day_over: bool
) -> npt.NDArray[np.bool_]:
    """Which rows of a table a save of `mode` takes, by Fleet's formulas.

    Args:
        statistics: (n,) records, as RowLayout.statistics gives them.
        mode: "full" and "batch": all rows, as in tables without a ScorePolicy. "hot": rows with a
            score of at least base_threshold and a push within the last delta_keep_days. "base":
            those of "hot" whose delta_score is not negative. "delta": those of "hot" whose
            delta_score is at least delta_threshold.
        time: data time in seconds at which rows are scored.
        day_over: the day of `time` has ended: shows and clicks decay by one more day.

    Returns:
        (n,) mask.

    Source: Save() of Paddle's CtrCommonAccessor.
    """
    if mode not in MODES:
        raise BadRequest(f"selected: expected mode to be one of {MODES}, found {mode!r}")
    policy = policy_of(schema.policy)
    if mode in ("full", "batch") or not isinstance(policy, ScorePolicy):
        return np.ones(len(statistics), np.bool_)
    show, click = faded(policy, statistics, time, day_over)
    chosen: npt.NDArray[np.bool_] = policy.score(show, click) >= policy.base_threshold
    if mode != "hot":
        gained = policy.delta_threshold if mode == "delta" else 0.0
        chosen &= statistics["delta_score"] >= gained
    if policy.delta_keep_days is not None:
        chosen &= unseen_days(statistics, time) <= policy.delta_keep_days
    return chosen
