"""Long operations of a server: one call starts one, others ask for its status or stop it.

So no call takes long, a repeated call starts nothing twice, and worker 0 sees the progress.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from trireme.errors import (
    BadRequest,
    ResourceExhausted,
    TriremeError,
    Unavailable,
    as_error,
    start_thread,
)
from trireme.rpc import Reply
from trireme.rpc.frames import Array
from trireme.storage.checked_file import FILE_THREADS

log = logging.getLogger("trireme.checkpoint")

RUNNING_MAX = 8
KEPT_MAX = 32
RESTARTED = "the server has been restarted since"


class OperationProgress:
    """How much of an operation is done, and how long ago its worker has asked. patience_s: an
    operation of which nobody has asked for so long is given up. Threads: any.
    """

    patience_s = math.inf

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.asked_at = time.monotonic()
        self.done = 0
        self.total = 0

    def expect(self, amount: int) -> None:
        with self._lock:
            self.total += amount

    def add(self, amount: int) -> None:
        """Raises BadRequest after `stop`; as `lost`, if its worker does not ask any more."""
        with self._lock:
            self.done += amount
        if time.monotonic() - self.asked_at > self.patience_s:
            raise lost(f"was given up, unasked for {self.patience_s:g} s: its worker has gone")
        if self._stopped.is_set():
            raise BadRequest("checkpoint: stopped, because its worker or another server failed")

    def stop(self) -> None:
        self._stopped.set()


def _forget_frames(error: BaseException) -> None:
    """Without where it was raised, which would keep the rows of a load that was refused."""
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and one not in seen:
            seen.append(one.with_traceback(None))
            left += [one.__cause__, one.__context__]


Work = Callable[[OperationProgress], dict[str, Any]]
AtEnd = Callable[[TriremeError | None], None]


def in_parallel(tasks: Iterable[Callable[[], None]], progress: OperationProgress) -> None:
    """Run the tasks on a few threads. The first error stops the others, and is raised."""
    with ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="trireme-file") as threads:
        futures = [threads.submit(task) for task in tasks]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((f.exception() for f in futures if f in done and f.exception()), None)
        if failed is not None:
            progress.stop()
            for future in futures:
                future.cancel()
            raise failed


class Operation:
    """Work in a thread of its own, with its progress and result. at_end: gets its error, if any."""

    def __init__(self, work: Work, at_end: AtEnd = lambda _: None) -> None:
        self.progress = OperationProgress()
        self._work, self._at_end = work, at_end
        self._result: list[Array] = []  # in JSON, a tenth of what the values take
        self._error: TriremeError | None = None
        self._thread = threading.Thread(target=self._run, name="trireme-checkpoint", daemon=True)
        start_thread(self._thread)

    def _run(self) -> None:
        try:
            text = json.dumps(self._work(self.progress), ensure_ascii=True, allow_nan=False)
            self._result = [np.frombuffer(text.encode(), np.uint8)]
        except TriremeError as error:
            self._error = error
        except OSError as error:  # of the storage that the worker has named
            self._error = BadRequest(f"checkpoint: cannot read it: {error}")
        except Exception as error:
            log.exception("checkpoint: unexpected")
            self._error = as_error(error)
        if self._error is not None:
            _forget_frames(self._error)
        self._at_end(self._error)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def status(self) -> Reply:
        """Raises what `lost` makes, if the operation ended with that."""
        self.progress.asked_at = time.monotonic()
        is_running = self.is_running  # first: once it is False, the result is complete
        error = None if is_running else self._error
        if error is not None and error.details:
            raise error
        body = {
            "running": is_running,
            "done": self.progress.done,
            "total": self.progress.total,
            "error": error and [error.code, str(error)],
        }
        # It grows with the model and the number of streams, and so is no part of a header.
        return Reply(body, [] if is_running else self._result)


class Operations:
    """The operations of one server, by the names that workers gave them. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: dict[str, Operation] = {}

    def start(self, name: str, work: Work, at_end: AtEnd = lambda _: None) -> None:
        """Start an operation unless it exists. Raises ResourceExhausted when too many run."""
        with self._lock:
            if name in self._operations:
                return
            ended = [other for other, op in self._operations.items() if not op.is_running]
            if (num_running := len(self._operations) - len(ended)) >= RUNNING_MAX:
                raise ResourceExhausted(
                    f"checkpoint: expected at most {RUNNING_MAX} saves and loads at a time, found"
                    f" {num_running} running already"
                )
            for other in ended[: max(0, len(self._operations) - KEPT_MAX + 1)]:
                del self._operations[other]
            self._operations[name] = Operation(work, at_end)

    def get(self, name: str) -> Operation:
        with self._lock:
            operation = self._operations.get(name)
        if operation is None:
            raise lost(f"{name!r} is not known: {RESTARTED}")
        return operation


def lost(why: str) -> Unavailable:
    """The error of an operation that the worker has to start over."""
    error = Unavailable(f"checkpoint: job {why}")
    error.details = {"lost_job": True}
    return error
