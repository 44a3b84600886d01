"""The coordinator: facts of the job, workers, passes, leases, meetings and saves. Hosted by
server 0.

It handles no keys and no gradients. Its parts hold the state; this file locks, keeps the state and
lists the handlers. Threads: any; one lock guards all parts.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from trireme.coordinator.decisions import Decisions
from trireme.coordinator.facts import Facts
from trireme.coordinator.joining import Joining
from trireme.coordinator.joint_passes import NO_PASS, JointPasses
from trireme.coordinator.kept_state import KeptState, State
from trireme.coordinator.leases import StreamLeases
from trireme.coordinator.meetings import Meetings
from trireme.coordinator.passes import Passes
from trireme.coordinator.saves import SaveVersions
from trireme.coordinator.workers import Workers
from trireme.protocol.wire import need
from trireme.rpc import Deferred, Handler, HeldBytes, Reply, Request

READ_ONLY = ("coord.map", "coord.chain", "coord.in_exchange")
POLLED = ("coord.take",)
"""Repeated by workers that wait: it reports itself whether it has changed the state."""


class Coordinator:
    """Locks, keeps and serves its parts. facts: facts of the job, and its bucket map. held: the
    budget of what peers make it hold.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, held: HeldBytes | None = None
    ) -> None:
        held = held or HeldBytes()
        self._lock = threading.RLock()
        self._kept = KeptState(self._state)
        self.facts = Facts(held)
        self._workers = Workers(clock)
        self._meetings = Meetings(self._workers, self._kept, held)
        self._leases = StreamLeases(self._workers, self._meetings, self._kept)
        self._joining = Joining(self.facts, self._workers, self._meetings, self._leases)
        self._saves = SaveVersions()
        self._decisions = Decisions(self._note_loaded)
        self._joint = JointPasses(self._workers, self._meetings, self._kept)
        self._passes = Passes(
            self._workers,
            self._meetings,
            self._leases,
            self._joining,
            self._decisions,
            self._joint,
            self._kept,
        )

    def handlers(self) -> dict[str, Handler]:
        for_workers = {
            "coord.states": self.facts.on_states,
            "coord.add_blocks": self.facts.on_add_blocks,
            "coord.begin_anew": self._on_begin_anew,
            "coord.agree": self._joining.on_agree,
            "coord.begin_pass": self._passes.on_begin_pass,
            "coord.meet_in_pass": self._joint.on_meet,
            "coord.end_device_pass": self._passes.on_end_device_pass,
            "coord.leave": self._passes.on_leave,
            "coord.enter": self._passes.on_enter,
            "coord.take": self._leases.on_take,
            "coord.give_back": self._leases.on_give_back,
            "coord.gather": self._meetings.on_gather,
            "coord.in_exchange": self._meetings.on_in_exchange,
            "coord.end": self._joining.on_end,
        }
        handlers: dict[str, Handler] = {
            "coord.join": self._joining.on_join,
            "coord.map": self.facts.on_map,
            "coord.decide": self._decisions.on_decide,
            **{name: self._for_worker(handler) for name, handler in for_workers.items()},
            **self._saves.handlers(),
        }
        return {name: self._guarded(handler) for name, handler in handlers.items()}

    def _on_begin_anew(self, worker: int, request: Request) -> Reply:
        if need({"rows": False, **request.body}, "rows", bool):
            self._saves.begin_anew()
        return self.facts.on_begin_anew(worker, request)

    def _note_loaded(self, loaded: Mapping[str, Any]) -> None:
        self._saves.note_loaded(loaded)
        self.facts.renew_map()

    def _for_worker(self, handler: Callable[[int, Request], Reply | Deferred]) -> Handler:
        def handle(request: Request) -> Reply | Deferred:
            worker = self._workers.caller(request)
            self._joint.note_call(worker)
            answer = handler(worker, request)
            self._joint.fail_meetings()
            self._meetings.fail_without_ended()
            return answer

        return handle

    def _guarded(self, handler: Handler) -> Handler:
        """Lock, and write the state before the answer. A write that failed is tried again."""

        def handle(request: Request) -> Reply | Deferred | None:
            with self._lock:
                if request.method not in READ_ONLY + POLLED:
                    self._kept.note_change()
                answer = handler(request)
                if isinstance(answer, Deferred):
                    answer.describe = partial(self._describe, answer.describe)
                else:
                    self._kept.flush()
                return answer

        return handle

    def _describe(self, describe: Callable[[], str]) -> str:
        with self._lock:
            return describe()

    # ---- what the server reports ----

    def note_heartbeat(self, worker: int, incarnation: int) -> None:
        """A worker has sent a heartbeat. Where streams are leased, silent workers are given up."""
        with self._lock:
            record = self._workers.records.get(worker)
            if record is not None and incarnation == record.incarnation:
                self._leases.note_heartbeat(worker)

    def note_goodbye(self, worker: int) -> None:
        with self._lock:
            self._joining.note_goodbye(worker)

    def participants_among(self, workers: Iterable[int]) -> list[int]:
        """Those of these workers that take part."""
        with self._lock:
            return [worker for worker in workers if worker in self._workers.participants]

    def keep(self, write: Callable[[State], None]) -> None:
        """From now on write the state before any answer that relies on it. `write` raises if it
        cannot.
        """
        self._kept.keep(write)

    def _state(self) -> State:
        return {
            **self.facts.state(),
            "workers": self._workers.state(),
            "run": self._joining.state(),
            **self._passes.state(),
            "shared": {"sharing": self._leases.state(), "given_up": sorted(self._workers.given_up)},
            "meetings": self._meetings.state(),
            "exports": self._saves.state(),
            "imports": self._decisions.state(),
            "joint": self._joint.state(),
        }

    def install(self, state: Mapping[str, Any]) -> None:
        """Begin with a kept state."""
        self.facts.install(state)
        self._leases.install(state["shared"]["sharing"])
        self._workers.install(state["workers"], state["shared"], self.facts.num_workers)
        self._joining.install(state["run"])
        self._passes.install(state)
        self._meetings.install(state["meetings"])
        self._saves.install(state["exports"])
        self._decisions.install(state.get("imports", []))
        self._joint.install(state.get("joint", NO_PASS))  # older files have neither
