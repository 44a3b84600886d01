"""A plan of one round, drawn from a seed: the job, and what happens to which process when.

The plan is the same for the same seed; at which instruction an event strikes is up to the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

MODES = ("sync", "async", "bounded", "geo", "hybrid")
NETWORKS = ("direct", "proxy", "namespaces")
KILLS = ("kill server", "kill coordinator", "kill worker", "kill compute")
STOPS = ("stop server", "stop worker", "stop compute")
STAGES = ((), ("cpu", "gpu", "cpu_2"), ("cpu", "gpu", "gpu_2"), ("gpu", "gpu_2", "cpu"))
"""Of models: none, or where the rows, the head and the count of pushes are."""
TIER_SHARE, HETER_SHARE = 0.4, 0.3
"""Of the rounds, with rows on SSD, and with compute workers."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happens.

    Attributes:
        at: the share of all batches that have been trained on when its time comes, in [0, 1).
        after_s: how much later it happens.
        kind: of KILLS, STOPS, or "network", "partition", "disk", "ssd", "clock"; the disk of the
            server's state, or of its rows, is full.
        target: index of the server, worker or compute worker.
        seconds: until the process is restarted, continues, or the network is well again; of
            "clock" by how much the clock jumps.
        again: how often the process is killed once more before it serves.
        amid: of `moments.MOMENTS`, what it is killed amid, if it comes to that in time; empty: what
            it happens to be at.
    """

    at: float
    after_s: float
    kind: str
    target: int = 0
    seconds: float = 0.0
    again: int = 0
    amid: str = ""

    def __str__(self) -> str:
        where = (
            ""
            if self.kind in ("network", "partition", "clock", "kill coordinator")
            else self.target
        )
        amid = f" amid a {self.amid}" if self.amid else ""
        return f"{self.kind} {where}".strip() + amid


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much a round tries."""

    num_kills: tuple[int, int]
    num_batches: tuple[int, int]  # of a worker in an epoch
    num_processes_max: int  # servers, and workers
    stop_s: float
    network_s: float
    pause_s: float  # before a killed process is restarted, at most


SMALL = Scale(
    num_kills=(2, 3),
    num_batches=(15, 25),
    num_processes_max=2,
    stop_s=1.0,
    network_s=1.0,
    pause_s=0.2,
)
LONG = Scale(
    num_kills=(4, 8),
    num_batches=(40, 80),
    num_processes_max=3,
    stop_s=20.0,
    network_s=5.0,
    pause_s=2.0,
)


@dataclass(frozen=True, kw_only=True)
class Tier:
    """How servers have rows on SSD.

    Attributes:
        memories: MiB of --memory, for the first process of a server and for each one after it, in
            turn. Two tables take up to 6.5 MiB beside their rows, and twice that during a load.
        num_folders: of --ssd_dir.
        may_use_io_uring: whether the system lets them.
    """

    memories: tuple[int, ...]
    num_folders: int
    may_use_io_uring: bool

    def __str__(self) -> str:
        io = "" if self.may_use_io_uring else " without io_uring"
        memories = "/".join(map(str, self.memories))
        return f"rows in {self.num_folders} folders on SSD{io} beyond {memories} MiB"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A round.

    Attributes:
        lengths: batches of each worker in an epoch.
        network: of NETWORKS, between workers and servers.
        has_keys: whether they speak CurveZMQ.
        is_handed: whether servers get a socket that listens, as from `trireme launch`, and so keep
            their port while they are down.
        every_steps: of the checkpoints written meanwhile; 0: none.
        before: mode of a job in peace whose checkpoint this one goes on from, with deltas on top of
            it; empty: there was none.
        num_compute: compute workers, which run the model for the workers.
        stages: names of the model's stages; empty: it has none.
        tier: None: all rows are in memory. Tables are larger if not, several times the memory.
        events: in the order of their times.
    """

    seed: str
    mode: str
    num_servers: int
    lengths: tuple[int, ...]
    num_epochs: int
    durability: str
    log_bytes: int
    network: str
    has_keys: bool
    is_handed: bool
    every_steps: int
    before: str
    pause_per_batch_s: float
    tier: Tier | None
    events: tuple[Event, ...]
    num_compute: int = 0
    stages: tuple[str, ...] = ()

    @property
    def num_workers(self) -> int:
        return len(self.lengths)

    @property
    def is_fatal(self) -> bool:
        """Whether the job has to end with an error: no worker's successor can take part in hybrid's
        all-reduce.
        """
        return self.mode == "hybrid" and any(e.kind == "kill worker" for e in self.events)

    def __str__(self) -> str:
        keys = ", keys" if self.has_keys else ""
        before = f"{self.before}, then " if self.before else ""
        tier = "" if self.tier is None else f", {self.tier}"
        heter = f", {self.num_compute} compute workers" if self.num_compute else ""
        heter += f" of {'+'.join(self.stages)}" if self.stages else ""
        return (
            f"{before}{self.mode}, {self.num_servers} servers, {self.num_workers} workers,"
            f" {self.durability}, {self.network}{keys}{heter}{tier}: "
            + ", ".join(f"{event} at {event.at:.0%}" for event in self.events)
        )

    def earlier(self) -> Plan:
        """The job before, on one server, with its rows in memory."""
        return replace(self.undisturbed(), mode=self.before, before="", num_servers=1, num_epochs=1)

    def undisturbed(self) -> Plan:
        """The same job in quiet, with its rows in memory, whose workers run the model."""
        calm = replace(self, network="direct", has_keys=False, durability="none", events=())
        return replace(calm, pause_per_batch_s=0.0, tier=None, num_compute=0)


def draw(
    seed: str,
    scale: Scale,
    *,
    mode: str | None = None,
    network: str | None = None,
    has_tier: bool = False,
    num_compute: int = 0,
    has_stages: bool = False,
) -> Plan:
    """The plan of this seed. `mode` and `network` put one in the place of the one that is drawn;
    has_tier: with rows on SSD in any case; num_compute: with so many compute workers in any case;
    has_stages: whose model has stages, if there are compute workers.
    """
    random = Random(f"chaos {seed}")
    drawn_mode, drawn_network = random.choice(MODES), random.choice(NETWORKS)
    mode, network = mode or drawn_mode, network or drawn_network
    if mode == "hybrid":  # its workers also talk to each other, without keys: on loopback alone
        network = "direct" if network == "namespaces" else network
    plan = Plan(
        seed=seed,
        mode=mode,
        num_servers=random.randint(1, scale.num_processes_max),
        lengths=tuple(
            random.randint(*scale.num_batches)
            for _ in range(random.randint(1, scale.num_processes_max))
        ),
        num_epochs=2,
        durability=random.choice(("process", "machine")),
        log_bytes=random.choice((1 << 14, 1 << 17, 1 << 30)),
        network=network,
        has_keys=random.random() < 0.4,
        is_handed=random.random() < 0.4,
        every_steps=random.choice((0, 7)),
        before=random.choice(("", *MODES)),
        pause_per_batch_s=0.01,
        tier=None,
        events=(),
    )
    others = Random(f"tier {seed}")
    if others.random() < TIER_SHARE or has_tier:
        plan = replace(plan, tier=_tier(others), every_steps=3 * plan.every_steps)
    others = Random(f"heter {seed}")
    drawn_num = others.randint(1, scale.num_processes_max) if others.random() < HETER_SHARE else 0
    plan = replace(plan, num_compute=num_compute or drawn_num)
    if plan.num_compute:
        plan = replace(plan, stages=others.choice(STAGES[1 if has_stages else 0 :]))
    events = [*_events(plan, scale, random), *_kills_of_compute_workers(plan, scale, others)]
    return replace(plan, events=tuple(sorted(events, key=lambda event: event.at)))


def _kills_of_compute_workers(plan: Plan, scale: Scale, random: Random) -> Iterator[Event]:
    for _ in range(random.randint(*scale.num_kills) if plan.num_compute else 0):
        again = 1 if random.random() < 0.25 else 0
        yield _event(plan, random, "kill compute", random.uniform(0, scale.pause_s), again)
    if plan.num_compute and random.random() < 0.4:
        yield _event(plan, random, "stop compute", scale.stop_s)


def _tier(random: Random) -> Tier:
    return Tier(
        memories=tuple(random.choice((10, 12, 15)) for _ in range(3)),
        num_folders=random.choice((1, 2)),
        may_use_io_uring=random.random() < 0.7,
    )


def _events(plan: Plan, scale: Scale, random: Random) -> Iterator[Event]:
    kinds = ["kill coordinator"]
    if plan.num_servers > 1:
        kinds.append("kill server")
    if plan.mode != "hybrid":
        kinds.append("kill worker")
    elif random.random() < 0.25:
        yield _event(plan, random, "kill worker", random.uniform(0, scale.pause_s))
    for _ in range(random.randint(*scale.num_kills)):
        kind = random.choice(kinds)
        again = sum(1 for _ in itertools.takewhile(lambda _: random.random() < 0.25, range(3)))
        event = _event(plan, random, kind, random.uniform(0, scale.pause_s), again)
        yield replace(event, **_aimed(plan, random, kind))
    if random.random() < 0.4:
        yield _event(plan, random, random.choice(STOPS[:2]), scale.stop_s)
    if random.random() < 0.4:
        jump_s = random.choice((-1, 1)) * random.choice((5.0, 3600.0, 86400.0 * 400))
        yield _event(plan, random, "clock", jump_s)
    if plan.network == "proxy":
        for _ in range(random.randint(1, 2)):
            yield _event(plan, random, "network", scale.network_s)
    if plan.network == "namespaces":
        yield _event(plan, random, "partition", random.uniform(0.3, 1.0) * scale.network_s)
    if random.random() < 0.25 and plan.mode != "hybrid":
        if plan.tier is None or random.random() < 0.5:
            yield _event(plan, random, "disk")
        else:  # the next process needs new files; one that has room in its own goes on
            full = _event(plan, random, "ssd")
            yield full
            kind = "kill server" if full.target else "kill coordinator"
            yield replace(full, kind=kind, after_s=full.after_s + 0.1)


def _aimed(plan: Plan, random: Random, kind: str) -> dict[str, Any]:
    """What of an event makes it strike amid something that this job does, or nothing."""
    moments = ["", "save"] if plan.every_steps else [""]
    if kind != "kill worker" and plan.log_bytes < 1 << 20:
        moments.append("snapshot")
    if plan.before:
        moments.append("delta")
    if kind != "kill worker" and plan.tier is not None:
        moments += ["eviction", "eviction"]
    amid = random.choice(moments)
    at_end_of_epoch = random.uniform(0.4, 0.5)
    return {"amid": amid, "at": at_end_of_epoch} if amid == "delta" else {"amid": amid}


def _event(plan: Plan, random: Random, kind: str, seconds: float = 0.0, again: int = 0) -> Event:
    nums = {"worker": plan.num_workers, "compute": plan.num_compute}
    target = random.randrange(nums.get(kind.split()[-1], plan.num_servers))
    if kind == "kill server":  # the first one is the coordinator
        target = random.randrange(1, plan.num_servers)
    elif kind == "kill coordinator":
        target = 0
    return Event(
        at=random.uniform(0.0, 0.9),
        after_s=random.uniform(0.0, 0.2),
        kind=kind,
        target=target,
        seconds=seconds,
        again=again,
    )
