"""Mean loss and metrics of one run over data, mergeable over workers."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.metrics import Metric
from trireme.train.loop.scoring import Scored, column_of

log = logging.getLogger("trireme.train")

# What all workers together may bring to one meeting: half of what one message may hold.
_MEETING_BYTES_MAX = 1 << 27
_WORKER_BYTES_MAX = 1 << 26


class Tally:
    """The state of the figures of one worker, then of all.

    Args:
        label: of the metrics that name none of their own.
        merged: names of the metrics that merge() merges; None: all.
        has_loss: whether there is one.

    Raises:
        BadRequest: `merged` names a metric that there is not.
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
        unknown = [name for name in merged or () if name not in names]
        if unknown:
            raise BadRequest(
                f"Trainer: expected stat_var_names of the metrics {', '.join(names) or '(none)'},"
                f" found {', '.join(unknown)}"
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
            met = exchange(cluster, arrays, f"end of {title}")
        for received in met.values():
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
    without = [m.name for m in metrics if label is None and m.label is None]
    if without:
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


def exchange(
    cluster: Cluster, arrays: Sequence[NDArray[Any]], purpose: str
) -> dict[int, list[NDArray[Any]]]:
    """The arrays of every worker, by worker in their order, whatever their sizes.

    They travel as bytes, in as many meetings as the largest share takes: the shares of those who
    came to the first.
    """
    mine = np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays])
    forms = [[array.dtype.str, list(array.shape)] for array in arrays]
    at_a_time = max(cluster.num_workers, cluster.num_streams)
    piece = min(_WORKER_BYTES_MAX, _MEETING_BYTES_MAX // at_a_time)
    shares: dict[int, list[NDArray[np.uint8]]] = {}
    first: dict[int, Any] = {}
    begin, end = 0, 1
    with cluster.client.script.section():
        while begin < end:
            body = {"worker": cluster.worker, "bytes": len(mine), "forms": [] if begin else forms}
            met = cluster.client.gather(
                body, [mine[begin : begin + piece]], purpose=purpose, patient=True
            )
            if begin == 0:
                first = {of["worker"]: of for of, _ in met}
                end = max(of["bytes"] for of in first.values())
            begin += piece
            for of, [received] in met:
                shares.setdefault(of["worker"], []).append(received)
    joined = {worker: np.concatenate(share) for worker, share in shares.items()}
    if gone := [w for w, of in first.items() if len(joined[w]) < of["bytes"]]:
        log.warning("%s: workers %s were given up amid it, and what they bring", purpose, gone)
    return {w: _parts(joined[w], of["forms"]) for w, of in first.items() if w not in gone}


def _parts(data: NDArray[np.uint8], forms: Any) -> list[NDArray[Any]]:
    parts, begin = [], 0
    for dtype, shape in forms:
        size = np.dtype(dtype).itemsize * math.prod(shape)
        parts.append(data[begin : begin + size].copy().view(dtype).reshape(shape))  # aligned
        begin += size
    return parts
