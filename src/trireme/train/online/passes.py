"""Passes: units of streamed data, and the wait for them."""

import calendar
import datetime
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from trireme.errors import BadRequest, DeadlineExceeded, Stopped, check_counts
from trireme.job.cluster import Cluster
from trireme.train.online.donefiles import PassPoint
from trireme.train.stopping import first_reason

log = logging.getLogger("trireme")

REMINDER_S = 600.0
STOP_CHECK_S = 0.5
"""How often a wait for data checks whether to stop."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A unit of streamed data.

    Args:
        day: yyyymmdd. number: of the pass in its day, from 1.
        open: makes this worker's dataset, called once the pass is ready; returns None if there is
            no data.
        is_ready: whether the data is complete; called repeatedly until it is.
        time: data time in seconds since 1970 that updates carry; None: the start of the day (UTC).
        ends_day: this is the last pass of its day.
        where: where the data comes from, for messages.
    """

    day: str
    number: int
    open: Callable[[], Iterable[Any] | None]
    is_ready: Callable[[], bool] = lambda: True
    time: int | None = None
    ends_day: bool = False
    where: str = ""

    def __post_init__(self) -> None:
        seconds_of_day(self.day)
        check_counts("Pass", number=self.number)

    @property
    def point(self) -> PassPoint:
        """Where a run stands after this pass."""
        return PassPoint(self.day, self.number)

    def __str__(self) -> str:
        return f"pass {self.day}/{self.number}" + (f" ({self.where})" if self.where else "")

    @property
    def seconds(self) -> int:
        """The data time of its updates."""
        return seconds_of_day(self.day) if self.time is None else self.time


def seconds_of_day(day: str) -> int:
    """Seconds since 1970 at which a day (yyyymmdd, UTC) begins. Raises BadRequest."""
    try:
        date = datetime.datetime.strptime(day, "%Y%m%d")
        if len(day) != 8:  # 2019111 is read as one, too
            raise ValueError
    except (ValueError, TypeError) as error:
        raise BadRequest(f"expected a day as yyyymmdd, found {day!r}") from error
    return calendar.timegm(date.timetuple())


def next_day(day: str) -> str:
    """The day after a day, both yyyymmdd."""
    date = datetime.datetime.strptime(day, "%Y%m%d") + datetime.timedelta(days=1)
    return date.strftime("%Y%m%d")


def opened(this: Pass) -> Iterable[Any] | None:
    """The data of a pass, in memory if it can be; None: it has none."""
    dataset: Any = this.open()
    if hasattr(dataset, "load_into_memory"):
        dataset.load_into_memory()
    return dataset  # type: ignore[no-any-return]


class PassLoader:
    """Waits until a pass is ready on all workers, then opens and loads its data."""

    def __init__(
        self, cluster: Cluster, poll_s: float, timeout_s: float, threads: int | None
    ) -> None:
        self._cluster, self._poll_s, self._timeout_s = cluster, poll_s, timeout_s
        self._threads = threads
        self._has_warned = False

    def open(self, this: Pass) -> Iterable[Any] | None:
        """Wait for the data, then open and load it. Raises Stopped: a worker was asked to stop."""
        self._wait(this)
        if reason := first_reason(self._meet(this, {"stops": self._cluster.stop_request.reason})):
            raise Stopped(reason, self._cluster.stop_request.code)
        return opened(this)

    def begin(self, this: Pass) -> Callable[[], Iterable[Any] | None] | None:
        """Begin to load a pass if it is ready on all workers; returns a function that waits for it.
        None: it is not ready.
        """
        if not all(body["ready"] for body in self._meet(this, {"ready": bool(this.is_ready())})):
            return None
        dataset: Any = this.open()
        is_ahead = hasattr(dataset, "preload_into_memory")
        if is_ahead:
            dataset.preload_into_memory(self._threads)
        elif dataset is not None and not self._has_warned and self._cluster.worker == 0:
            self._has_warned = True
            log.warning(
                "train_passes: prefetch: no effect: expected an InMemoryDataset, which can be"
                " loaded ahead, found %s",
                type(dataset).__name__,
            )

        def finish() -> Any:
            if is_ahead:
                dataset.wait_preload_done()
            return dataset

        return finish

    def _meet(self, this: Pass, body: dict[str, Any]) -> list[dict[str, Any]]:
        purpose = f"data of pass {this.day}/{this.number}"
        replies = self._cluster.client.coordinator.gather(body, [], purpose=purpose, patient=True)
        return [reply for reply, _ in replies]

    def _wait(self, this: Pass) -> None:
        began, reminded = time.monotonic(), -math.inf
        while not self._cluster.stop_request.reason and not this.is_ready():
            waited_s = time.monotonic() - began
            if waited_s > self._timeout_s:
                raise DeadlineExceeded(
                    f"train_passes: {this}: expected its data within {self._timeout_s:g} s, found"
                    " it not ready"
                )
            if waited_s - reminded >= REMINDER_S:
                reminded = waited_s
                log.info("stream: waiting for the data of %s", this)
            self._pause()

    def _pause(self) -> None:
        """Wait until it is time to check again, or to stop."""
        upto, pause = time.monotonic() + self._poll_s, threading.Event()
        while (left_s := upto - time.monotonic()) > 0 and not self._cluster.stop_request.reason:
            pause.wait(min(left_s, STOP_CHECK_S))
