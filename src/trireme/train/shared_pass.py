"""Streams of a pass that the workers share out among themselves: those that this one takes, one
after the other.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trireme.errors import BadRequest, Stopped, TriremeError
from trireme.job.cluster import Cluster
from trireme.protocol.membership import LeasedStream
from trireme.strategy import Strategy
from trireme.table import Table
from trireme.train.dump import Dump
from trireme.train.loop.share import BEGIN, Place, share_of
from trireme.worker import stream_calls
from trireme.worker.client import StreamPosition
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.script import Entered

if TYPE_CHECKING:
    from trireme.train.optimizer import DistributedOptimizer

log = logging.getLogger("trireme.train")

_WHY_NOT = {
    "sync": "every step is one of all workers, whose number then may not change",
    "bounded": "a stream that waits for a worker would hold up all others",
    "geo": "what a worker has not exchanged would be lost with it, for others to train on again"
    " from other weights",
    "hybrid": "the workers that sum their gradients are the same to the end",
}


@dataclass(frozen=True)
class Turn:
    """A share of data to train on without a break. place: where in it that begins."""

    share: Iterable[Any]
    place: Place = BEGIN


def check_sharing(strategy: Strategy, cluster: Cluster) -> None:
    """Raises BadRequest: a mode in which workers cannot share out streams."""
    if cluster.num_streams and strategy.mode in _WHY_NOT:
        raise BadRequest(
            f"DistributedOptimizer: expected mode 'async' in a job whose workers share out"
            f" {cluster.num_streams} streams, found {strategy.mode!r}, in which"
            f" {_WHY_NOT[strategy.mode]}"
        )


def agree_on_model(
    cluster: Cluster, tables: Sequence[Table], dense: DenseParameters, optimizer: str
) -> None:
    """Raises SchemaMismatch: a worker that comes late has another model, before it has changed
    anything.
    """
    if not cluster.num_streams:
        return
    parts = [f"table {table.schema.to_wire()}" for table in tables]
    parts += [f"block {spec.to_wire()}" for spec in dense.specs]
    digest = hashlib.blake2b(repr([optimizer, *parts]).encode(), digest_size=8).hexdigest()
    named = ", ".join(f"{table.name} of dims {list(table.schema.dims)}" for table in tables)
    said = f"tables {named or 'none'}; {len(dense)} parameters under {optimizer}; digest {digest}"
    cluster.client.agree(f"model made at {cluster.client.script.here}", said)


def check_own_stream(subject: str, cluster: Cluster) -> None:
    """Raises BadRequest: this worker has no stream but those that it takes."""
    if cluster.num_streams:
        raise BadRequest(
            f"{subject}: expected a loop over streams that workers share out, found one that takes"
            f" none of the {cluster.num_streams}: train with Trainer.fit or tr.prefetch"
        )


def check_data(dataset: object, cluster: Cluster) -> None:
    """Raises BadRequest: data of which not every worker can read every stream."""
    if not cluster.num_streams:
        return
    if getattr(dataset, "own_files", False) or not (
        hasattr(dataset, "stream") or isinstance(dataset, Sequence)
    ):
        own = " of files of each worker's own" if getattr(dataset, "own_files", False) else ""
        raise BadRequest(
            "train: expected data that every worker can read any stream of, because workers share"
            f" out {cluster.num_streams} streams: a dataset with stream(index, num_streams,"
            f" epoch=...), or a list of batches; found a {type(dataset).__name__}{own}"
        )


class SharedPass:
    """A pass, as this worker comes to it.

    Args:
        goes_on: a checkpoint was loaded that was taken within this epoch.
        is_trainers: positions are those of a Trainer, and its loop ends early when it is asked to
            stop; else batches are read again and passed over, and nobody asks.

    Attributes:
        is_over: nothing is left to do in it.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        dataset: Iterable[Any],
        epoch: int,
        *,
        goes_on: bool = False,
        is_trainers: bool = True,
    ) -> None:
        check_data(dataset, optimizer.cluster)
        self._optimizer, self._dataset, self._epoch = optimizer, dataset, epoch
        self._goes_on, self._is_trainers = goes_on, is_trainers
        optimizer.flush()
        entered = stream_calls.enter(optimizer.cluster.client, optimizer.num_steps)
        self.is_over = entered.is_over
        optimizer.enter(Entered(is_over=entered.is_over), entered.num_steps)

    def turns(self) -> Iterator[Turn]:
        """Shares of the streams that this worker takes, until all are done. A stream is done when
        the next is asked for, unless this worker has been asked to stop meanwhile.

        Raises:
            Stopped: this worker alone was asked to stop, and has left the job.
        """
        cluster, done = self._optimizer.cluster, None
        while (found := stream_calls.take(cluster.client, done, self._has_to_stop)) is not None:
            done, at = found
            self._optimizer.stand_at(at)
            place = self._place(done, at)
            if place.batches:
                log.info(
                    "train: worker %d goes on with stream %d, behind batch %d",
                    *(cluster.worker, done.stream, place.batches),
                )
            of = done.stream, cluster.num_streams
            yield Turn(share_of(self._dataset, cluster, self._epoch, place, of=of), place)
            self._optimizer.flush()
            if self._has_to_stop():
                break
        if self._has_to_stop():
            stream_calls.give_back(cluster.client, parts=cluster.stop_request.is_alone)
            if cluster.stop_request.is_alone:
                log.info("%s: others go on with its stream", cluster.stop_request.reason)
                raise Stopped(cluster.stop_request.reason)

    def leave_amid(self) -> None:
        """The loop was left early: others may have the stream, behind the pushes so far."""
        if self._optimizer.cluster.is_closed:  # its end has given everything back
            return
        try:
            self._optimizer.flush()
            stream_calls.give_back(self._optimizer.cluster.client, parts=False)
        except TriremeError as error:  # nobody catches what a loop raises that is gone
            log.warning("prefetch: others have to wait for the stream of this worker: %s", error)

    def _has_to_stop(self) -> bool:
        return self._is_trainers and bool(self._optimizer.cluster.stop_request.reason)

    def _place(self, taken: LeasedStream, at: StreamPosition) -> Place:
        num_pushes = at.sequence - taken.begun_at
        if num_pushes == 0 and not self._goes_on:
            return BEGIN
        if self._is_trainers and at.position and at.position[0] == self._epoch:
            return Place(at.position[1], at.position[2:])
        return Place(num_pushes)


def check_dump(dump: Dump | None, cluster: Cluster) -> Dump | None:
    """The dump. Raises BadRequest: one of training on streams that workers share out."""
    if dump is not None and cluster.num_streams:
        raise BadRequest(
            f"Dump: expected workers that each train on one stream, found {cluster.num_streams}"
            " streams that they share out, of which one may begin what another one ends; dump what"
            " the trained model makes of the data: infer_from_dataset(dump=)"
        )
    return dump


def place_among(met: Sequence[tuple[dict[str, Any], Any]], cluster: Cluster) -> tuple[int, int]:
    """The place of this worker among those who have come to a meeting, each with its `worker`;
    one that only listens has none: its place is behind the last.
    """
    workers = [of["worker"] for of, _ in met]
    if cluster.worker not in workers:
        return len(workers), len(workers)
    return workers.index(cluster.worker), len(workers)
