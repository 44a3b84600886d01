"""A worker's stream of pushes: in order, each applied exactly once."""

import weakref
from collections.abc import Mapping

from trireme.errors import BadRequest, TriremeError
from trireme.job.cluster import Cluster
from trireme.protocol.wire import GRADIENT
from trireme.table import RowClassId
from trireme.train.loop.timing import Stopwatch
from trireme.train.modes.on_servers.pusher import Pusher
from trireme.worker.client import StreamPosition
from trireme.worker.gradients import DenseGradient, KeysByClass, PushHeader, TableGradient
from trireme.worker.pull import FollowingPull
from trireme.worker.transport import LockedTransport


class PushStream:
    """Numbers the pushes of this worker, and sends them in the training thread or another one,
    which `watch` measures. One thread pushes at a time; any may flush.
    """

    def __init__(self, cluster: Cluster, watch: Stopwatch) -> None:
        self._cluster, self._watch = cluster, watch
        self._pusher: Pusher | None = None
        self.via: LockedTransport | None = None  # of pushes in the training thread
        self.pushed_keys: KeysByClass = {}  # of the last push
        self.num_refreshes = 0  # how often the worker has asked for what is newest
        self.stand_at(StreamPosition())

    def resume(self) -> None:
        """Continue where the servers stand; a shared stream says where when it is taken."""
        is_shared = self._cluster.num_streams > 0
        self.stand_at(StreamPosition() if is_shared else self._cluster.client.stream_position())

    def stand_at(self, position: StreamPosition) -> None:
        """The next push is of the batch after this position. Forgets a push that failed."""
        if self._pusher is not None and self._pusher.has_failed:
            self._drop_pusher()
        self.sequence = position.sequence  # the number of the last push
        self.position = position.position  # of the stream of data after it
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether servers may have a push that this worker does not know to have arrived."""
        return self._error is not None

    def fail(self, error: KeyboardInterrupt) -> None:
        """A step was interrupted: no push may follow."""
        self._error = error

    def check_usable(self) -> None:
        """Raises BadRequest: a push has failed, so that only the same push may follow, or a step
        was interrupted.
        """
        if isinstance(self._error, KeyboardInterrupt):
            raise BadRequest(
                "DistributedOptimizer.step: expected steps made as a whole, found one that was"
                " interrupted: it may have changed rows and not weights, or some servers and not"
                " others; load a checkpoint (if no other worker is training), make a new model, or"
                " start this worker again"
            ) from self._error
        if self._error is not None:
            raise BadRequest(
                f"DistributedOptimizer.step: expected push {self.sequence + 1} to be repeated,"
                " found another batch: some servers may have applied it before it failed; load a"
                " checkpoint (if no other worker is training), or start this worker again"
            ) from self._error

    def push(
        self,
        header: PushHeader,
        tables: Mapping[RowClassId, TableGradient],
        dense: DenseGradient | None,
        *,
        in_background: bool = False,
        following: FollowingPull | None = None,
        staged: bool = False,
        kind: str = GRADIENT,
    ) -> None:
        """Make a push. in_background: return when it is on its way, not when all servers have it; a
        later push or flush then raises its error. following, staged, kind: see WorkerClient.push.
        """
        if not in_background:
            self.flush()
        try:
            if in_background:
                self._running_pusher().submit(header, tables, dense, following)
            else:
                client, via = self._cluster.client, self.via
                client.push(
                    header, tables, dense, via=via, staged=staged, kind=kind, following=following
                )
            self.pushed_keys = {class_id: part.keys for class_id, part in tables.items()}
            self.sequence, self.position = header.sequence, header.position
        except BaseException as error:
            # The pusher keeps the errors of its pushes. After Ctrl-C a push may be on its way, and
            # another batch with its number would be taken for a repetition, and be lost.
            if not (in_background and isinstance(error, TriremeError)):
                self._error = error
            raise

    def _running_pusher(self) -> Pusher:
        if self._pusher is None:
            self._pusher = Pusher(self._cluster.client, self._watch)
            self._cluster.add_running(self._pusher.stop)
            # A cluster that nobody has closed and nobody has any more: its thread ends too.
            self._end_of_pusher = weakref.finalize(self, self._pusher.end_after_waiting)
            self._end_of_pusher.atexit = False
            self._cluster.metrics.queues["pushes"] = self._pusher.depth
        return self._pusher

    def flush(self) -> None:
        """Wait until all servers have every push; raises the error of one that failed."""
        if self._pusher is not None:
            self._pusher.flush()

    def close(self) -> None:
        """Flush and end the thread of pushes."""
        if self._pusher is not None:
            self._pusher.close()
            self._drop_pusher()

    def _drop_pusher(self) -> None:
        assert self._pusher is not None
        self._cluster.take_back(self._pusher.stop)
        self._end_of_pusher.detach()
        self._pusher.stop()
        self._pusher = None
