"""What the rounds of chaos need from this machine, set up once for all of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos import disk
from tests.chaos.clock import Clock, make_clock
from tests.chaos.job import World
from tests.chaos.partition import Namespace, namespace
from tests.chaos.plan import Plan
from tests.programs import template


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Attributes:
    near: servers and workers on this host. apart: workers on another, if that is possible.
    has_disks: whether small disks can be mounted.
    impossible: kind of event -> why it cannot be made here.
    """

    near: World
    apart: World | None
    clock: Clock | None
    namespace: Namespace | None
    has_disks: bool
    impossible: dict[str, str]

    def fit(self, plan: Plan) -> Plan:
        """The plan without what is impossible here."""
        events = tuple(event for event in plan.events if event.kind not in self.impossible)
        if not self.has_disks and any(event.kind == "disk" for event in events):
            # A limit on files is one for checkpoints and rows too, which are not what is tried.
            plan = replace(plan, every_steps=0, tier=None)
        is_near = plan.network == "namespaces" and self.apart is None
        return replace(plan, events=events, network="direct" if is_near else plan.network)

    def world(self, plan: Plan) -> World:
        if plan.network != "namespaces":
            return self.near
        assert self.apart is not None
        return self.apart


@contextmanager
def lab() -> Iterator[Lab]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        has_disks = disk.can_mount(folder)
        impossible = {} if has_disks else {"ssd": "no disk can be mounted"}
        clock = make_clock(folder)
        if isinstance(clock, str):
            impossible["clock"] = clock
        env = {} if isinstance(clock, str) else clock.env
        programs = stack.enter_context(template(env))
        other = stack.enter_context(namespace())
        apart = None
        if isinstance(other, str):
            impossible["partition"] = other
        else:
            apart = World(programs=programs, host=other.host, namespace=other.name)
        yield Lab(
            near=World(programs=programs),
            apart=apart,
            clock=None if isinstance(clock, str) else clock,
            namespace=None if isinstance(other, str) else other,
            has_disks=has_disks,
            impossible=impossible,
        )
