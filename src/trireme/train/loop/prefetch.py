"""`tr.prefetch`: the pipeline for custom training loops."""

import atexit
import inspect
import logging
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from torch import nn

from trireme.data.batch import Batch
from trireme.errors import BadRequest, TriremeError, check_kind
from trireme.job.cluster import Cluster, has_script_failed, is_session
from trireme.job.default import default
from trireme.nn.session import session_of
from trireme.threads import frozen_objects
from trireme.train.leased_streams import LeasedPass, StreamBatches
from trireme.train.loop.pipeline import Pipeline
from trireme.train.loop.worker_batches import EPOCH_START, EpochPosition, worker_batches
from trireme.train.optimizer import DistributedOptimizer, newest_optimizer
from trireme.train.predecessor import PredecessorProgress, check_order, skip_epoch

log = logging.getLogger("trireme.train")


def prefetch(
    dataset: Iterable[Any],
    model: nn.Module,
    *,
    depth: int = 2,
    epoch: int = 0,
    cluster: Cluster | None = None,
) -> Iterator[Batch]:
    """Batches for a plain training loop, with rows and dense weights pulled ahead of it.

    `dataset` is iterated once: one pass. A dataset with streams gives each worker its own; of any
    other iterable every worker takes each num_workers-th batch. When it is exhausted this worker
    has left the pass and its parameters are current. A worker that replaces a killed one reads the
    batches again that are trained on, and leaves them out. Where workers share streams, a loop that
    is left early gives its stream back, and others train on the rest of it.

        for batch in tr.prefetch(train, model):
            loss = criterion(model(batch), batch["label"])
            loss.backward()
            optimizer.step()

    Args:
        depth: batches to read and plan ahead.
        epoch: changes the order of a dataset that shuffles.

    A loop that keeps the iterator, and leaves it early, calls its `close()` before the next loop.
    """
    check_kind("prefetch", "model", model, nn.Module, "a torch.nn.Module")
    batches = _batches(dataset, model, depth, epoch, cluster)
    _open.add(batches)
    return batches


_open: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the iterators that a script has kept, while the interpreter is whole."""
    _Exit.leaves = has_script_failed() or is_session()
    for batches in list(_open):
        if inspect.getgeneratorstate(batches) != inspect.GEN_RUNNING:
            batches.close()


class _Exit:
    leaves = False  # the script has failed, or may go on in another process


def _batches(
    dataset: Iterable[Any], model: nn.Module, depth: int, epoch: int, cluster: Cluster | None
) -> Generator[Batch, None, None]:
    job = default() if cluster is None else cluster
    with job.client.script.section():
        optimizer = newest_optimizer(job)
        leased = None
        if job.num_streams and optimizer is not None:
            leased = LeasedPass(optimizer, dataset, epoch, is_trainers=False)
            parts = iter(()) if leased.is_over else leased.streams()
        else:
            parts = _own_part(dataset, job, epoch, optimizer)
        try:
            for part in parts:
                pipeline = Pipeline(part.batches, model, training=True, depth=depth, cluster=job)
                with frozen_objects(), pipeline:
                    for number, batch in enumerate(pipeline, part.start.batches + 1):
                        session_of(job).position = epoch, number
                        yield batch
        except GeneratorExit:
            if leased is not None:
                leased.give_back()
            _leave_early(job)
            raise
        finally:
            session_of(job).position = ()
        if (optimizer := newest_optimizer(job)) is not None:
            optimizer.end_pass()


def _leave_early(cluster: Cluster) -> None:
    """Bring the weights up to date, as the end of the pass does: its last steps did not."""
    optimizer = newest_optimizer(cluster)
    try:
        if optimizer is not None and not cluster.is_closed and not _Exit.leaves:
            optimizer.refresh()
    except TriremeError as error:  # the loop has gone: nobody would catch it
        log.warning("prefetch: the dense weights lack the last steps of the loop: %s", error)


def _own_part(
    dataset: Iterable[Any], cluster: Cluster, epoch: int, optimizer: DistributedOptimizer | None
) -> Iterator[StreamBatches]:
    """The batches of a worker with a stream of its own; none if a predecessor has done all."""
    done, start = PredecessorProgress(), EPOCH_START
    if optimizer is not None:
        done = optimizer.begin_pass(dataset)
        if done.num_pushes:
            if optimizer.mode.steps_per_push > 1:
                raise BadRequest(
                    "prefetch: expected to know a predecessor's steps, found mode 'geo': train with"
                    " Trainer.fit, or start the job again and load the newest checkpoint"
                )
            at = optimizer.mode.last_push.position
            start = EpochPosition.after(at, epoch, done.num_pushes)
    if done.is_over or done.has_left:
        skip_epoch(dataset, cluster, epoch)
    else:
        yield StreamBatches(_remaining(dataset, cluster, epoch, start), start)


def _remaining(
    dataset: Iterable[Any], cluster: Cluster, epoch: int, start: EpochPosition
) -> Iterable[Any]:
    """This worker's batches without those that a predecessor has trained on."""
    if start == EPOCH_START:
        return worker_batches(dataset, cluster, epoch)
    check_order(dataset)
    if cluster.client.script.has_attended_within():
        raise BadRequest(
            "prefetch: expected a loop without meetings of the workers to continue with, in the"
            " place of a worker that was killed, found one with them: start the job again and load"
            " the newest checkpoint"
        )
    return worker_batches(dataset, cluster, epoch, start)
