"""The statistics of rows of a scored table at a data time."""

from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.errors import BadRequest
from trireme.policy import ScorePolicy, policy_of
from trireme.table import TableSchema

DAY_S = 86_400

Numbers = npt.NDArray[np.float64]


def unseen_days(statistics: npt.NDArray[Any], time: int) -> npt.NDArray[np.uint32]:
    """(n,) whole days since the last push of each row; 0 where one of the two has no data time."""
    return _core.days_between(np.ascontiguousarray(statistics["time"]), time)


def faded(
    policy: ScorePolicy, statistics: npt.NDArray[Any], time: int, day_over: bool
) -> tuple[Numbers, Numbers]:
    """(n,) shows and clicks of each row decayed to a data time, with the same bits as in shrink."""
    decay = _core.decay(policy.decay_rate, unseen_days(statistics, time) + np.uint32(day_over))
    return statistics["show"] * decay, statistics["click"] * decay


def scores(policy: ScorePolicy, shows: Numbers, clicks: Numbers) -> Numbers:
    """(n,) the score of each row's shows and clicks."""
    return _core.score(shows, clicks, policy.nonclk_coeff, policy.click_coeff)


def numbers_of(schema: TableSchema, statistics: npt.NDArray[Any], by: str, time: int) -> Numbers:
    """(n,) one statistic of rows: "time" of the last push; of scored tables also "show", "click"
    and "score", faded to a data time. Raises BadRequest: another one.
    """
    policy = policy_of(schema.policy)
    known = ("time", "show", "click", "score") if schema.is_scored else ("time",)
    if by not in known:
        hint = "" if schema.is_scored else "; a table with a ScorePolicy counts shows and clicks"
        raise BadRequest(
            f"top: expected one of {', '.join(known)} of table {schema.name!r},"
            f" found {by!r:.66}{hint}"
        )
    if by == "time" or not isinstance(policy, ScorePolicy):
        return np.asarray(statistics["time"], np.float64)
    shows, clicks = faded(policy, statistics, time, False)
    return {"show": shows, "click": clicks}.get(by, scores(policy, shows, clicks))
