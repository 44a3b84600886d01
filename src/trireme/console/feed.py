"""What the console knows of the job, over its whole time in few numbers, kept fresh by a thread and
followed by browsers.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from trireme.console.distributions import TABLES_MAX, Distribution, sample
from trireme.errors import TriremeError, start_thread
from trireme.rpc import RpcClient
from trireme.top.interval import status_of
from trireme.top.job_snapshot import Snapshot, take_snapshot
from trireme.top.job_status import JobStatus

_log = logging.getLogger("trireme.console")


SAMPLE_EVERY_S = 10.0
"""Between two samples of rows, of which there are none while nobody looks."""


POINTS_MAX = 1024


@dataclass(frozen=True, kw_only=True)
class Point:
    """A job at one time. `_s` are seconds; None: unknown.

    Attributes:
        at: seconds since the console started.
        pull_s, push_s: mean time of a request at the slowest server.
        hit_share: of the keys of tables with rows on SSD, those whose row was in memory; the least.
        figures: loss and metrics as worker 0 shows them.
    """

    at: float
    examples_per_s: float
    num_rows: float
    pull_s: float | None
    push_s: float | None
    hit_share: float | None
    figures: Mapping[str, float]


def point_of(at: float, job: JobStatus) -> Point:
    tiers = [table.tier for table in job.tables if table.tier is not None]
    hits = [tier.hit_share for tier in tiers if tier.hit_share is not None]
    return Point(
        at=at,
        examples_per_s=job.examples_per_s,
        num_rows=sum(table.num_rows for table in job.tables),
        pull_s=max((s.pull_s for s in job.servers if s.pull_s is not None), default=None),
        push_s=max((s.push_s for s in job.servers if s.push_s is not None), default=None),
        hit_share=min(hits, default=None),
        figures=next((worker.figures for worker in job.workers if worker.figures), {}),
    )


class History:
    """The points of a job. When there are POINTS_MAX, every second one is dropped, and from then on
    half as many are kept, so the whole job is covered however long it is. Threads: one at a time.
    """

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._stride, self._num_seen = 1, 0

    def add(self, point: Point) -> None:
        self._num_seen += 1
        if (self._num_seen - 1) % self._stride:
            return
        self._points.append(point)
        if len(self._points) >= POINTS_MAX:
            del self._points[1::2]
            self._stride *= 2

    @property
    def points(self) -> Sequence[Point]:
        return tuple(self._points)


class Feed:
    """Asks the servers of a job every `interval_s`, and tells browsers.

    An event is a name and JSON. "job": the status of the job (`JobStatus`), the point of its
    history, and the last distributions of rows; "silent": no server answers, when and why. The last
    event stays until the next.
    `over` is set when the feed has ended, and ends it when it is set.

    Args:
        client: used by the feed's thread alone, which closes it.
        servers: of the job, the first one first.
        timeout_s: for the servers to answer.
    """

    def __init__(
        self, client: RpcClient, servers: Sequence[str], *, interval_s: float, timeout_s: float
    ) -> None:
        self._client, self._servers = client, servers
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._history, self._started = History(), time.monotonic()
        self._changed = threading.Condition()
        self._number, self._event = 0, ("", "")
        self._num_viewers = 0
        self._distributions: list[Distribution] = []
        self._sample_at = 0.0
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trireme-console-feed", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    def stop(self) -> None:
        """End the thread, and all followers."""
        self.over.set()
        self._thread.join()

    def history(self) -> str:
        """All points so far, as JSON."""
        with self._changed:
            points = self._history.points
        return as_json([asdict(point) for point in points])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Somebody looks: only then are rows sampled."""
        with self._changed:
            self._num_viewers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_viewers -= 1

    def after(self, number: int, timeout_s: float) -> tuple[int, str, str] | None:
        """The number, name and JSON of the newest event if it is newer than event `number`; waits
        for one. None: there was none in time, or the feed has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.over.is_set() or self._number > number, timeout_s)
            return None if self._number <= number else (self._number, *self._event)

    def _run(self) -> None:
        try:
            with self._client:
                self._ask()
        finally:  # also if it fails: nobody waits for it then
            self.over.set()
            with self._changed:
                self._changed.notify_all()

    def _ask(self) -> None:
        before: Snapshot | None = None
        while not self.over.is_set():
            try:
                now = take_snapshot(self._client, self._servers, self._timeout_s)
            except TriremeError as error:
                _log.debug("no server answers: %s", error)
                self._tell("silent", {"at": self._now(), "error": str(error)})
            else:
                if before is not None:
                    self._tell_status(before, now)
                before = now
            self.over.wait(self._interval_s)

    def _tell_status(self, before: Snapshot, now: Snapshot) -> None:
        job = status_of(before, now)
        point = point_of(self._now(), job)
        self._sample(job)
        body: dict[str, Any] = {"job": asdict(job), "point": asdict(point)}
        body["distributions"] = [asdict(one) for one in self._distributions]
        self._tell("job", body, point)

    def _sample(self, job: JobStatus) -> None:
        with self._changed:
            is_watched = self._num_viewers > 0
        if not is_watched or time.monotonic() < self._sample_at:
            return
        self._sample_at = time.monotonic() + SAMPLE_EVERY_S
        largest = sorted(job.tables, key=lambda table: -table.num_rows)[:TABLES_MAX]
        servers = [server.endpoint for server in job.servers if not server.error]
        names = sorted(table.name for table in largest)
        self._distributions = sample(self._client, servers, names, self._timeout_s)

    def _now(self) -> float:
        return time.monotonic() - self._started

    def _tell(self, name: str, body: dict[str, Any], point: Point | None = None) -> None:
        text = as_json(body)
        with self._changed:
            if point is not None:
                self._history.add(point)
            self._number, self._event = self._number + 1, (name, text)
            self._changed.notify_all()


def as_json(value: Any) -> str:
    """JSON has no NaN and no infinity; a browser gets null for them."""
    return json.dumps(_finite(value), separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
