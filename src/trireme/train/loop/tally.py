"""Mean loss and metrics of one run over data, mergeable over workers."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.metrics import Metric
from trireme.metrics.by_name import metric_of
from trireme.train.loop.merged_states import merge_states
from trireme.train.loop.scoring import Loss, Scored, Scorer, column_of


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
        self._computed: dict[str, Any] = {}  # of merged metrics, by name, when they are merged
        for metric in metrics:
            metric.reset()

    def add(self, scored: Scored) -> None:
        """Raises what a metric raises: labels or outputs out of range, say."""
        self.num_examples += scored.batch.num_examples
        if scored.loss is not None:
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
            is_told = metric.name in self._computed
            computed = self._computed[metric.name] if is_told else metric.compute()
            if isinstance(computed, dict):
                values |= {f"{metric.name}.{name}": value for name, value in computed.items()}
            else:
                values[metric.name] = computed
        return values

    def merge(self, cluster: Cluster, title: str) -> None:
        """Make the figures those of all workers together. Every worker calls it."""
        own = np.array([self.loss_sum, self.num_examples], dtype=np.float64)
        self.loss_sum, self.num_examples = 0.0, 0
        with cluster.client.script.section("figures"):
            sums, self._computed = merge_states(cluster, self._merged, own, title)
        self.loss_sum, self.num_examples = float(sums[0]), int(sums[1])


class ScoringRule(Protocol):
    """What says how batches are scored: a trainer, or an evaluation with metrics of its own."""

    @property
    def metrics(self) -> Sequence[Metric | str]: ...
    @property
    def label(self) -> str | None: ...
    @property
    def loss(self) -> Loss | None: ...


def scoring_of(
    source: ScoringRule | None, merged: Sequence[str] | None, autocast: torch.dtype | None
) -> tuple[Tally, Scorer]:
    """The tally and the scorer of an evaluation. source: None: without loss and metrics. Raises
    BadRequest: as `check_metrics` and Tally.
    """
    if source is None:
        return Tally([], None, merged=merged, has_loss=False), Scorer(None, None, autocast)
    metrics = [metric_of(metric) for metric in source.metrics]
    check_metrics(metrics, source.label)
    has_loss = source.loss is not None
    tally = Tally(metrics, source.label, merged=merged, has_loss=has_loss)
    return tally, Scorer(source.loss, source.label, autocast)


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
