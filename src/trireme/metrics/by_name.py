"""Metrics by their names."""

from trireme import metrics
from trireme.errors import BadRequest
from trireme.metrics.metric import Metric


def metric_of(metric: Metric | str) -> Metric:
    """The metric of a name, such as "auc", with its defaults; a metric is returned as it is. Raises
    BadRequest: an unknown name.
    """
    if not isinstance(metric, str):
        return metric
    classes = [cls for cls in map(metrics.__dict__.get, metrics.__all__) if hasattr(cls, "NAME")]
    made = {cls.NAME: cls for cls in classes if cls is not None}
    if metric not in made:
        raise BadRequest(
            f"metrics: expected one of {', '.join(sorted(made))}, or one with options such as"
            f" tr.metrics.AUC(label='click'), found {metric!r}"
        )
    named: Metric = made[metric]()
    return named
