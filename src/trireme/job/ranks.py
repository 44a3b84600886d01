"""A job without servers of its own: each worker hosts the server of its part of the buckets."""

import datetime
import logging
from collections.abc import Callable
from typing import Any

from trireme.errors import DeadlineExceeded
from trireme.job.cluster import Cluster
from trireme.job.connecting import connect
from trireme.job.host import Host
from trireme.server.monitoring import watch_state

log = logging.getLogger("trireme.job")


def connect_ranks(
    host: Host,
    servers: Callable[[str], tuple[str, ...]],
    *,
    worker: int,
    num_workers: int,
    timeout_s: float,
    **options: Any,
) -> Cluster:
    """Join a job as the worker in whose process `host` serves; ends the host if that fails.

    servers: the addresses of all workers' servers, in the order of the workers, from that of the
    own one; it lives as long as the cluster. options: of `connect`.
    """
    try:
        addresses = servers(host.endpoint)
        log.info("worker %d hosts the rows of its buckets at %s", worker, host.endpoint)
        cluster = connect(
            addresses,
            worker=worker,
            num_workers=num_workers,
            timeout_s=timeout_s,
            host=host,
            **options,
        )
    except BaseException:
        host.end(waits=False)
        raise
    watch_state(cluster.metrics.registry, host.state)
    host.meeting = servers
    return cluster


class TorchrunMeeting:
    """Exchanges the addresses of all workers through the store that torchrun's variables name
    (MASTER_ADDR, MASTER_PORT and its own), and keeps the store, which may be in this process.
    """

    def __init__(self, worker: int, num_workers: int, timeout_s: float) -> None:
        self._worker, self._num_workers, self._timeout_s = worker, num_workers, timeout_s
        self._store: Any = None

    def __call__(self, own: str) -> tuple[str, ...]:
        """The addresses in the order of the workers. Raises DeadlineExceeded: one did not come."""
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        worker, num_workers = self._worker, self._num_workers
        timeout = datetime.timedelta(seconds=self._timeout_s)
        try:
            stores = rendezvous("env://", worker, num_workers, timeout=timeout)
            # The user's own process group may use the store too.
            self._store = dist.PrefixStore("trireme", next(stores)[0])  # type: ignore[attr-defined]
            self._store.set_timeout(timeout)
            self._store.set(str(worker), own)
            return tuple(self._store.get(str(rank)).decode() for rank in range(num_workers))
        except (RuntimeError, TimeoutError) as error:
            raise DeadlineExceeded(
                f"init: the {num_workers} workers did not meet at MASTER_ADDR:MASTER_PORT within"
                f" {self._timeout_s:g} s: {error}"
            ) from error
