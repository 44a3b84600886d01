"""Data time, expiry and counters of rows in a training run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trireme.policy import ScorePolicy
from trireme.train.first_worker import let_first_worker
from trireme.train.optimizer import DistributedOptimizer
from trireme.worker import expiry_calls

log = logging.getLogger("trireme")


@contextmanager
def at_data_time(dataset: Any, optimizer: DistributedOptimizer) -> Iterator[None]:
    """Use the time of the dataset (`data_time`, in seconds), if it has one, within the block."""
    time = getattr(dataset, "data_time", 0)
    if not time:
        yield
        return
    before = optimizer.stream.time
    optimizer.set_time(time)
    try:
        yield
    finally:
        optimizer.set_time(before)


def shrink(optimizer: DistributedOptimizer, *, day_over: bool) -> expiry_calls.KeyCounts:
    """See Trainer.shrink. Worker 0 acts when the pushes of all workers have been applied."""
    cluster = optimizer.cluster
    optimizer.flush()
    optimizer.refresh()  # in sync, the last step is staged until then
    time = optimizer.data_time()
    if time == 0:
        _warn_of_no_time(optimizer)
    replies = cluster.client.gather({"time": time}, [], purpose="shrink", patient=True)
    latest = max(reply["time"] for reply, _ in replies)
    return let_first_worker(
        cluster,
        "shrink",
        lambda: expiry_calls.shrink(cluster.client, time=latest, day_over=day_over),
    )


def _warn_of_no_time(optimizer: DistributedOptimizer) -> None:
    fading = [
        table.name
        for table in optimizer.tables
        if table.policy.ttl_s is not None
        or (
            isinstance(table.policy, ScorePolicy)
            and (table.policy.decay_rate < 1 or table.policy.delete_after_unseen_days is not None)
        )
    ]
    if fading:
        log.warning(
            "shrink: the data has no time, so that rows of %s neither fade nor grow old;"
            " set_time says it",
            ", ".join(fading),
        )


def counters(optimizer: DistributedOptimizer) -> expiry_calls.KeyCounts:
    """See Trainer.counters."""
    optimizer.flush()
    return expiry_calls.counters(optimizer.cluster.client)
