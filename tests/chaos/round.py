"""One round: a job runs while the events of its plan happen, ends, and is judged."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.disk import LARGE_SIZE, SIZE, Disk, LimitedFiles, small_disk
from tests.chaos.events import Chaos, DiskId
from tests.chaos.job import Job, Place
from tests.chaos.judge import RIGHT, Verdict, judge
from tests.chaos.lab import Lab
from tests.chaos.plan import Plan
from tests.chaos.script import Options
from tests.programs import Program

GOODBYE = "all workers have said goodbye"
LARGE = {"batch": 150, "num_keys": 30_000, "dim": 240}
"""Of jobs with rows on SSD: two of them fill a page, and all take 20 to 60 MB."""
ON_SSD_MIN = 0.2
"""The share of the rows that lies there at the end."""
# How workers of hybrid end when one of them was killed: the all-reduce breaks, or waits in vain;
# the one that was restarted finds the others at work; who comes to a meeting is alone.
FATAL = ("BadRequest", "DeadlineExceeded", "Unavailable")
EXHAUSTED = "trireme.errors.ResourceExhausted"


_GOODBYE_S = 5.0  # from what compute workers hear of a worker to its last line


@dataclass(kw_only=True)
class Outcome:
    """What became of a round.

    Attributes:
        problem: why the job did not come to its end as it should; empty if it did.
        has_failed: with the errors that its plan made inevitable.
        faults: of each kind how many the proxies have made.
        tiers: where rows lay at the end, and what the last processes of the servers did with them.
        is_hung: neither its end nor an error before the deadline.
    """

    plan: Plan
    kills: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    tiers: dict[str, int] = field(default_factory=dict)
    verdict: Verdict = RIGHT
    problem: str = ""
    is_hung: bool = False
    has_failed: bool = False
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        return self.verdict.is_right and not self.problem and not self.is_hung

    @property
    def on_ssd(self) -> float:
        """The share of the rows that lay there."""
        return self.tiers["on_ssd"] / self.tiers["rows"] if self.tiers else 0.0

    def __str__(self) -> str:
        end = "right: it ended with errors, as it must" if self.has_failed else "right"
        actual = end if self.is_right else f"WRONG: {self.problem or self.verdict}"
        tiers = f", {json.dumps(self.tiers)}" if self.tiers else ""
        return f"{self.kills} kills, {self.seconds:.0f} s, {actual}{tiers}"


def run_round(plan: Plan, folder: Path, lab: Lab, *, deadline_s: float, flaw: str = "") -> Outcome:
    """Everything that the round writes is in `folder`, the output of its processes too.

    deadline_s: for the job, and once more for the undisturbed one of sync. flaw: as in `Options`.
    """
    plan = lab.fit(plan)
    started = time.monotonic()
    earlier = undisturbed = None
    sizes = {} if plan.tier is None else LARGE
    if plan.before:
        calm = plan.earlier()
        earlier = _options(calm, folder / "earlier", sizes)
        outcome = _run(calm, earlier, lab, deadline_s)
        if not outcome.is_right:
            outcome.problem = f"the job before: {outcome.problem or outcome.verdict}"
            return outcome
    if plan.mode == "sync":
        calm = plan.undisturbed()
        options = _options(calm, folder / "calm", sizes, earlier=earlier)
        outcome = _run(calm, options, lab, deadline_s, earlier=earlier)
        if not outcome.is_right:
            outcome.problem = f"undisturbed: {outcome.problem or outcome.verdict}"
            return outcome
        undisturbed = folder / "calm" / "last"
    options = _options(plan, folder / "job", sizes, flaw, earlier)
    outcome = _run(plan, options, lab, deadline_s, undisturbed, earlier)
    outcome.seconds = time.monotonic() - started
    return outcome


def _options(
    plan: Plan,
    folder: Path,
    sizes: dict[str, int],
    flaw: str = "",
    earlier: Options | None = None,
) -> Options:
    folder.mkdir(parents=True)
    return Options(
        folder=str(folder),
        mode=plan.mode,
        data=plan.seed,
        lengths=plan.lengths,
        num_epochs=plan.num_epochs,
        every_steps=plan.every_steps,
        loads="" if earlier is None else f"{earlier.folder}/last",
        first_epoch=0 if earlier is None else earlier.num_epochs,
        pause_per_batch_s=plan.pause_per_batch_s,
        stages=plan.stages,
        flaw=flaw,
        **sizes,
    )


def _run(
    plan: Plan,
    options: Options,
    lab: Lab,
    deadline_s: float,
    undisturbed: Path | None = None,
    earlier: Options | None = None,
) -> Outcome:
    outcome = Outcome(plan=plan)
    folder = Path(options.folder)
    job = Job(plan, options, folder, lab.world(plan))
    with ExitStack() as stack:
        filled = {(e.kind, e.target) for e in plan.events if e.kind in ("disk", "ssd")}
        disks = {disk: stack.enter_context(_disk(job, disk, lab)) for disk in sorted(filled)}
        stack.enter_context(job)
        chaos = Chaos(job, lab.clock, lab.namespace, disks)
        try:
            _Run(job, chaos, outcome, time.monotonic() + deadline_s).to_its_end()
        finally:
            (folder / "output").write_text("".join(place.output for place in job.places))
            chaos.undo()
        outcome.kills, outcome.counts = chaos.kills, chaos.counts
        outcome.faults = sum((proxy.counts for proxy in job.proxies), Counter[str]())
        if (tiers := re.search(r"^tiers (.*)$", job.workers[0].output, re.MULTILINE)) is not None:
            outcome.tiers = json.loads(tiers[1])
    if not (outcome.problem or outcome.has_failed):
        if plan.tier is not None and outcome.on_ssd < ON_SSD_MIN:
            outcome.problem = f"expected rows on SSD, found {outcome.tiers}"
        outcome.verdict = judge(options, undisturbed, earlier)
    return outcome


def _disk(job: Job, disk: DiskId, lab: Lab) -> AbstractContextManager[Disk]:
    kind, server = disk
    if kind == "ssd":
        return small_disk(job.ssd(server), LARGE_SIZE)
    if lab.has_disks:
        return small_disk(job.disk(server), SIZE if job.plan.tier is None else LARGE_SIZE)
    return nullcontext(LimitedFiles(lambda: job.servers[server].program.pid))


class _Run:
    """Drives a job to its end, and says in `outcome` if that is not as it should be."""

    def __init__(self, job: Job, chaos: Chaos, outcome: Outcome, deadline: float) -> None:
        self._job, self._chaos, self._outcome = job, chaos, outcome
        self._deadline = deadline
        self._tick = threading.Event()
        self._codes: dict[Program, int] = {}
        self._first_seen: dict[Program, float] = {}  # ended, before the workers were done

    def to_its_end(self) -> None:
        while not self._outcome.problem:
            self._chaos.advance(self._job.progress())
            if self._chaos.has_happened:
                (self._job.folder / "go").touch()
            done = [_is_done(worker) for worker in self._job.workers]
            if any(done):
                self._chaos.end()
            if all(done) or self._servers_are_done():
                break
            self._look_after_workers()
            self._look_after_compute_workers()
            self._look_after_servers()
            if self._is_fatal and self._workers_have_ended():
                self._outcome.has_failed = True
                self._look_for_failures()
                return
            self._wait("workers", [w for w in self._job.workers if not _is_done(w)])
        while not (self._outcome.problem or self._servers_are_done()):
            self._chaos.advance(1.0)
            self._look_after_servers()
            self._wait("servers", [s for s in self._job.servers if not _has_said_goodbye(s)])
        self._wait_for_ends()
        self._look_for_failures()

    def _wait_for_ends(self) -> None:
        """All processes end by themselves, with code 0, and all workers are done. A compute worker
        that was killed may come too late to hear of the end.
        """
        places = self._job.places
        late = [one for one in self._job.compute if one.is_down or len(one.programs) > 1]
        while not self._outcome.problem:
            self._chaos.advance(1.0)
            if all(_has_ended(place) for place in places if place not in late):
                for one in late:
                    one.signal(signal.SIGTERM)
            running = [place for place in places if not _has_ended(place)]
            if not running:
                break
            self._wait("processes", running)
        for place in places:
            if self._outcome.problem:
                return
            code = self._code(place)
            if code and not (place in late and code == -signal.SIGTERM):
                self._problem(f"{place.name} ended with {code}: {_last_line(place)}")
        for worker in self._job.workers:
            if not _is_done(worker):
                self._problem(f"{worker.name} is not done: {_last_line(worker)}")

    def _code(self, place: Place) -> int:
        """The exit code of its last process, once that has ended."""
        program = place.program
        if program not in self._codes:
            self._codes[program] = program.finish()
        return self._codes[program]

    @property
    def _is_fatal(self) -> bool:
        """Whether what has happened ends the job."""
        return self._job.plan.is_fatal and self._chaos.counts["kill worker"] > 0

    @property
    def _has_filled(self) -> bool:
        """Whether a disk has been full."""
        return bool(self._chaos.counts["disk"] or self._chaos.counts["ssd"])

    def _wait(self, which: str, places: list[Place]) -> None:
        if time.monotonic() > self._deadline:
            names = ", ".join(place.name for place in places)
            self._problem(f"hung: {which} have not ended: {names}")
            self._outcome.is_hung = True
        self._tick.wait(self._chaos.tick_s)

    def _servers_are_done(self) -> bool:
        return all(_has_said_goodbye(server) for server in self._job.servers)

    def _workers_have_ended(self) -> bool:
        return all(_has_ended(worker) for worker in self._job.workers)

    def _look_after_workers(self) -> None:
        """Start those again that a full disk has ended, once there is room."""
        for worker in self._job.workers:
            if not _has_ended(worker):
                continue
            code, line = self._code(worker), _last_line(worker)
            if _is_done(worker) or (self._is_fatal and _has_failed(worker)):
                continue
            if self._has_filled and line.startswith(EXHAUSTED):
                self._chaos.make_room()
                worker.launch()
            else:
                self._problem(f"{worker.name} ended with {code}: {line}")

    def _look_after_compute_workers(self) -> None:
        """None ends before the workers, which say goodbye, which it hears, before they are done."""
        are_done = all(_is_done(worker) for worker in self._job.workers)
        for one in self._job.compute:
            if not _has_ended(one) or are_done or self._is_fatal:
                continue
            since = self._first_seen.setdefault(one.program, time.monotonic())
            if self._code(one) or time.monotonic() - since > _GOODBYE_S:
                self._problem(f"{one.name} ended with {self._code(one)}: {_last_line(one)}")

    def _look_after_servers(self) -> None:
        """Start those again that found their disk full, once there is room."""
        for server in self._job.servers:
            if not _has_ended(server):
                continue
            code, line = self._code(server), _last_line(server)
            if _has_said_goodbye(server):
                continue
            is_full = os.strerror(errno.ENOSPC) in line or line.startswith(EXHAUSTED)
            if self._has_filled and is_full:
                self._chaos.make_room()
                server.launch()
            else:
                self._problem(f"{server.name} ended with {code}: {line}")

    def _look_for_failures(self) -> None:
        for server in self._job.servers:
            if "Traceback" in server.output:
                self._problem(f"{server.name} has met an exception")

    def _problem(self, text: str) -> None:
        self._outcome.problem = self._outcome.problem or text


def _is_done(worker: Place) -> bool:
    return not worker.is_down and worker.program.output.endswith("done")


def _has_ended(place: Place) -> bool:
    """By itself; what is down is restarted."""
    return not place.is_down and place.program.has_ended


def _has_failed(worker: Place) -> bool:
    """As a worker has to when another one of hybrid was killed."""
    return _last_line(worker).startswith(tuple(f"trireme.errors.{name}: " for name in FATAL))


def _has_said_goodbye(server: Place) -> bool:
    return GOODBYE in server.output


def _last_line(place: Place) -> str:
    return place.program.output.rpartition("\n")[2]
