"""Jobs without servers inside one test process: each worker is a thread with a server of its own;
the sockets between them are real.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from tests.jobs import TIMEOUT_S, in_threads
from trireme import _core
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.job.host import Host
from trireme.job.ranks import connect_ranks

T = TypeVar("T")


def run_ranks(
    num_ranks: int, work: Callable[[Cluster], T], timeout_s: float = TIMEOUT_S
) -> list[T]:
    """work(cluster) in one thread per worker; results in the order of the workers. One worker is
    embedded, as in a job of one process.
    """
    if num_ranks == 1:
        with embedded(threads=1, timeout_s=timeout_s) as cluster:
            return [work(cluster)]
    endpoints = [""] * num_ranks
    have_met = threading.Barrier(num_ranks)

    def one(worker: int) -> T:
        def meet(own: str) -> tuple[str, ...]:
            endpoints[worker] = own
            have_met.wait(timeout_s)
            return tuple(endpoints)

        host = Host(_core.Pool(1), listen="127.0.0.1:0", timeout_s=timeout_s)
        with connect_ranks(
            host, meet, worker=worker, num_workers=num_ranks, timeout_s=timeout_s
        ) as cluster:
            return work(cluster)

    return in_threads([lambda worker=worker: one(worker) for worker in range(num_ranks)])
