"""The states of the metrics of all workers, merged at worker 0."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.errors import ResourceExhausted
from trireme.job.cluster import Cluster
from trireme.metrics import Metric
from trireme.protocol.wire import FIRST
from trireme.train.first_worker import let_first_worker
from trireme.train.gather_arrays import gather_arrays, sum_arrays


def merge_states(
    cluster: Cluster, metrics: Sequence[Metric], sums: NDArray[np.float64], title: str
) -> tuple[list[float], dict[str, float | dict[str, float]]]:
    """Sums of all workers, and what each metric computes from the states of all. Every worker calls
    it. Afterwards the metrics of worker 0 have these states, those of others are empty.

    Worker 0 alone gets the states, and tells the others what it computes: if every worker got every
    state, server 0 would send bytes that grow with the square of the workers.
    """
    states = [(m, m.state(), sorted(getattr(m, "SUMMED", ()))) for m in metrics]
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


def _numbers(computed: Any) -> Any:
    """As Python's floats, which can be sent."""
    is_one = not isinstance(computed, dict)
    return float(computed) if is_one else {name: float(v) for name, v in computed.items()}
