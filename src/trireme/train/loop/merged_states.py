"""The states of the metrics of all workers, merged at worker 0."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.errors import ResourceExhausted
from trireme.job.cluster import Cluster
from trireme.metrics import Metric
from trireme.metrics.metric import State, summed_entries
from trireme.protocol.meeting_arrays import FIRST
from trireme.train.first_worker import let_first_worker
from trireme.train.gather_arrays import gather_arrays, sum_arrays

Computed = dict[str, float | dict[str, float]]


def merge_states(
    cluster: Cluster, metrics: Sequence[Metric], sums: NDArray[np.float64], title: str
) -> tuple[list[float], Computed]:
    """Sums of all workers, and what each metric computes from the states of all. Every worker calls
    it. Afterwards the metrics of worker 0 have these states, those of others are empty.

    Worker 0 alone gets the states, and tells the others what it computes: if every worker got every
    state, server 0 would send bytes that grow with the square of the workers.
    """
    states = [metric.state() for metric in metrics]
    for metric in metrics:
        metric.reset()
    added = [(m, s, sorted(summed_entries(m))) for m, s in zip(metrics, states, strict=True)]
    summed = [one for one in added if one[2]]
    others = [(metric, state) for metric, state, entries in added if not entries]
    options = {m.name: _options(state, entries) for m, state, entries in summed}
    totals: list[NDArray[Any]] | None = None
    gathered: dict[int, list[NDArray[Any]]] = {}
    lost: ResourceExhausted | None = None
    try:
        arrays = [state[key] for _, state, entries in summed for key in entries]
        totals = sum_arrays(cluster, [sums, *arrays], f"end of {title}", options)
        if others:
            arrays = [state[key] for _, state in others for key in sorted(state)]
            gathered = gather_arrays(cluster, arrays, f"end of {title}", to=FIRST)
    except ResourceExhausted as error:  # at a successor, for whom others wait below
        lost = error

    def compute() -> dict[str, Any]:
        if lost is not None:
            raise lost
        assert totals is not None
        rest = iter(totals)
        of_all = next(rest).tolist()
        for metric, state, entries in summed:
            metric.merge({**state, **{key: next(rest) for key in entries}})
        for received in gathered.values():
            _merge_each(others, iter(received))
        return {"sums": of_all, "computed": {m.name: _plain(m.compute()) for m in metrics}}

    answer = let_first_worker(cluster, f"{title} (figures)", compute)
    return answer["sums"], answer["computed"]


def _options(state: State, entries: Sequence[str]) -> dict[str, Any]:
    return {key: array.tolist() for key, array in state.items() if key not in entries}


def _merge_each(metrics: Sequence[tuple[Metric, State]], arrays: Iterator[NDArray[Any]]) -> None:
    for metric, state in metrics:
        metric.merge({key: next(arrays) for key in sorted(state)})


def _plain(computed: float | dict[str, float]) -> float | dict[str, float]:
    """As Python's numbers, which can be sent."""
    if isinstance(computed, dict):
        return {name: float(value) for name, value in computed.items()}
    return float(computed)
