"""Which workers of a job are attached to a server, and when the job is over."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from trireme.errors import BadRequest, Unavailable
from trireme.protocol.figures import figures_from_wire
from trireme.protocol.job_limits import WORKERS_MAX
from trireme.protocol.label_use import LabelUse, uses_from_wire
from trireme.protocol.wire import need, need_list, need_stop_reason
from trireme.rpc import Deferred, Handler, Reply, Request
from trireme.server.journal import Journal

log = logging.getLogger("trireme.server")

_T = TypeVar("_T")

REPORTED = ("retries", "planned", "pulled", "pushes")
GOODBYE_S = 10.0
"""How long a server stays for a worker that may say goodbye again, because the answer was lost."""

OVER = "all workers have said goodbye"
"""Why a server ends whose job is over."""

# A deferred answer is given up a little before its deadline (rpc/server.py): what is this close to
# it may have been.
_EARLY_S = 0.5
# One that has not asked again for so long after a deadline is gone.
_GONE_S = 3.0


class EndWaiters:
    """Each asks again and again: its newest question counts. Threads: one at a time."""

    def __init__(self) -> None:
        self._asking: dict[str, tuple[Deferred, float]] = {}  # by name, with the deadline
        self._is_over = False

    def ask(self, request: Request) -> Deferred:
        """The answer comes when the job is over."""
        answer = Deferred(lambda: "workers have not said goodbye yet")
        self._asking.pop(request.peer, None)
        if self._is_over:
            answer.reply(Reply())
            return answer
        self._asking[request.peer] = answer, request.deadline
        if len(self._asking) > WORKERS_MAX:
            del self._asking[next(iter(self._asking))]
        return answer

    def tell(self, is_over: bool) -> None:
        """Answer those that wait, if the job is over."""
        self._is_over = is_over
        if is_over:
            safe = time.monotonic() + _EARLY_S
            for name, (answer, deadline) in list(self._asking.items()):
                if safe < deadline:
                    answer.reply(Reply())
                    del self._asking[name]

    @property
    def are_told(self) -> bool:
        """Whether nobody will ask again."""
        latest = max((deadline for _, deadline in self._asking.values()), default=0.0)
        return time.monotonic() > latest + _GONE_S


class Attendance:
    """The workers of a job, their last heartbeats, and their goodbyes. Threads: any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.journal = Journal()
        self._changed = threading.Condition()
        self._num_workers: int | None = None
        self._members: set[int] | None = None  # of a job that workers may join late and leave
        self._last_heard: dict[int, float] = {}
        self._gone: dict[int, int] = {}  # worker -> the incarnation that said goodbye
        self._left: dict[int, int] = {}  # worker -> the incarnation that knows that it was heard
        self._newest: dict[int, int] = {}  # worker -> the newest incarnation heard
        self._reports: dict[int, dict[str, int]] = {}
        self._figures: dict[int, dict[str, float]] = {}
        self._label_uses: dict[int, dict[str, LabelUse]] = {}
        self._stopped: str | None = None
        self._stops_at = -math.inf  # at the latest, unless workers are stopping by then
        self._stopping: set[int] = set()  # workers whose last heartbeat asked all to stop
        self._came: dict[int, float] = {}  # worker -> when its newest incarnation was heard first
        self._stop_reason = ""  # of a worker that asks all to stop
        self._asked: dict[int, int] = {}  # worker -> its incarnation then
        self.is_over = False  # whether all workers have said goodbye
        self._default_heard = -math.inf  # of workers that this process has not heard
        self._end_waiters = EndWaiters()

    def handlers(self) -> dict[str, Handler]:
        return {
            "server.ready": lambda _: Reply(),
            "server.alive": self._on_alive,
            "server.goodbye": self._on_goodbye,
            "server.left": self._on_left,
            "server.attendance": self._on_attendance,
            "server.end": self._on_end,
        }

    def _on_end(self, request: Request) -> Deferred:
        """Answered when all workers have said goodbye: compute workers wait for that."""
        with self._changed:
            answer = self._end_waiters.ask(request)
            self._changed.notify_all()
        return answer

    def _on_alive(self, request: Request) -> Reply:
        with self._changed:
            worker, incarnation = self._note_heartbeat(request)
            self._reports[worker] = _report(request)
            self._figures[worker] = figures_from_wire(request.body)
            self._label_uses[worker] = uses_from_wire(request.body)
            reason = need_stop_reason(request.body)
            (self._stopping.add if reason else self._stopping.discard)(worker)
            if reason and (not self._stop_reason or incarnation > self._asked.get(worker, 0)):
                self._stop_reason, self._asked = reason, dict(self._newest)
            # By a successor; an older incarnation is a delayed message.
            is_back = worker in self._gone and incarnation > self._gone[worker]
        if is_back:
            with self.journal.changing():
                self.journal.record("server.alive", request.body)
                self.take_back(worker)
        return Reply()

    def take_back(self, worker: int) -> None:
        with self._changed:
            self._gone.pop(worker, None)
            self.is_over, self._members = False, None  # it sends members when it ends
            self._end_waiters.tell(is_over=False)

    def _on_goodbye(self, request: Request) -> Reply:
        with self.journal.changing(), self._changed:
            worker, incarnation = self._note_heartbeat(request)
            members = None
            if request.body.get("members") is not None:
                members = need_list(request.body, "members", int, WORKERS_MAX)
            self.journal.record("server.goodbye", request.body)
            self._note_goodbye(worker, incarnation, members)
        self.journal.wait_kept()  # not a deferred reply: the last one ends the server
        with self._changed:
            self._end_if_all_are_gone()
        return Reply()

    def _note_goodbye(self, worker: int, incarnation: int, members: list[int] | None) -> None:
        """Record a goodbye. members: the workers that take part, as listed at the end of a script;
        None: all. From then on no worker joins, so the shorter of two lists is the newer.
        """
        if members is not None:
            self._members = set(members) & (self._members or set(members))
        self._gone[worker] = max(incarnation, self._gone.get(worker, 0))

    def _on_left(self, request: Request) -> Reply:
        with self._changed:
            worker, incarnation = self._note_heartbeat(request)
            self._left[worker] = max(incarnation, self._left.get(worker, 0))
            self._changed.notify_all()
        return Reply()

    def _have_left(self) -> bool:
        """Whether no worker will say goodbye again: each has the answer, or had the time to ask."""
        since = self._clock() - GOODBYE_S
        return all(
            self._left.get(worker, 0) >= incarnation or self._last_heard[worker] < since
            for worker, incarnation in self._gone.items()
        )

    def _expected(self) -> set[int]:
        return set(range(self._num_workers or 0)) if self._members is None else self._members

    def _end_if_all_are_gone(self) -> None:
        self.is_over = self._expected() <= self._gone.keys()
        self._end_waiters.tell(self._num_workers is not None and self.is_over)
        self._changed.notify_all()

    def gone(self) -> list[list[Any]]:
        """[worker, number of workers, incarnation, members or None] of each goodbye."""
        with self._changed:
            members = None if self._members is None else sorted(self._members)
            return [[w, self._num_workers or 0, i, members] for w, i in sorted(self._gone.items())]

    def install(self, gone: Iterable[Sequence[Any]]) -> None:
        """Restore the result of `gone` of an earlier process."""
        with self._changed:
            for worker, num_workers, incarnation, members in gone:
                self._num_workers = num_workers
                self._note_goodbye(worker, incarnation, members)
                self._last_heard.setdefault(worker, self._clock())
                self._end_if_all_are_gone()

    def begin_again(self) -> None:
        """This process continues an earlier one: heartbeats are expected from now on."""
        with self._changed:
            self._default_heard = self._clock()

    def _note_heartbeat(self, request: Request) -> tuple[int, int]:
        """Returns the worker and its incarnation."""
        worker = need(request.body, "worker", int)
        num_workers = need(request.body, "num_workers", int)
        incarnation = need(request.body, "incarnation", int)
        is_late = need({"late": False, **request.body}, "late", bool)
        below = WORKERS_MAX if is_late else num_workers
        if not (0 <= worker < below and 0 < num_workers <= WORKERS_MAX):
            raise BadRequest(
                f"server: expected 0 <= worker < num_workers <= {WORKERS_MAX},"
                f" found {worker} and {num_workers}"
            )
        self._num_workers = num_workers
        self._last_heard[worker] = self._clock()
        if incarnation > self._newest.get(worker, 0):
            self._newest[worker], self._came[worker] = incarnation, self._clock()
        return worker, incarnation

    def _on_attendance(self, request: Request) -> Reply:
        within_s = need(request.body, "within_s", float)
        worker = need({"worker": -1, **request.body}, "worker", int)
        with self._changed:
            since = self._clock() - within_s
            heard = dict.fromkeys(self._expected(), self._default_heard) | self._last_heard
            silent = [w for w in sorted(heard) if w in self._gone or heard[w] < since]
            body = {"silent": silent, "gone": sorted(self._gone), "stops": self._stops(worker)}
            return Reply(body)

    def _stops(self, worker: int) -> str:
        """The request to stop. For a worker that came after it only when one of those that were
        there has called since: else they belong to a job that was killed.
        """
        came = self._came.get(worker, math.inf)
        is_older = self._newest.get(worker, 0) <= self._asked.get(worker, 0)
        is_of_this_job = is_older or any(
            self._newest[other] == incarnation and self._last_heard[other] > came
            for other, incarnation in self._asked.items()
        )
        return self._stop_reason if is_of_this_job else ""

    def silences_s(self) -> dict[int, float]:
        """Seconds since the last heartbeat of each worker that has not said goodbye."""
        with self._changed:
            now = self._clock()
            return {worker: now - at for worker, at in self._of_attached(self._last_heard).items()}

    def has_left(self, worker: int, incarnation: int, since: float, silence_s: float) -> bool:
        """Whether this process of a worker has said goodbye, has a successor, or was not heard for
        `silence_s` after the moment `since`.
        """
        with self._changed:
            is_gone = self._gone.get(worker, 0) >= incarnation
            heard = max(since, self._last_heard.get(worker, since))
            is_silent = self._clock() - heard > silence_s
            return is_gone or is_silent or self._newest.get(worker, 0) > incarnation

    def reports(self) -> dict[int, dict[str, int]]:
        """The last report of each worker that has not said goodbye."""
        return self._of_attached(self._reports)

    def figures(self) -> dict[int, dict[str, float]]:
        """The last figures of each worker that has not said goodbye."""
        return self._of_attached(self._figures)

    def label_uses(self) -> dict[int, dict[str, LabelUse]]:
        """What each worker that has not said goodbye has last reported of compute workers."""
        return self._of_attached(self._label_uses)

    def _of_attached(self, by_worker: Mapping[int, _T]) -> dict[int, _T]:
        """What there is of the workers that have not said goodbye, in their order."""
        with self._changed:
            known = sorted(by_worker.items(), key=lambda item: item[0])
            return {worker: value for worker, value in known if worker not in self._gone}

    def stop(self, reason: str, within_s: float = 0.0) -> None:
        """End `wait`, from another thread or a signal handler. within_s: that workers have to ask
        all to stop, if there are any; then `wait` goes on until they have left.
        """
        with self._changed:
            self._stopped = reason
            has_workers = bool(self._last_heard.keys() - self._gone.keys())
            waits = has_workers and within_s > 0
            self._stops_at = self._clock() + within_s if waits else -math.inf
            self._changed.notify_all()

    def _is_needed(self) -> bool:
        """Whether workers that stop finish their step with this server, or may say so soon."""
        are_stopping = bool(self._stopping - self._gone.keys())
        return self._clock() < self._stops_at or (self._stops_at > -math.inf and are_stopping)

    def wait(self, silence_s: float) -> str:
        """Wait for the end of the job; returns why it is over. Raises Unavailable: workers have not
        said goodbye, and none has sent a heartbeat for `silence_s`.
        """
        with self._changed:
            is_told = False
            while True:
                is_over = self._num_workers is not None and self.is_over
                if self._stopped is not None:
                    if is_over or not self._is_needed():
                        return OVER if is_over else self._stopped
                    if not is_told:
                        left_s = self._stops_at - self._clock()
                        then = "or when workers that stop have left"
                        log.info("%s: ends in %.0f s, %s", self._stopped, left_s, then)
                    is_told = True
                if is_over and self._end_waiters.are_told and self._have_left():
                    return OVER
                heard = max([self._default_heard, *self._last_heard.values()])
                # No limit before the first worker of a new job: workers start when they do.
                if heard > -math.inf and self._clock() - heard > silence_s:
                    raise Unavailable(self._silence(silence_s))
                self._changed.wait(timeout=1.0)

    def _silence(self, silence_s: float) -> str:
        limit = f"{silence_s:.0f} s"
        if self._num_workers is None:
            return (
                "server: expected the workers of the job that it continues with within"
                f" {limit}, found none"
            )
        missing = sorted(self._expected() - self._gone.keys())
        return f"server: workers {missing} have been silent for {limit} without saying goodbye"


def _report(request: Request) -> dict[str, int]:
    """A worker's report: numbers by names of REPORTED."""
    report = need({"report": {}, **request.body}, "report", dict)
    if not report.keys() <= set(REPORTED):
        names = list(report)
        raise BadRequest(f"server.alive: expected reports of {REPORTED}, found {names}"[:500])
    return {name: need(report, name, int) for name in report}
