"""Streams of a pass that workers share out: a worker leases one after the other."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trireme.errors import Stopped, TriremeError
from trireme.job.cluster import Cluster
from trireme.train.loop.worker_batches import EPOCH_START, EpochPosition, cut_of, worker_batches
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.stream_checks import check_data
from trireme.worker import passes
from trireme.worker.client import StreamPosition
from trireme.worker.passes import LeasedStream

log = logging.getLogger("trireme.train")


@dataclass(frozen=True)
class StreamBatches:
    """Batches of one stream to train on or evaluate. start: where in the stream they begin. label:
    what positions of these batches contain, to tell the stream.
    """

    batches: Iterable[Any]
    start: EpochPosition = EPOCH_START
    label: tuple[int, ...] = ()


class LeasedPass:
    """A pass whose streams this worker leases; `is_over`: nothing is left to do in it.

    resumes: a checkpoint was loaded that was taken within this epoch. is_trainers: a Trainer runs
    the loop, and stops when asked. A plain loop runs to its end.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        dataset: Iterable[Any],
        epoch: int,
        *,
        resumes: bool = False,
        is_trainers: bool = True,
    ) -> None:
        check_data(dataset, optimizer.cluster)
        self._optimizer, self._dataset, self._epoch = optimizer, dataset, epoch
        self._resumes, self._is_trainers = resumes, is_trainers
        optimizer.unfinished.clear(optimizer.parts)  # streams go on where they stand
        optimizer.cluster.client.script.data = cut_of(dataset)
        self.is_over = optimizer.mode.begin_pass().is_over

    def streams(self) -> Iterator[StreamBatches]:
        """The streams that this worker leases, until all of the pass are done. A stream is done
        when the next is asked for, unless this worker has been asked to stop. Raises Stopped: this
        worker alone was asked to stop, and has left the job.
        """
        cluster, lease = self._optimizer.cluster, None
        while taken := passes.take(cluster.client, lease, self._has_to_stop):
            lease, position = taken
            self._optimizer.mode.last_push = position
            start = self._start(lease, position)
            if start.batches:
                log.info(
                    "train: worker %d continues with stream %d, after batch %d",
                    *(cluster.worker, lease.stream, start.batches),
                )
            part = lease.stream, cluster.num_streams
            batches = worker_batches(self._dataset, cluster, self._epoch, start, part=part)
            yield StreamBatches(batches, start)
            self._optimizer.flush()
            if self._has_to_stop():
                break
        if self._has_to_stop():
            passes.give_back(cluster.client, leaves_job=cluster.stop_request.is_alone)
            if cluster.stop_request.is_alone:
                log.info("%s: others continue with its stream", cluster.stop_request.reason)
                raise Stopped(cluster.stop_request.reason, cluster.stop_request.code)

    def give_back(self) -> None:
        """Return the lease before the stream has ended; others continue after the last push."""
        if self._optimizer.cluster.is_closed:  # which has returned all leases
            return
        try:
            self._optimizer.flush()
            passes.give_back(self._optimizer.cluster.client, leaves_job=False)
        except TriremeError as error:  # the loop has gone: nobody would catch it
            log.warning("prefetch: others have to wait for the stream of this worker: %s", error)

    def _has_to_stop(self) -> bool:
        return self._is_trainers and bool(self._optimizer.cluster.stop_request.reason)

    def _start(self, lease: LeasedStream, at: StreamPosition) -> EpochPosition:
        num_pushes = at.sequence - lease.begun_at
        if num_pushes == 0 and not self._resumes:
            return EPOCH_START
        return EpochPosition.after(at.position, self._epoch, num_pushes)


def part_among(arrivals: Sequence[tuple[dict[str, Any], Any]], cluster: Cluster) -> tuple[int, int]:
    """Which part of the data this worker evaluates, of how many: one for each worker at the
    meeting. A worker that only listens gets an empty part after the last.
    """
    workers = [body["worker"] for body, _ in arrivals]
    if cluster.worker not in workers:
        return len(workers), len(workers)
    return workers.index(cluster.worker), len(workers)
