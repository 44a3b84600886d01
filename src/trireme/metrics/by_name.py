"""Metrics by their names."""

from collections.abc import Mapping
from typing import Any, cast

from trireme import metrics
from trireme.errors import BadRequest
from trireme.metrics.metric import Better, Metric

_MEMBERS = (
    *("name", "output", "label", "columns"),
    *("update", "state", "merge", "compute", "reset"),
)


def metric_of(metric: Any) -> Metric:
    """The metric of a name, such as "auc", with its defaults; a metric is returned as it is. Raises
    BadRequest: an unknown name, or what is neither, and what it lacks.
    """
    if not isinstance(metric, str):
        if isinstance(metric, type):
            shown = f"the class {metric.__name__}"
        elif lacks := [member for member in _MEMBERS if not hasattr(metric, member)]:
            shown = f"{metric!r} without {', '.join(lacks)}; derive it from tr.metrics.Metric"
        elif not isinstance(metric.columns, Mapping):
            shown = f"{metric!r} with columns {metric.columns!r}, no mapping of keywords to columns"
        else:
            return cast(Metric, metric)
        raise BadRequest(
            f"metrics: expected a metric of trireme.metrics, or the name of one, found {shown}"
        )
    made = _by_name()
    if metric not in made:
        raise BadRequest(
            f"metrics: expected one of {', '.join(sorted(made))}, or one with options such as"
            f" tr.metrics.AUC(label='click'), found {metric!r}"
        )
    named: Metric = made[metric]()
    return named


def better_of(name: str) -> Better | None:
    """Whether a lower or a higher number is better, of the metric of a name; None: there is none
    such, or neither is.
    """
    better: Better | None = getattr(_by_name().get(name), "BETTER", None)
    return better


def _by_name() -> dict[str, type[Any]]:
    classes = [metrics.__dict__[name] for name in metrics.__all__]
    return {cls.NAME: cls for cls in classes if hasattr(cls, "NAME")}
