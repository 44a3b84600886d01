"""The graphs of forward passes whose backward is still to come, at a compute worker.

They may be dropped at any time: then the worker asks for forward and backward anew. So their number
has a bound, and nobody has to tell when a worker was killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from trireme.train.compute.stage_messages import Owner

GRAPHS_MAX = 1024


@dataclass(frozen=True, eq=False)
class Graph:
    """outputs: with the graph. inputs: the leaves whose gradients are wanted. parameters, buffers:
    what forward had, by name; of the parameters those that learn are leaves, too.
    """

    outputs: list[Tensor]
    inputs: list[Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


class KeptGraphs:
    """Graphs by owner and token.

    max_age_s: older ones are dropped; their worker has stopped waiting.

    Threads: any may call.
    """

    def __init__(self, max_age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_age_s, self._clock = max_age_s, clock
        self._graphs: dict[tuple[Owner, str], tuple[float, Graph]] = {}  # the oldest first
        self._newest: dict[int, int] = {}  # worker -> incarnation
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._graphs)

    def meet(self, owner: Owner) -> None:
        """A message of this owner has come: drop the graphs of processes before it, and old ones of
        all.
        """
        with self._lock:
            self._newest[owner.worker] = max(
                owner.incarnation, self._newest.get(owner.worker, owner.incarnation)
            )
            oldest = self._clock() - self._max_age_s
            for (other, token), (since, _) in list(self._graphs.items()):
                if since < oldest or other.incarnation < self._newest[other.worker]:
                    del self._graphs[other, token]

    def keep(self, owner: Owner, token: str, graph: Graph, graphs_max: int) -> None:
        """Keep a graph, and of its owner's at most this many, the newest."""
        self.meet(owner)
        with self._lock:
            if owner.incarnation < self._newest[owner.worker]:
                return
            self._graphs[owner, token] = (self._clock(), graph)
            own = [key for key in self._graphs if key[0] == owner]
            too_many = own[: max(0, len(own) - graphs_max)]
            too_many += list(self._graphs)[: max(0, len(self._graphs) - GRAPHS_MAX)]
            for key in too_many:
                self._graphs.pop(key, None)

    def take(self, owner: Owner, token: str) -> Graph | None:
        """The graph, which is not kept any more; None: there is none."""
        with self._lock:
            _, graph = self._graphs.pop((owner, token), (0.0, None))
            return graph

    def drop(self, owner: Owner, tokens: Iterable[str]) -> None:
        """Drop these graphs, if they are there."""
        for token in tokens:
            self.take(owner, token)
