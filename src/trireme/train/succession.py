"""What a worker that was started again finds done: batches of the pass that its predecessor was
killed in, and everything before.
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
from trireme.train.loop.share import samplers, share_of
from trireme.train.loop.tally import Tally
from trireme.worker.script import Entered

log = logging.getLogger("trireme.train")


@dataclass(frozen=True)
class Inherited:
    """What predecessors have made of a pass.

    is_over: all of it, and have gone on. num_pushes: so many pushes. has_left: all of it.
    """

    is_over: bool = False
    num_pushes: int = 0
    has_left: bool = False

    @property
    def is_some(self) -> bool:
        return self.is_over or self.has_left or self.num_pushes > 0


def inherited(entered: Entered, sequence: int) -> Inherited:
    """sequence: of the last push of the stream that all servers have applied."""
    if entered.is_over:
        return Inherited(is_over=True)
    if entered.note is None:
        return Inherited()
    if entered.end is not None:  # the last of its steps may not be applied yet
        return Inherited(num_pushes=entered.end - entered.first_step, has_left=True)
    return Inherited(num_pushes=sequence - entered.note[0])


def check_loop(found: Inherited) -> None:
    """Raises BadRequest: a loop that does not know what was done would train on it again."""
    if found.is_some:
        raise BadRequest(
            "DistributedOptimizer.step: expected a loop that leaves out what a predecessor of this"
            f" worker has trained on ({found.num_pushes} pushes of this pass), found one that does"
            " not ask: train with Trainer.fit or tr.prefetch, call begin_pass() first and leave out"
            " what it says, or start the job again and load the newest checkpoint"
        )


def check_order(dataset: Iterable[Any]) -> None:
    """Raises BadRequest: the order of the data was drawn, so that nobody knows which batches a
    predecessor has trained on.
    """
    if isinstance(dataset, DataLoader) and any(
        getattr(sampler, "generator", sampler) is None for sampler in samplers(dataset)
    ):
        raise BadRequest(
            "Trainer.fit: expected an order of the DataLoader that a worker that was started again"
            " finds again, found a random one; shuffle with"
            " generator=torch.Generator().manual_seed(n), or start the job again and load the"
            " newest checkpoint"
        )


def warn_of_buffers(model: nn.Module, worker: int) -> None:
    """Buffers (BatchNorm's statistics, say) are the worker's own: they died with the
    predecessor.
    """
    names = [name for name, _ in model.named_buffers()]
    if names:
        log.warning(
            "train: worker %d was started again: the buffers %s of its model begin anew",
            worker,
            ", ".join(names),
        )


def pass_over(dataset: Iterable[Any], cluster: Cluster, epoch: int) -> None:
    """Leave an epoch out that is over. What has no streams is read: its next order may depend on
    that.
    """
    log.info("train: worker %d was started again: epoch %d is over", cluster.worker, epoch)
    if not hasattr(dataset, "stream"):
        check_order(dataset)
        for _ in share_of(dataset, cluster, epoch):
            pass


def figures_again(tally: Tally, cluster: Cluster, title: str) -> dict[str, float]:
    """The figures of all workers that a predecessor has brought together; NaN where they are not
    kept any more.
    """
    try:
        tally.merge(cluster, title)
    except ResourceExhausted as error:
        log.warning("%s: its figures are NaN: %s", title, error)
    return {**tally.figures(), "examples": tally.num_examples, "examples_per_s": 0.0}


def dump_left(dump: Dump | None, cluster: Cluster, num_passes: int) -> Dump | None:
    """What is left to dump of a fit of so many passes. Raises BadRequest: a part of what the killed
    worker would have written.
    """
    script = cluster.client.script
    if dump is None or not script.is_successor:
        return dump
    if script.passes_begun(num_passes):
        raise BadRequest(
            "Dump: expected all examples of the worker, found one that was started again, whose"
            " predecessor's part is lost: start the job again and load the newest checkpoint"
        )
    return None if script.is_behind else dump
