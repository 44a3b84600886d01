"""Mean loss and metrics of one run over data, mergeable over workers."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme.errors import BadRequest, ResourceExhausted, check_kind, check_known
from trireme.job.cluster import Cluster
from trireme.metrics import Metric
from trireme.metrics.by_name import metric_of
from trireme.metrics.metric import State
from trireme.protocol.wire import FIRST
from trireme.train.first_worker import let_first_worker
from trireme.train.gather_arrays import gather_arrays, sum_arrays
from trireme.train.loop.scoring import Loss, Scored, Scorer, column_of


class Tally:
    """The state of the figures of one worker, then of all.

    label: of the metrics that name none of their own. merged: names of the metrics that merge()
    merges; None: all. Raises BadRequest: it names an unknown metric.
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
        check_known("Report", "merged to name some of the metrics", names, merged or ())
        self._merged = [m for m in metrics if merged is None or m.name in merged]
        self._computed: dict[str, Any] = {}  # of merged metrics, by name, when they are merged
        for metric in metrics:
            metric.reset()

    def add(self, scored: Scored) -> None:
        """Raises what a metric raises: labels or outputs out of range, say."""
        self.num_examples += scored.batch.num_examples
        if scored.loss is not None and scored.batch.num_examples:  # of none, a mean is NaN
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


@contextmanager
def counts_kept(metrics: Sequence[Metric]) -> Iterator[None]:
    """Whatever the block counts by these metrics, they have afterwards what they had before it."""
    states = [metric.state() for metric in metrics]
    try:
        yield
    finally:
        for metric, state in zip(metrics, states, strict=True):
            metric.reset()
            metric.merge(state)


def merge_states(
    cluster: Cluster, metrics: Sequence[Metric], sums: NDArray[np.float64], title: str
) -> tuple[list[float], dict[str, float | dict[str, float]]]:
    """Sums of all workers, and what each metric computes from the states of all. Every worker calls
    it. Afterwards the metrics of worker 0 have these states, those of others are empty.

    Worker 0 alone gets the states, and tells the others what it computes: if every worker got every
    state, server 0 would send bytes that grow with the square of the workers.
    """
    states = [(m, _state_of(m), sorted(getattr(m, "SUMMED", ()))) for m in metrics]
    for metric in metrics:
        metric.reset()
    others = [(metric, state) for metric, state, entries in states if not entries]
    options = {
        metric.name: {key: a.tolist() for key, a in state.items() if key not in entries}
        for metric, state, entries in states
        if entries
    }
    totals, gathered, lost = None, dict[int, list[NDArray[Any]]](), None
    try:
        arrays = [sums, *(state[key] for _, state, entries in states for key in entries)]
        totals = sum_arrays(cluster, arrays, f"end of {title}", options)
        if others:
            arrays = [state[key] for _, state in others for key in sorted(state)]
            gathered = gather_arrays(cluster, arrays, f"end of {title}", to=FIRST)
    except ResourceExhausted as error:  # at a successor, for whom others wait below
        lost = error

    def compute() -> dict[str, Any]:
        if lost is not None:
            raise lost
        rest = iter(totals or ())
        total_sums = next(rest).tolist()
        for metric, state, entries in states:
            if entries:
                metric.merge({**state, **{key: next(rest) for key in entries}})
        for received in map(iter, gathered.values()):
            for metric, state in others:
                metric.merge({key: next(received) for key in sorted(state)})
        return {"sums": total_sums, "computed": {m.name: _numbers(m.compute()) for m in metrics}}

    answer = let_first_worker(cluster, f"{title} (figures)", compute)
    return answer["sums"], answer["computed"]


def _state_of(metric: Metric) -> State:
    """Raises BadRequest: it is no mapping of names to arrays."""
    state = metric.state()
    is_right = isinstance(state, dict) and all(isinstance(a, np.ndarray) for a in state.values())
    if not (state and is_right):
        raise BadRequest(
            f"metric {metric.name!r}: expected state() as a dict of names to NumPy arrays, at least"
            f" one, found {state!r}"
        )
    return state


def _numbers(computed: Any) -> Any:
    """As Python's floats, which can be sent."""
    is_one = not isinstance(computed, dict)
    return float(computed) if is_one else {name: float(v) for name, v in computed.items()}


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
    """Raises BadRequest: a label that is no name, metrics of one name, or one without a label."""
    if label is not None:
        check_kind("Trainer", "label", label, str, "a column's name, or None: loss gets the batch")
    names = [metric.name for metric in metrics]
    if len({"loss", *names}) != len(names) + 1:
        mend = "name= says another, as in tr.metrics.AUC(label='buy', name='auc_buy')"
        raise BadRequest(f"Trainer: expected metrics with distinct names, found {names}; {mend}")
    if without := [m.name for m in metrics if label is None and m.label is None]:
        expected = "Trainer: expected a label column for each metric, because label is None"
        raise BadRequest(f"{expected}; found none for {', '.join(without)}")


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
