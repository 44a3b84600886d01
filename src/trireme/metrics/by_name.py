"""Metrics by their names."""

from typing import Any

from trireme import metrics
from trireme.errors import BadRequest
from trireme.metrics.metric import Better, Metric


def metric_of(metric: Metric | str) -> Metric:
    """The metric of a name, such as "auc", with its defaults; a metric is returned as it is. Raises
    BadRequest: an unknown name, or what is neither.
    """
    if not isinstance(metric, str):
        if isinstance(metric, type) or not (hasattr(metric, "update") and hasattr(metric, "name")):
            shown = f"the class {metric.__name__}" if isinstance(metric, type) else repr(metric)
            what = "a metric of trireme.metrics, or the name of one"
            raise BadRequest(f"metrics: expected {what}, found {shown}")
        return metric
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
