"""Mean loss and metrics of one run over data, mergeable over workers."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.metrics import Metric
from trireme.train.gather_arrays import gather_arrays
from trireme.train.loop.scoring import Scored, column_of


class Tally:
    """The state of the figures of one worker, then of all.

    label: of the metrics that name none of their own. merged: names of the metrics that merge()
    merges; None: all. Raises BadRequest: it names a metric that there is not.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        label: str | None,
        *,
        merged: Sequence[str] | None = None,
        has_loss: bool = True,
    ) -> None:
        self.metrics, self.has_loss = metrics, has_loss
        self.loss_sum, self.num_examples = 0.0, 0
        self._label = label
        names = [metric.name for metric in metrics]
        if unknown := [name for name in merged or () if name not in names]:
            raise BadRequest(
                "Report: expected merged to name some of the metrics"
                f" {', '.join(names) or '(none)'}, found {', '.join(unknown)}"
            )
        self._merged = [m for m in metrics if merged is None or m.name in merged]
        for metric in metrics:
            metric.reset()

    def add(self, scored: Scored) -> None:
        """Raises what a metric raises: labels or outputs out of range, say."""
        self.num_examples += scored.batch.num_examples
        if scored.loss is None:
            return
        self.loss_sum += float(scored.loss.detach()) * scored.batch.num_examples
        for metric in self.metrics:
            batch, reader = scored.batch, f"metric {metric.name!r}"
            label: Any = metric.label or self._label  # see check_metrics
            columns = metric.columns.items()
            update: Any = metric.update  # which checks what the columns hold
            update(
                _output_for(metric, scored.outputs),
                column_of(batch, label, reader),
                **{keyword: column_of(batch, name, reader) for keyword, name in columns},
            )

    def figures(self) -> dict[str, float]:
        """The mean loss and each metric by its name; "metric.figure" of one with several."""
        values: dict[str, float] = {}
        if self.has_loss:
            values["loss"] = self.loss_sum / self.num_examples if self.num_examples else math.nan
        for metric in self.metrics:
            computed = metric.compute()
            if isinstance(computed, dict):
                values |= {f"{metric.name}.{name}": value for name, value in computed.items()}
            else:
                values[metric.name] = computed
        return values

    def merge(self, cluster: Cluster, title: str) -> None:
        """Make this the tally of all workers together. Every worker calls it."""
        states = [metric.state() for metric in self._merged]
        arrays = [np.array([self.loss_sum, self.num_examples], dtype=np.float64)]
        arrays += [state[key] for state in states for key in sorted(state)]
        self.loss_sum, self.num_examples = 0.0, 0
        for metric in self._merged:
            metric.reset()
        with cluster.client.script.section("figures"):
            gathered = gather_arrays(cluster, arrays, f"end of {title}")
        for received in gathered.values():
            rest = iter(received)
            loss_sum, num_examples = next(rest)
            self.loss_sum += float(loss_sum)
            self.num_examples += int(num_examples)
            for metric, state in zip(self._merged, states, strict=True):
                metric.merge({key: next(rest) for key in sorted(state)})


def check_metrics(metrics: Sequence[Metric], label: str | None) -> None:
    """Raises BadRequest: two of one name, or one without a label."""
    names = [metric.name for metric in metrics]
    if len({"loss", *names}) != len(names) + 1:
        raise BadRequest(f"Trainer: expected metrics with distinct names, found {names}")
    if without := [m.name for m in metrics if label is None and m.label is None]:
        raise BadRequest(
            "Trainer: expected a label column for each metric, because label is None; found none"
            f" for {', '.join(without)}"
        )


def _output_for(metric: Metric, outputs: dict[str, Tensor]) -> Tensor:
    name = metric.output
    if name is None and len(outputs) == 1:
        return next(iter(outputs.values()))
    if name not in outputs:
        raise BadRequest(
            f"metric {metric.name!r}: expected output= to be one of the model's outputs"
            f" {', '.join(outputs)}, found {name!r}"
        )
    return outputs[name]
