"""Pushes beside the training loop: a thread sends them in order, and at most two wait."""

import threading
from collections import deque
from collections.abc import Callable, Mapping

from trireme.errors import DeadlineExceeded
from trireme.table import RowClassId
from trireme.train.loop.timing import Stopwatch
from trireme.worker.client import WorkerClient
from trireme.worker.gradients import DenseGradient, PushHeader, TableGradient
from trireme.worker.pull import FollowingPull

WAITING_MAX = 2

_Item = tuple[
    PushHeader, Mapping[RowClassId, TableGradient], DenseGradient | None, FollowingPull | None
]


class Pusher:
    """The thread that sends pushes. One thread submits; any may flush. Later calls of `submit` and
    `flush` raise the error of a push, and no later push is sent. `watch` counts the time.
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
        self._thread.start()

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
