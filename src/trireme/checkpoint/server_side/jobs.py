"""Long work of a server: begun by one call, asked after by others, stopped by another.

So no call takes long, a repeated one does nothing twice, and worker 0 sees how far all are.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from trireme.errors import (
    BadRequest,
    Internal,
    ResourceExhausted,
    TriremeError,
    Unavailable,
)
from trireme.rpc import Reply

log = logging.getLogger("trireme.checkpoint")

RUNNING_MAX = 8
KEPT_MAX = 32
THREADS = max(2, min(8, os.cpu_count() or 1))


class Progress:
    """How far a job is, in bytes. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.done = 0
        self.total = 0

    def expect(self, num_bytes: int) -> None:
        with self._lock:
            self.total += num_bytes

    def add(self, num_bytes: int) -> None:
        """Raises BadRequest once the job is to stop."""
        with self._lock:
            self.done += num_bytes
        if self._stopped.is_set():
            raise BadRequest("checkpoint: stopped, because its worker or another server failed")

    def stop(self) -> None:
        self._stopped.set()


def in_parallel(tasks: Iterable[Callable[[], None]], progress: Progress) -> None:
    """Run the tasks on a few threads. After the first error the others stop, and it is raised."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="trireme-file") as threads:
        futures = [threads.submit(task) for task in tasks]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((f.exception() for f in futures if f in done and f.exception()), None)
        if failed is not None:
            progress.stop()
            for future in futures:
                future.cancel()
            raise failed


class Job:
    def __init__(self, work: Callable[[Progress], dict[str, Any]]) -> None:
        self.progress = Progress()
        self._work = work
        self._result: dict[str, Any] | None = None
        self._error: TriremeError | None = None
        self._thread = threading.Thread(target=self._run, name="trireme-checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work(self.progress)
        except TriremeError as error:
            self._error = error
        except MemoryError as error:
            self._error = ResourceExhausted(f"checkpoint: out of memory: {error}")
        except OSError as error:  # of the storage that the worker has named
            self._error = BadRequest(f"checkpoint: cannot read it: {error}")
        except Exception as error:
            log.exception("checkpoint: unexpected")
            self._error = Internal(f"checkpoint: {type(error).__name__}: {error}")

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def status(self) -> Reply:
        is_running = self.is_running  # first: the result is there once it is False
        body: dict[str, Any] = {
            "running": is_running,
            "done": self.progress.done,
            "total": self.progress.total,
            "result": None if is_running else self._result,
            "error": None,
        }
        if not is_running and self._error is not None:
            body["error"] = [self._error.code, str(self._error)]
        return Reply(body)


class Jobs:
    """The jobs of one server, by the names that their workers gave. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}

    def start(self, name: str, work: Callable[[Progress], dict[str, Any]]) -> None:
        """Begin, unless it has begun. Raises ResourceExhausted when too many run."""
        with self._lock:
            if name in self._jobs:
                return
            running = [job for job in self._jobs.values() if job.is_running]
            if len(running) >= RUNNING_MAX:
                raise ResourceExhausted(
                    f"checkpoint: expected at most {RUNNING_MAX} saves and loads at a time"
                )
            for ended in [of for of, job in self._jobs.items() if not job.is_running]:
                if len(self._jobs) < KEPT_MAX:
                    break
                del self._jobs[ended]
            self._jobs[name] = Job(work)

    def get(self, name: str) -> Job:
        with self._lock:
            job = self._jobs.get(name)
        if job is None:
            error = Unavailable(
                f"checkpoint: job {name!r} is not known: the server has been started again since"
            )
            error.details = {"lost_job": name}
            raise error
        return job
