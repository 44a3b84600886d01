"""Makes the events of a plan happen to a job at their times, and ends them again."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from signal import SIGCONT, SIGSTOP

from tests.chaos.clock import Clock
from tests.chaos.disk import Disk
from tests.chaos.job import Job, Place
from tests.chaos.moments import Moments
from tests.chaos.partition import Namespace
from tests.chaos.plan import KILLS, STOPS, Event

TICK_S = 0.05
ALIVE_S_MAX = 0.5
"""A process that is to be killed again lives this long at most."""
AIM_S, AIM_TICK_S = 10.0, 0.002
"""A process that is to be killed amid something is killed after this time in any case."""


DiskId = tuple[str, int]
"""The kind of event that fills it, and whose it is."""


class Chaos:
    """The events of a job.

    `advance` does what is due: call it again and again. Attributes: `counts` has how many events
    of each kind have happened, and how many kills have struck amid what; `kills` how many processes
    were killed.
    """

    def __init__(
        self, job: Job, clock: Clock | None, namespace: Namespace | None, disks: dict[DiskId, Disk]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.kills = 0
        self._moments = Moments(job)
        self._job, self._clock, self._namespace, self._disks = job, clock, namespace, disks
        self._random = Random(f"events {job.plan.seed}")
        self._events = list(job.plan.events)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._is_ending = False
        self._num_begun = 0  # whose time has come, and that have not happened yet
        self._num_aiming = 0
        self._full: set[DiskId] = set()

    def advance(self, progress: float) -> None:
        """What is due happens, and what has lasted long enough ends."""
        while self._events and self._events[0].at <= progress:
            event = self._events.pop(0)
            self._num_begun += 1
            self._later(event.after_s, lambda event=event: self._happen(event))  # type: ignore[misc]
        while self._due and self._due[0][0] <= time.monotonic():
            _, _, act = heapq.heappop(self._due)
            act()

    @property
    def tick_s(self) -> float:
        """How soon to call `advance` again."""
        return AIM_TICK_S if self._num_aiming else TICK_S

    @property
    def has_happened(self) -> bool:
        """All of it, if not ended yet."""
        return not (self._events or self._num_begun)

    def end(self) -> None:
        """Nothing more happens; what has happened still ends."""
        self._is_ending = True

    def undo(self) -> None:
        """Nothing of it is left for another job."""
        if self._clock is not None:
            self._clock.set_right()
        if self._job.plan.network == "namespaces" and self._namespace is not None:
            self._namespace.cut(False)

    def make_room(self) -> None:
        """Full disks get room, and their servers start again."""
        full, self._full = self._full, set()
        for disk in full:
            self._disks[disk].make_room()
        for server in {server for _, server in full}:
            self._kill(self._job.servers[server], "kill server" if server else "kill coordinator")
            self._start(self._job.servers[server])

    def _happen(self, event: Event) -> None:
        self._num_begun -= 1
        if self._is_ending:
            return
        if event.kind in KILLS:
            place = self._places(event.kind)[event.target]
            self._aim(place, event, time.monotonic() + AIM_S)
        elif event.kind in STOPS:
            self._stop(self._places(event.kind)[event.target], event)
        elif event.kind == "network":
            self._job.calm(False)
            self._later(event.seconds, lambda: self._job.calm(True))
            self.counts[event.kind] += 1
        elif event.kind == "partition" and self._namespace is not None:
            self._namespace.cut(True)
            self._later(event.seconds, lambda: self._namespace.cut(False))
            self.counts[event.kind] += 1
        elif (disk := (event.kind, event.target)) in self._disks:
            self._disks[disk].fill()
            self._full.add(disk)
            self.counts[event.kind] += 1
        elif event.kind == "clock" and self._clock is not None:
            self._clock.jump(self._random.randrange(len(self._job.places)), event.seconds)
            self.counts[event.kind] += 1

    def _places(self, kind: str) -> list[Place]:
        """Those that an event of this kind is for."""
        own = {"worker": self._job.workers, "compute": self._job.compute}
        return own.get(kind.split()[1], self._job.servers)

    def _kill_again(self, place: Place, event: Event, again: int) -> None:
        self._kill(place, event.kind)

        def start() -> None:
            self._start(place)
            if again:
                self._later(self._random.uniform(0.0, ALIVE_S_MAX), kill)

        def kill() -> None:
            self._num_begun -= 1
            self._kill_again(place, event, again - 1)

        if place.is_down:
            self._num_begun += again > 0
            self._later(event.seconds, start)

    def _aim(self, place: Place, event: Event, deadline: float) -> None:
        """Kill the process once it is amid what the event names."""
        may_wait = not self._is_ending and time.monotonic() < deadline
        if event.amid and may_wait and event.amid not in self._moments.at(place):
            self._num_begun += 1
            self._num_aiming += 1
            self._later(AIM_TICK_S, lambda: self._aim_again(place, event, deadline))
        else:
            self._kill_again(place, event, event.again)

    def _aim_again(self, place: Place, event: Event, deadline: float) -> None:
        self._num_begun -= 1
        self._num_aiming -= 1
        self._aim(place, event, deadline)

    def _kill(self, place: Place, kind: str) -> None:
        moments = self._moments.at(place)
        if not self._is_ending and place.kill():
            self._moments.note_kill()
            self.kills += 1
            self.counts.update([kind, *(f"amid a {moment}" for moment in moments)])

    def _start(self, place: Place) -> None:
        if place.is_down:
            place.launch()

    def _stop(self, place: Place, event: Event) -> None:
        program = place.program
        if place.is_down or program.has_ended:
            return
        program.signal(SIGSTOP)
        self.counts[event.kind] += 1

        def go_on() -> None:
            if not program.has_ended:
                program.signal(SIGCONT)

        self._later(event.seconds, go_on)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), act))
