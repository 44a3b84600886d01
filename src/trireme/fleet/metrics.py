"""fleet.metrics: figures of all workers from the sums of each.

Each function takes numbers: NumPy arrays, tensors or scalars. `scope` and `util` are there for
Fleet's signatures: there is no scope of variables, and only fleet.util combines. The metrics of
`trireme.metrics` need none of this in a Trainer.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trireme.errors import BadRequest
from trireme.fleet import util as fleet_util
from trireme.metrics import CTRMetricBundle

ctr_metric_bundle = CTRMetricBundle


def sum(input: Any, scope: None = None, util: Any = None) -> npt.NDArray[Any]:
    """The sum over the workers, element by element."""
    return _reduced("sum", "sum", input, scope, util)


def max(input: Any, scope: None = None, util: Any = None) -> npt.NDArray[Any]:
    """The largest over the workers, element by element."""
    return _reduced("max", "max", input, scope, util)


def min(input: Any, scope: None = None, util: Any = None) -> npt.NDArray[Any]:
    """The smallest over the workers, element by element."""
    return _reduced("min", "min", input, scope, util)


def auc(stat_pos: Any, stat_neg: Any, scope: None = None, util: Any = None) -> float:
    """The area under the ROC curve from histograms of scores, lowest bucket first.

    Args:
        stat_pos, stat_neg: (T,) or (1, T) numbers of positives and negatives by bucket.

    Returns:
        0..1; pairs within a bucket count half; 0.5 without pairs, as in Fleet.
    """
    positives = _reduced("auc", "sum", stat_pos, scope, util).astype(np.float64).reshape(-1)
    negatives = _reduced("auc", "sum", stat_neg, scope, util).astype(np.float64).reshape(-1)
    if positives.shape != negatives.shape:
        raise BadRequest(
            f"fleet.metrics.auc: expected stat_pos and stat_neg of one size, found"
            f" {len(positives)} and {len(negatives)}"
        )
    below = np.cumsum(negatives) - negatives
    pairs = positives.sum() * negatives.sum()
    return float((positives * (below + negatives / 2)).sum() / pairs) if pairs else 0.5


def mae(abserr: Any, total_ins_num: Any, scope: None = None, util: Any = None) -> float:
    """The mean absolute error, from sums of errors and examples; NaN without examples."""
    return _ratio("mae", abserr, total_ins_num, scope, util)


def mse(sqrerr: Any, total_ins_num: Any, scope: None = None, util: Any = None) -> float:
    """The mean squared error; NaN without examples."""
    return _ratio("mse", sqrerr, total_ins_num, scope, util)


def rmse(sqrerr: Any, total_ins_num: Any, scope: None = None, util: Any = None) -> float:
    """The root of the mean squared error; NaN without examples."""
    return math.sqrt(_ratio("rmse", sqrerr, total_ins_num, scope, util))


def acc(correct: Any, total: Any, scope: None = None, util: Any = None) -> float:
    """The fraction of correct examples; NaN without examples."""
    return _ratio("acc", correct, total, scope, util)


def _reduced(name: str, mode: str, value: Any, scope: Any, util: Any) -> npt.NDArray[Any]:
    if scope is not None or util not in (None, fleet_util):
        raise BadRequest(
            f"fleet.metrics.{name}: expected scope=None and util=None or fleet.util, found"
            f" {type(scope).__name__} and {type(util).__name__}"
        )
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise BadRequest(
            f"fleet.metrics.{name}: expected numbers (there is no scope to look a variable up in),"
            f" found {type(value).__name__}"
        )
    return fleet_util.all_reduce(array, mode)


def _ratio(name: str, above: Any, below: Any, scope: Any, util: Any) -> float:
    parts = [_reduced(name, "sum", value, scope, util) for value in (above, below)]
    if any(part.size != 1 for part in parts):
        raise BadRequest(
            f"fleet.metrics.{name}: expected one number each, found shapes"
            f" {parts[0].shape} and {parts[1].shape}"
        )
    total = float(parts[1].item())
    return float(parts[0].item()) / total if total else math.nan
