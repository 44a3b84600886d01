"""Pick up where a killed worker left off: its predecessor has trained on a part of the data.

A worker that is restarted runs its script from the first line, and skips what is done.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from trireme.errors import BadRequest, ResourceExhausted
from trireme.job.cluster import Cluster
from trireme.train.dump import Dump
from trireme.train.loop.tally import Tally
from trireme.train.loop.worker_batches import unseeded_sampler, worker_batches
from trireme.worker.passes import EnteredPass

log = logging.getLogger("trireme.train")

STEPS = "steps"
"""The section of an epoch's script with the meetings of callbacks after steps."""


@dataclass(frozen=True)
class PredecessorProgress:
    """How much of a pass predecessors have done."""

    is_over: bool = False  # they have finished it
    num_pushes: int = 0  # that they made
    has_left: bool = False  # they trained on all their batches, and may not have finished the pass

    @property
    def has_begun(self) -> bool:
        return self.is_over or self.has_left or self.num_pushes > 0

    @classmethod
    def from_entered(cls, entered: EnteredPass, sequence: int) -> PredecessorProgress:
        """sequence: of the stream's last push that all servers have applied."""
        if entered.is_over:
            return cls(is_over=True)
        if entered.end is not None:  # the last of its steps may not be applied yet
            return cls(num_pushes=entered.end - entered.first_step, has_left=True)
        return cls(num_pushes=sequence - entered.note.sequence)


def check_loop(progress: PredecessorProgress) -> None:
    """Raises BadRequest: a loop that does not ask for the progress would repeat it."""
    if progress.has_begun:
        raise BadRequest(
            "DistributedOptimizer.step: expected a loop that leaves out what a predecessor of this"
            f" worker has trained on ({progress.num_pushes} pushes of this pass), found one that"
            " does not ask: train with Trainer.fit or tr.prefetch, call begin_pass() first and"
            " leave out what it says, or start the job again and load the newest checkpoint"
        )


def check_order(dataset: Iterable[Any]) -> None:
    """Raises BadRequest: the order of the data was random, so the batches that a predecessor has
    trained on are unknown.
    """
    if isinstance(dataset, DataLoader) and unseeded_sampler(dataset) is not None:
        raise BadRequest(
            "Trainer.fit: expected an order of the DataLoader that a worker that was restarted"
            " finds again, found a random one; shuffle with"
            " generator=torch.Generator().manual_seed(n), or start the job again and load the"
            " newest checkpoint"
        )


def check_steps(cluster: Cluster) -> None:
    """Raises BadRequest: a callback has met the other workers after a step of this epoch, and they
    may wait there for a call that a successor, which makes the next step, does not repeat.
    """
    with cluster.client.script.section(STEPS):
        have_met = cluster.client.script.has_attended_within()
    if have_met:
        raise BadRequest(
            "Trainer.fit: expected callbacks whose `step` does not meet the other workers to"
            " continue with, in the place of a worker that was killed, found one that does"
            " (evaluate, save): do that in `epoch`, or start the job again and load the newest"
            " checkpoint"
        )


def warn_of_lost_buffers(model: nn.Module, worker: int) -> None:
    """Module buffers (statistics of BatchNorm) are kept by the worker: they died with it."""
    if names := ", ".join(name for name, _ in model.named_buffers()):
        log.warning(
            "train: worker %d was restarted: the buffers %s of its model start over",
            *(worker, names),
        )


def skip_epoch(dataset: Iterable[Any], cluster: Cluster, epoch: int) -> None:
    """Leave out a finished epoch. Without streams it is read: the next order may depend on that."""
    log.info("train: worker %d was restarted: epoch %d is over", cluster.worker, epoch + 1)
    if not hasattr(dataset, "stream"):
        check_order(dataset)
        for _ in worker_batches(dataset, cluster, epoch):
            pass


def kept_figures(tally: Tally, cluster: Cluster, title: str) -> dict[str, float]:
    """The figures of a finished pass, which the coordinator keeps; NaN if it has dropped them."""
    try:
        tally.merge(cluster, title)
    except ResourceExhausted as error:
        log.warning("%s: its figures are NaN: %s", title, error)
    return {**tally.figures(), "examples": tally.num_examples, "examples_per_s": 0.0}


def remaining_dump(dump: Dump | None, cluster: Cluster, num_passes: int) -> Dump | None:
    """What is left to dump of a fit of `num_passes` passes. Raises BadRequest: workers share out
    streams, or the predecessor was killed within them, so its part of the dump is lost.
    """
    script = cluster.client.script
    if dump is not None and cluster.num_streams:
        raise BadRequest(
            f"Dump: expected workers that each train on one stream, found {cluster.num_streams}"
            " streams that they share, and a stream may change its worker in the middle; use"
            " evaluate(dump=...) after training"
        )
    if dump is None or not script.is_successor:
        return dump
    if script.passes_begun(num_passes):
        raise BadRequest(
            "Dump: expected all examples of the worker, found one that was restarted, whose"
            " predecessor's part is lost: start the job again and load the newest checkpoint"
        )
    return None if script.is_behind else dump
