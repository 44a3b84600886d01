"""A worker's stream of pushes: in order, each applied exactly once."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping

from trireme.errors import BadRequest, DeadlineExceeded, TriremeError, start_thread
from trireme.job.cluster import Cluster
from trireme.protocol.wire import GRADIENT
from trireme.table import RowClassId
from trireme.train.loop.timing import Stopwatch
from trireme.worker.client import StreamPosition, WorkerClient
from trireme.worker.gradients import DenseGradient, KeysByClass, PushHeader, TableGradient
from trireme.worker.pull import FollowingPull
from trireme.worker.transport import LockedTransport

WAITING_MAX = 2

_Item = tuple[
    PushHeader, Mapping[RowClassId, TableGradient], DenseGradient | None, FollowingPull | None
]


class Pusher:
    """The thread that sends pushes, in order; at most WAITING_MAX wait. One thread submits; any may
    flush. Later calls of `submit` and `flush` raise the error of a push, and no later push is sent.
    `watch` counts the time.
    """

    def __init__(self, client: WorkerClient, watch: Stopwatch) -> None:
        self._client, self._watch = client, watch
        self._patience_s = (WAITING_MAX + 2) * client.timeout_s  # each push ends within timeout_s
        # Taken by itself: Ctrl-C in the middle of a condition's own `with` would leave it taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = deque[_Item | None]()  # None: the last
        self._num_submitted = self._num_ended = 0
        self._error: BaseException | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="trireme-push", daemon=True)
        start_thread(self._thread)

    def submit(
        self,
        header: PushHeader,
        tables: Mapping[RowClassId, TableGradient],
        dense: DenseGradient | None,
        following: FollowingPull | None = None,
    ) -> None:
        """Send this push after those before it; waits while two others wait. following: see
        WorkerClient.push. Raises the error of an earlier push. DeadlineExceeded: no push has ended
        for too long.
        """
        self._wait("take another push", lambda: len(self._waiting) < WAITING_MAX)
        with self._lock:
            self._waiting.append((header, tables, dense, following))
            self._num_submitted += 1
            self._changed.notify_all()

    def depth(self) -> int:
        """Pushes that have not ended."""
        return self._num_submitted - self._num_ended

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def flush(self) -> None:
        """Wait until all pushes submitted so far have ended. Raises the error of a failed one."""
        last = self._num_submitted
        self._wait("end the pushes", lambda: self._num_ended >= last)

    def _wait(self, purpose: str, is_done: Callable[[], bool]) -> None:
        with self._lock:
            self._changed.wait_for(
                lambda: self._error or self._is_stopping or is_done(), self._patience_s
            )
            if self._error is not None:
                raise self._error
            if not is_done():
                raise DeadlineExceeded(
                    f"push: expected the servers to {purpose} within {self._patience_s:.0f} s,"
                    f" found {self.depth()} unfinished"
                )

    def close(self) -> None:
        """Flush and end the thread."""
        try:
            self.flush()
        finally:
            self.stop()

    def stop(self) -> None:
        """End the thread after the push that it sends; drops those that wait."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(self._patience_s)

    def end_after_waiting(self) -> None:
        """End the thread after the pushes that wait, without waiting for it."""
        with self._lock:
            self._waiting.append(None)
            self._changed.notify_all()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                with self._watch.measure("push"):
                    header, tables, dense, following = item
                    self._client.push(header, tables, dense, following=following)
            except BaseException as error:  # noqa: BLE001 handed to the training thread
                self._error = error
            finally:
                with self._lock:
                    self._num_ended += 1
                    self._changed.notify_all()

    def _next(self) -> _Item | None:
        """The next push; None: send no more."""
        with self._lock:
            self._changed.wait_for(lambda: self._waiting or self._is_stopping or self._error)
            if self._is_stopping or self._error is not None:
                return None
            self._changed.notify_all()
            return self._waiting.popleft()


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
