"""Pushes beside the training loop: a thread sends them in order, and at most two wait."""

import queue
import threading
from collections.abc import Mapping

from trireme.errors import DeadlineExceeded
from trireme.table import RowClassId
from trireme.train.loop.timing import Stopwatch
from trireme.worker.client import WorkerClient
from trireme.worker.gradients import DenseGradient, Step, TableGradient

WAITING_MAX = 2

_Item = tuple[Step, Mapping[RowClassId, TableGradient], DenseGradient | None]


class Pusher:
    """The thread that sends pushes. One thread submits; any may flush. Later calls of `submit` and
    `flush` raise the error of a push, and no later push is sent. `watch` counts the time.
    """

    def __init__(self, client: WorkerClient, watch: Stopwatch) -> None:
        self._client, self._watch = client, watch
        self._patience_s = (WAITING_MAX + 2) * client.timeout_s  # each push ends within timeout_s
        self._queue: queue.Queue[_Item | None] = queue.Queue(maxsize=WAITING_MAX)
        self._ended = threading.Condition()
        self._num_submitted = self._num_ended = 0
        self._error: BaseException | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="trireme-push", daemon=True)
        self._thread.start()

    def submit(
        self, step: Step, tables: Mapping[RowClassId, TableGradient], dense: DenseGradient | None
    ) -> None:
        """Send this push after those before it; waits while two others wait. Raises the error of an
        earlier push. DeadlineExceeded: no push has ended for too long.
        """
        with self._ended:
            self._raise_error()
            self._num_submitted += 1
        try:
            self._queue.put((step, tables, dense), timeout=self._patience_s)
        except queue.Full:
            with self._ended:
                self._num_submitted -= 1
            message = f"push: the servers took none for {self._patience_s:.0f} s"
            raise DeadlineExceeded(message) from None

    def depth(self) -> int:
        """Pushes that have not ended."""
        with self._ended:
            return self._num_submitted - self._num_ended

    def flush(self) -> None:
        """Wait until all pushes submitted so far have ended. Raises the error of a failed one."""
        with self._ended:
            last = self._num_submitted
            has_ended = self._ended.wait_for(lambda: self._num_ended >= last, self._patience_s)
            self._raise_error()
            if not has_ended:
                num, seconds = last - self._num_ended, self._patience_s
                raise DeadlineExceeded(f"push: {num} pushes unfinished after {seconds:.0f} s")

    def close(self) -> None:
        """Flush and end the thread."""
        try:
            self.flush()
        finally:
            self.stop()

    def stop(self) -> None:
        """End the thread after the push that it sends; drops those that wait."""
        self._is_stopping = True
        self._queue.put(None, timeout=self._patience_s)
        self._thread.join(self._patience_s)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if self._error is None and not self._is_stopping:
                    step, tables, dense = item
                    with self._watch.measure("push"):
                        self._client.push(step, tables, dense)
            except BaseException as error:  # noqa: BLE001 handed to the training thread
                self._error = error
            finally:
                with self._ended:
                    self._num_ended += 1
                    self._ended.notify_all()
