"""Data time, expiry and counters of rows in a training run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trireme.policy import Policy, ScorePolicy
from trireme.train.first_worker import let_first_worker
from trireme.train.optimizer import DistributedOptimizer
from trireme.worker import expiry_calls

log = logging.getLogger("trireme")


@contextmanager
def at_data_time(
    dataset: Any, optimizer: DistributedOptimizer, *, trains: bool = False
) -> Iterator[None]:
    """Use the time of the dataset (`data_time`, in seconds), if it has one, within the block;
    after training also by what ages rows later, unless `set_time` says another.
    """
    time = getattr(dataset, "data_time", 0)
    if not time:
        yield
        return
    before = optimizer.data_time.source
    optimizer.set_time(time)
    if trains:
        optimizer.data_time.of_dataset = time
    try:
        yield
    finally:
        optimizer.set_time(before)


def shrink(optimizer: DistributedOptimizer, *, day_over: bool) -> expiry_calls.KeyCounts:
    """See Trainer.shrink. Worker 0 acts when the pushes of all workers have been applied."""
    optimizer.mode.check_between_passes("shrink")
    cluster = optimizer.cluster
    optimizer.flush()
    optimizer.refresh()  # in sync, the last step is staged until then
    time = optimizer.data_time.seconds()
    if time == 0 and (fading := [t.name for t in optimizer.tables if _fades(t.policy)]):
        log.warning(
            "shrink: the data has no time, so rows of %s do not decay or expire; call set_time",
            ", ".join(fading),
        )
    replies = cluster.client.coordinator.gather({"time": time}, [], purpose="shrink", patient=True)
    latest = max(reply["time"] for reply, _ in replies)
    return let_first_worker(
        cluster,
        "shrink",
        lambda: expiry_calls.shrink(cluster.client, time=latest, day_over=day_over),
    )


def _fades(policy: Policy) -> bool:
    """Whether rows of the policy change as time passes."""
    has_decay = isinstance(policy, ScorePolicy) and (
        policy.decay_rate < 1 or policy.delete_after_unseen_days is not None
    )
    return has_decay or policy.ttl_s is not None
