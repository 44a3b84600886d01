"""A small part of `make chaos`: each kind of event once, and each kind of error is detected."""

from __future__ import annotations

import errno
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos import __main__ as main
from tests.chaos.__main__ import again, exit_code, summary
from tests.chaos.clock import NUM_SLOTS
from tests.chaos.job import TIMEOUT_S
from tests.chaos.judge import Verdict
from tests.chaos.lab import Lab
from tests.chaos.plan import LONG, SMALL, STAGES, Event, Plan, Tier, draw
from tests.chaos.round import Outcome, run_round
from tests.seeds import SEED

DEADLINE_S = 50.0
"""Of a job of a few seconds. Two of them are within the time that a test may take."""


BREAKS = ("lose", "cut")


def plan_of(mode: str, *events: Event, network: str = "direct") -> Plan:
    """Two servers and two workers, who suffer this and no more."""
    plan = draw(f"{SEED} {mode}", SMALL, mode=mode, network=network)
    plan = replace(plan, num_servers=2, lengths=(20, 16), before="", tier=None, num_compute=0)
    plan = replace(plan, stages=())
    return replace(plan, events=events)


def event(at: float, kind: str, target: int = 0, seconds: float = 0.0) -> Event:
    return Event(at=at, after_s=0.0, kind=kind, target=target, seconds=seconds)


def suffer(plan: Plan, folder: Path, lab: Lab, *, deadline_s: float = DEADLINE_S) -> Outcome:
    """A round that ends well."""
    print(f"seed {SEED}: {plan}")
    outcome = run_round(plan, folder, lab, deadline_s=deadline_s)
    output = folder / "job" / "output"
    assert outcome.is_right, f"{outcome}\n{output.read_text() if output.exists() else ''}"
    assert outcome.counts.keys() >= {e.kind for e in plan.events} - lab.impossible.keys()
    return outcome


def test_servers_and_workers_that_are_stopped_for_a_while_are_waited_for(
    tmp_path: Path, lab: Lab
) -> None:
    stops = [event(0.2, "stop server", 1, 1.0), event(0.6, "stop worker", 1, 1.0)]
    suffer(plan_of("sync", *stops), tmp_path, lab)


def test_messages_delayed_repeated_lost_and_cut_change_nothing(tmp_path: Path, lab: Lab) -> None:
    plan = plan_of("sync", event(0.0, "network", seconds=30.0), network="proxy")
    faults = suffer(replace(plan, has_keys=False), tmp_path, lab).faults
    breaks = sum(faults[f"{kind}_{what}"] for kind in BREAKS for what in ("request", "reply"))
    assert min(faults["delay"], faults["duplicate"], faults["replay"], breaks) > 0, faults


@pytest.mark.parametrize("killed", ["kill server", "kill worker"])
def test_a_kill_during_a_partition_changes_nothing(tmp_path: Path, lab: Lab, killed: str) -> None:
    events = [event(0.3, "partition", seconds=1.0), event(0.3, killed, 1, 0.2)]
    suffer(plan_of("async", *events, network="namespaces"), tmp_path, lab)


@pytest.mark.parametrize(("mode", "stages"), [("sync", 0), ("async", 2), ("geo", 1)])
def test_kills_of_every_kind_of_a_heterogeneous_job_change_nothing(
    tmp_path: Path, lab: Lab, mode: str, stages: int
) -> None:
    kills = [event(0.1, "kill compute"), event(0.3, "kill worker", 1), event(0.5, "kill compute")]
    plan = plan_of(mode, *kills, event(0.6, "kill server", 1))
    suffer(replace(plan, num_compute=1, stages=STAGES[stages]), tmp_path, lab)


def assert_server_found_disk_full(folder: Path) -> None:
    output = (folder / "job" / "output").read_text()
    assert re.search("ResourceExhausted|" + os.strerror(errno.ENOSPC), output)


def test_programs_see_their_clocks_jump(tmp_path: Path, lab: Lab) -> None:
    if lab.clock is None:  # what `lab` prints
        return
    script = tmp_path / "script.py"
    script.write_text("import time\nfor _ in range(3):\n    input()\n    print(time.time())\n")
    slot = NUM_SLOTS - 1
    env = {"CHAOS_CLOCK_SLOT": str(slot), "PYTHONUNBUFFERED": "1"}
    with lab.near.programs.start("program", [str(script)], env) as program:

        def read_clock() -> float:
            program.send("")
            return float(program.wait_line(r"^\S+")[0])

        try:
            before = read_clock()
            lab.clock.jump(slot, 86400.0 * 400)
            later = read_clock()
            lab.clock.jump(slot, -2 * 86400.0 * 400)
            earlier = read_clock()
        finally:
            lab.clock.set_right()
        assert program.finish() == 0
    assert later - before >= 86400.0 * 399
    assert later - earlier >= 86400.0 * 799


def test_clocks_that_jump_change_nothing(tmp_path: Path, lab: Lab) -> None:
    """By an hour or a year, forwards and backwards, those of some and then of others."""
    jumps = (3600.0, -86400.0 * 400, 86400.0 * 400, -3600.0, -7200.0)
    events = [event(0.15 * n, "clock", seconds=jump) for n, jump in enumerate(jumps)]
    suffer(plan_of("bounded", *events, event(0.5, "kill server", 1)), tmp_path, lab)


@pytest.mark.parametrize("has_disks", [True, False])
def test_a_job_continues_when_a_full_disk_has_room_again(
    tmp_path: Path, lab: Lab, has_disks: bool
) -> None:
    """A disk of its own where that can be mounted; and a limit on files, anywhere."""
    lab = replace(lab, has_disks=has_disks and lab.has_disks)
    suffer(plan_of("geo", event(0.4, "disk", 1)), tmp_path, lab)
    assert_server_found_disk_full(tmp_path)


def test_a_server_restarted_on_a_full_disk_waits_for_room(tmp_path: Path, lab: Lab) -> None:
    events = [event(0.4, "disk", 1), event(0.4, "kill server", 1)]
    suffer(plan_of("async", *events), tmp_path, lab)
    assert_server_found_disk_full(tmp_path)


def test_deltas_on_top_of_a_checkpoint_of_another_mode_count_every_push(
    tmp_path: Path, lab: Lab
) -> None:
    events = [event(0.1, "kill worker", 1), event(0.45, "kill server", 1)]
    suffer(replace(plan_of("bounded", *events), before="async"), tmp_path, lab)


def tiered(plan: Plan) -> Plan:
    """With rows on SSD, and other memory for each process of a server."""
    tier = Tier(memories=(10, 14, 12), num_folders=2, may_use_io_uring=plan.mode == "sync")
    return replace(plan, num_servers=1, tier=tier)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_with_rows_on_ssd_is_killed_while_it_moves_them(
    tmp_path: Path, lab: Lab, mode: str
) -> None:
    """In sync with io_uring, in async with threads."""
    kill = event(0.3, "kill coordinator")
    events = [replace(kill, amid="eviction"), replace(kill, at=0.7, amid="eviction")]
    outcome = suffer(tiered(plan_of(mode, *events)), tmp_path, lab)
    assert outcome.counts["amid a eviction"] >= 1
    assert outcome.on_ssd > 0.3
    threads = "rows on SSD are read by threads"
    assert ((tmp_path / "job" / "output").read_text().count(threads) == 3) == (mode == "async")


@pytest.mark.parametrize("has_files", [False, True])
def test_a_server_whose_ssd_is_full_goes_on_when_it_has_room(
    tmp_path: Path, lab: Lab, *, has_files: bool
) -> None:
    """Before its first file there, which its next process needs, with less memory; or later, when
    what it needs depends on the room that its files have left.
    """
    if "ssd" in lab.impossible:  # what `lab` prints
        return
    full, killed = (0.3, 0.3) if has_files else (0.0, 0.4)
    plan = tiered(plan_of("bounded", event(full, "ssd"), event(killed, "kill coordinator")))
    assert plan.tier is not None
    plan = replace(plan, tier=replace(plan.tier, memories=(14, 8)))
    outcome = suffer(plan, tmp_path, lab)
    assert outcome.on_ssd > 0.3
    if not has_files:
        assert_server_found_disk_full(tmp_path)


def test_a_round_whose_rows_all_stay_in_memory_is_wrong(tmp_path: Path, lab: Lab) -> None:
    plan = tiered(plan_of("async"))
    plan = replace(plan, lengths=(6,), every_steps=0, tier=replace(plan.tier, memories=(500,)))  # type: ignore[type-var]
    outcome = run_round(plan, tmp_path, lab, deadline_s=DEADLINE_S)
    assert outcome.problem.startswith("expected rows on SSD, found {"), outcome


def test_a_round_ends_as_if_nothing_had_happened(tmp_path: Path, lab: Lab) -> None:
    events = [event(0.1, "kill server", 1), event(0.5, "kill coordinator")]
    outcome = suffer(plan_of("hybrid", *events), tmp_path, lab)
    assert outcome.kills == 2


def test_a_worker_of_hybrid_that_is_killed_ends_the_job_with_errors(
    tmp_path: Path, lab: Lab
) -> None:
    plan = plan_of("hybrid", event(0.05, "kill worker", 1))
    outcome = suffer(plan, tmp_path, lab, deadline_s=TIMEOUT_S + 40.0)
    assert outcome.has_failed


def test_the_same_seed_draws_the_same_plan() -> None:
    plans = [draw(f"{SEED}.{number}", LONG) for number in range(200)]
    assert plans == [draw(plan.seed, LONG) for plan in plans]
    assert all(plan.events for plan in plans)
    kinds = {e.kind for plan in plans for e in plan.events}
    assert kinds == {
        *("kill server", "kill coordinator", "kill worker", "kill compute"),
        *("stop server", "stop worker", "stop compute"),
        *("network", "partition", "disk", "ssd", "clock"),
    }
    assert {plan.stages for plan in plans if plan.num_compute} == set(STAGES)
    assert 0.2 < sum(plan.num_compute > 0 for plan in plans) / len(plans) < 0.4
    assert 0.3 < sum(plan.tier is not None for plan in plans) / len(plans) < 0.5


# A check that cannot fail is worth nothing: the mistakes below are made on purpose.


@pytest.mark.parametrize("flaw", ["lost", "twice", "bit", "hung"])
def test_every_kind_of_wrong_result_is_detected(tmp_path: Path, lab: Lab, flaw: str) -> None:
    plan = replace(plan_of("sync" if flaw == "bit" else "async"), num_servers=1, lengths=(6,))
    plan = replace(plan, every_steps=0, is_handed=False)
    deadline_s = 5.0 if flaw == "hung" else DEADLINE_S
    outcome = run_round(plan, tmp_path, lab, deadline_s=deadline_s, flaw=flaw)
    verdict = outcome.verdict
    assert outcome.is_hung == (flaw == "hung"), outcome
    assert (verdict.lost > 0, verdict.twice > 0) == (flaw == "lost", flaw == "twice"), outcome
    assert bool(verdict.differing) == (flaw == "bit"), outcome
    assert not outcome.is_right
    assert exit_code([outcome], num_kills=0) == 1


@pytest.mark.parametrize(("flaw", "code"), [("code", 3), ("error", 1)])
def test_a_process_with_a_wrong_exit_code_is_detected(
    tmp_path: Path, lab: Lab, flaw: str, code: int
) -> None:
    """In a job too that a kill is going to end with errors."""
    plan = plan_of("hybrid" if flaw == "error" else "async", event(0.9, "kill worker"))
    plan = replace(plan, num_servers=1, lengths=(6,), every_steps=0, is_handed=False)
    plan = plan if flaw == "error" else replace(plan, events=())
    outcome = run_round(plan, tmp_path, lab, deadline_s=DEADLINE_S, flaw=flaw)
    assert outcome.problem.startswith(f"worker 0 ended with {code}"), outcome
    assert not outcome.is_right


def test_a_process_that_does_not_end_is_detected(tmp_path: Path, lab: Lab) -> None:
    plan = replace(plan_of("async"), num_servers=1, lengths=(6,), every_steps=0, is_handed=False)
    outcome = run_round(plan, tmp_path, lab, deadline_s=8.0, flaw="stays")
    assert outcome.is_hung, outcome


def test_the_command_to_repeat_a_round_has_its_options() -> None:
    def hint(**chosen: object) -> str:
        rest = {"mode": None, "network": None, "heter": 0, "ssd": False}
        rest |= {"stages": False, "small": False}
        return again("7.3", Namespace(**(rest | chosen)))

    assert hint() == "make chaos ROUND=7.3"
    assert hint(mode="geo", small=True).endswith("-m tests.chaos --round 7.3 --mode geo --small")
    assert hint(heter=2, stages=True).endswith("--round 7.3 --heter 2 --stages")
    assert hint(network="proxy").endswith("--round 7.3 --network proxy")


def test_a_round_that_raises_is_a_failed_one(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> Outcome:
        raise ValueError("judge: expected whole numbers")

    @contextmanager
    def same() -> Iterator[Lab]:
        yield lab

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "run_round", fail)
    monkeypatch.setattr(main, "lab", same)
    monkeypatch.setattr(sys, "argv", ["chaos", "--round", "7.3"])
    assert main.main() == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("CHAOS {")


def test_only_enough_kills_and_right_rounds_are_a_success() -> None:
    plan = plan_of("async")
    right = Outcome(plan=plan, kills=3)
    assert exit_code([right, right], num_kills=6) == 0
    assert exit_code([right, right], num_kills=7) == 1
    for wrong in (
        Outcome(plan=plan, kills=3, verdict=Verdict(lost=2)),
        Outcome(plan=plan, kills=3, verdict=Verdict(twice=1)),
        Outcome(plan=plan, kills=3, problem="hung", is_hung=True),
        Outcome(plan=plan, kills=3, verdict=Verdict(differing=("worker.safetensors",))),
        Outcome(plan=plan, kills=3, problem="worker 0 ended with 1"),
    ):
        assert exit_code([right, wrong], num_kills=0) == 1
    actual = summary([right, Outcome(plan=plan, kills=2, verdict=Verdict(lost=2, twice=1))])
    assert (actual["kills"], actual["lost"], actual["twice"], actual["hung"]) == (5, 2, 1, 0)
