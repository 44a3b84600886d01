"""Jobs that are killed or stopped resume from their newest checkpoint: in sync with the same bytes
as an undisturbed job, in async with every batch applied exactly once.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.integration.durable_servers import DurableServers
from tests.integration.resumed_jobs import Jobs, assert_same, complete
from tests.integration.resumed_script import EPOCHS, NUM_BATCHES, Unequal, make_trainer, model_of
from tests.long import pick
from tests.programs import Template
from tests.seeds import SEED
from tests.tables import T_ROWS
from trireme import _core
from trireme.job.embedded import embedded
from trireme.table import RowClassId

EVERY, NEVER = ("--every_steps", "7"), ("--every_steps", "100000")


@pytest.mark.parametrize(
    ("num_workers", "num_servers"),
    pick(short=[(2, 2)], long=[(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]),
)
def test_killed_and_resumed_equals_never_stopped(
    programs: Template, tmp_path: Path, num_workers: int, num_servers: int
) -> None:
    random = Random(f"{SEED} {num_workers} {num_servers}")
    jobs = Jobs(programs, num_workers, num_servers, tmp_path)
    whole = tmp_path / "whole"
    jobs.run(str(whole), *EVERY)
    for number in range(pick(short=1, long=10)):
        killed = tmp_path / f"killed{number}"
        kill_at = random.randint(1, EPOCHS * NUM_BATCHES)
        print(f"seed {SEED}: killed at step {kill_at}")
        jobs.kill_at(kill_at, str(killed), *EVERY)
        jobs.run(str(killed), *EVERY)
        assert_same(complete(killed)[-1], complete(whole)[-1])


@pytest.mark.parametrize(("num_workers", "num_servers"), [(2, 2)])
def test_async_loses_and_repeats_no_batch(
    programs: Template, tmp_path: Path, num_workers: int, num_servers: int
) -> None:
    random = Random(f"{SEED} async")
    jobs = Jobs(programs, num_workers, num_servers, tmp_path)
    arguments = ("--mode", "async", "--rule", "count", "--every_steps", "1")
    for number in range(pick(short=1, long=20)):
        folder = tmp_path / str(number)
        kill_at = random.randint(2, NUM_BATCHES)
        print(f"seed {SEED}: killed at step {kill_at}")
        jobs.kill_at(kill_at, str(folder), *arguments)
        jobs.run(str(folder), *arguments)
        assert counts(complete(folder)[-1]) == expected_counts(num_workers)


@pytest.mark.parametrize("mode", pick(short=["sync"], long=["sync", "bounded", "hybrid"]))
@pytest.mark.parametrize("before", pick(short=["async"], long=["async", "bounded", "hybrid"]))
def test_another_mode_continues_without_loss_or_repetition(
    programs: Template, tmp_path: Path, before: str, mode: str
) -> None:
    random = Random(f"{SEED} {before} {mode}")
    jobs = Jobs(programs, 2, 2, tmp_path)
    for number in range(pick(short=1, long=5)):
        folder = tmp_path / str(number)
        arguments = (str(folder), "--rule", "count", "--every_steps", "1")
        kill_at = random.randint(2, NUM_BATCHES)
        print(f"seed {SEED}: killed at step {kill_at}")
        jobs.kill_at(kill_at, "--mode", before, *arguments)
        jobs.run("--mode", mode, *arguments)
        assert shows(complete(folder)[-1]) == expected_shows(2)


def stop_at(jobs: Jobs, folder: Path, worker: int, step: int, *arguments: str) -> None:
    """SIGTERM to one worker when it has made so many steps: all stop, and end well."""
    with jobs.started(str(folder), *arguments) as (workers, servers):
        workers[worker].wait_line(f"^step {step}$")
        workers[worker].signal(signal.SIGTERM)
        for program in workers:
            assert program.finish() == 0, program.output
            assert "done" not in program.output.splitlines()
        for server in servers:
            server.wait_line("all workers have said goodbye")
    assert len(complete(folder)) == 1


@pytest.mark.parametrize(
    ("num_workers", "num_servers"), pick(short=[(1, 2), (3, 2)], long=[(1, 2), (2, 1), (3, 2)])
)
def test_stopped_and_resumed_equals_never_stopped(
    programs: Template, tmp_path: Path, num_workers: int, num_servers: int
) -> None:
    random = Random(f"{SEED} stop {num_workers}")
    jobs = Jobs(programs, num_workers, num_servers, tmp_path)
    whole = tmp_path / "whole"
    jobs.run(str(whole), *NEVER)
    for number in range(pick(short=1, long=10)):
        stopped = tmp_path / f"stopped{number}"
        worker, step = draw_stop(random, num_workers)
        stop_at(jobs, stopped, worker, step, *NEVER)
        jobs.run(str(stopped), *NEVER)
        assert_same(complete(stopped)[-1], complete(whole)[-1], versions=False)


def test_sigterm_at_all_processes_at_once_leaves_a_checkpoint(
    programs: Template, tmp_path: Path
) -> None:
    """As of a scheduler that ends a job: servers wait for workers that have got it too."""
    jobs, folder = Jobs(programs, 2, 2, tmp_path), tmp_path / "stopped"
    with jobs.started(str(folder), *NEVER, "--epochs", "20") as (workers, servers):
        workers[1].wait_line("^step 3$")
        for program in (*servers, *workers):
            program.signal(signal.SIGTERM)
        assert [program.finish() for program in workers] == [0, 0], workers[0].output
        for server in servers:
            server.wait_line("all workers have said goodbye")
    assert len(complete(folder)) == 1


def draw_stop(random: Random, num_workers: int) -> tuple[int, int]:
    """A worker and a step of it that is not one of its last."""
    worker = random.randrange(num_workers)
    step = random.randint(1, EPOCHS * (NUM_BATCHES - 6 * worker) - 10)
    print(f"seed {SEED}: worker {worker} is told to stop at its step {step}")
    return worker, step


@pytest.mark.parametrize("killed", pick(short=[0], long=[0, 1]))
def test_a_killed_server_does_not_make_stopping_workers_diverge(
    programs: Template, tmp_path: Path, killed: int
) -> None:
    random = Random(f"{SEED} stop and kill {killed}")
    jobs = Jobs(programs, 2, 2, tmp_path)
    whole = tmp_path / "whole"
    jobs.run(str(whole), *NEVER)
    for number in range(pick(short=1, long=10)):
        stopped = tmp_path / f"stopped{number}"
        worker, step = draw_stop(random, 2)
        (folder := tmp_path / f"servers{number}").mkdir()
        with (
            DurableServers(programs, 2, tmp_path, state=folder) as servers,
            jobs.joined(servers.addresses, str(stopped), *NEVER) as workers,
        ):
            workers[worker].wait_line(f"^step {step}$")
            if is_first := random.random() < 0.5:
                servers.kill(killed)
            workers[worker].signal(signal.SIGTERM)
            if not is_first:
                servers.kill(killed)
            servers.start(killed)
            assert [program.finish() for program in workers] == [0, 0]
        assert len(complete(stopped)) == 1
        jobs.run(str(stopped), *NEVER)
        assert_same(complete(stopped)[-1], complete(whole)[-1], versions=False)


@pytest.mark.timeout(300)  # processes that are restarted
def test_a_worker_killed_during_a_stop_stops_at_the_same_step(
    programs: Template, tmp_path: Path
) -> None:
    random = Random(f"{SEED} stop and succeed")
    jobs = Jobs(programs, 2, 2, tmp_path)
    arguments = (*NEVER, "--epochs", "20")
    for number in range(pick(short=2, long=20)):
        stopped, worker, step = tmp_path / f"stopped{number}", number % 2, random.randint(1, 30)
        (folder := tmp_path / f"servers{number}").mkdir()
        print(f"seed {SEED}: worker {worker} is told to stop at its step {step}")
        with (
            DurableServers(programs, 2, tmp_path, state=folder) as servers,
            jobs.joined(servers.addresses, str(stopped), *arguments) as workers,
        ):
            workers[worker].wait_line(f"^step {step}$")
            workers[worker].signal(signal.SIGTERM)
            workers[1 - worker].kill()
            with jobs.worker(1 - worker, servers.addresses, str(stopped), *arguments) as successor:
                assert (workers[worker].finish(), successor.finish()) == (0, 0)
        [taken] = complete(stopped)
        manifest = json.loads((taken / "manifest.json").read_text())["manifest"]
        (_, _, longer), (_, _, shorter) = sorted(manifest["streams"])
        epoch, num_batches = longer[:2]
        assert shorter[:2] == [epoch, min(num_batches, NUM_BATCHES - 6)]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_all_workers_stop_when_one_gets_sigterm(
    programs: Template, tmp_path: Path, mode: str
) -> None:
    random = Random(f"{SEED} stop {mode}")
    jobs = Jobs(programs, 2, 1, tmp_path)
    # Enough epochs for the signal to arrive.
    arguments = ("--mode", mode, "--rule", "count", "--every_steps", "100000")
    worker, step = random.randrange(2), random.randint(1, NUM_BATCHES // 2)
    print(f"seed {SEED}: worker {worker} stopped at step {step}")
    stop_at(jobs, tmp_path / "ckpt", worker, step, "--epochs", "10000", *arguments)
    [stopped] = complete(tmp_path / "ckpt")
    num_epochs = checkpoint_note(stopped)["num_epochs"] + 1
    jobs.run(str(tmp_path / "ckpt"), "--epochs", str(num_epochs), *arguments)
    last = complete(tmp_path / "ckpt")[-1]
    assert checkpoint_note(last)["num_epochs"] == num_epochs
    if mode == "async":  # in sync, keys of both workers' batches count once
        assert counts(last) == expected_counts(2, num_epochs)


def checkpoint_note(path: Path) -> dict[str, Any]:
    """What a fit has said of itself in a checkpoint."""
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    return dict(manifest["extra"]["user"])


def expected_counts(num_workers: int, epochs: int = EPOCHS) -> dict[int, int]:
    """How often each key is in a batch."""
    actual = Counter[int]()
    for epoch in range(epochs):
        for worker in range(num_workers):
            for batch in Unequal().stream(worker, num_workers, epoch=epoch):
                actual.update(set(batch["a"].values.tolist()) | set(batch["b"].values.tolist()))
    return dict(actual)


def counts(path: Path) -> dict[int, int]:
    """Updates of each key in a checkpoint of the rule Count."""
    with embedded(threads=1) as cluster:
        trainer = make_trainer("async", model_of("count"), cluster=cluster)
        trainer.load(path)
        keys = _core.unique(np.arange(1000, dtype=np.uint64), cluster.pool)[0]
        rows = cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()
        assert np.array_equal(rows, rows[:, :1].repeat(rows.shape[1], 1))
        return {
            key: int(count)
            for key, count in zip(keys.tolist(), rows[:, 0].tolist(), strict=True)
            if count
        }


def expected_shows(num_workers: int) -> dict[int, int]:
    """How many examples of all batches have each key of feature a."""
    actual = Counter[int]()
    for epoch in range(EPOCHS):
        for worker in range(num_workers):
            for batch in Unequal().stream(worker, num_workers, epoch=epoch):
                ids = batch["a"]
                actual.update(ids.values[ids.offsets[0] : ids.offsets[-1]].tolist())
    return dict(actual)


def shows(path: Path) -> dict[int, int]:
    """The shows of each row in a checkpoint: every mode adds up those of all pushes."""
    with embedded(threads=1) as cluster:
        trainer = make_trainer("async", model_of("count"), cluster=cluster)
        trainer.load(path)
        keys = np.arange(1000, dtype=np.uint64)
        rows = cluster.client.pull({RowClassId("scored"): keys}).rows[RowClassId("scored")].numpy()
        return {key: int(count) for key, count in enumerate(rows[:, 0].tolist()) if count}
