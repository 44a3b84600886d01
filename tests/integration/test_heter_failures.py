"""Processes of a heterogeneous job are killed, stopped and wrong; nothing is lost or done twice."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.durable_servers import DurableServers
from tests.integration.heter_jobs import HeterJob, alone
from tests.programs import Template

OPTIONS: dict[str, Any] = {
    "strategy": {"mode": "sync"},
    "lengths": [60],
    "dropout": 0.3,
    "norm": True,
}


@pytest.fixture(scope="module")
def undisturbed(programs: Template) -> dict[str, Any]:
    return alone(programs, OPTIONS)


@pytest.mark.parametrize("kills", [[3, 10, 11, 30], [0, 1, 2, 50], [20, 21, 22, 23, 24, 25]])
def test_any_compute_worker_may_be_killed_at_any_moment(
    kills: list[int], undisturbed: dict[str, Any], programs: Template
) -> None:
    with HeterJob(programs, OPTIONS, num_compute=2) as job:
        for number, at in enumerate(kills):
            job.workers[0].wait_line(f"read {at}$")
            victim = number % 2
            job.compute[victim].kill()
            job.compute[victim] = job.start_compute(victim)
        [result] = job.finish()
    assert result == undisturbed


def test_worker_waits_for_the_only_compute_worker_that_is_started_again(
    undisturbed: dict[str, Any], programs: Template
) -> None:
    with HeterJob(programs, OPTIONS) as job:
        job.workers[0].wait_line("read 10$")
        job.compute[0].kill()
        job.workers[0].wait_line("compute worker .*: ")
        job.compute[0] = job.start_compute(0)
        [result] = job.finish()
    assert result == undisturbed


def test_the_job_goes_on_without_a_compute_worker_that_does_not_come_back(
    undisturbed: dict[str, Any], programs: Template
) -> None:
    with HeterJob(programs, OPTIONS, num_compute=3) as job:
        for index, at in enumerate((5, 25)):
            job.workers[0].wait_line(f"read {at}$")
            job.compute[index].kill()
        [result] = job.results()
        assert (job.workers[0].finish(), job.compute[2].finish()) == (0, 0)
    assert result == undisturbed


@pytest.mark.parametrize("at", [2, 30])
def test_a_killed_worker_is_continued_by_its_successor(at: int, programs: Template) -> None:
    options = {"strategy": {"mode": "sync"}, "lengths": [60]}
    expected = alone(programs, options)
    with HeterJob(programs, options, num_compute=2) as job:
        job.workers[0].wait_line(f"read {at}$")
        job.workers[0].kill()
        job.workers[0] = job.start_worker(0)
        [result] = job.finish()
    for name in ("weights", "rows", "pushes", "steps", "figures"):
        assert result[name] == expected[name], name


def test_a_killed_server_with_durability_loses_nothing(
    undisturbed: dict[str, Any], programs: Template, tmp_path: Path
) -> None:
    with (
        DurableServers(programs, 1, tmp_path) as servers,
        HeterJob(programs, OPTIONS, servers=servers.addresses, num_compute=2) as job,
    ):
        for at in (10, 35):
            job.workers[0].wait_line(f"read {at}$")
            servers.kill(0)
            servers.start(0)
        [result] = job.finish()
    for name in ("trained", "weights", "rows", "buffers", "figures", "random"):
        assert result[name] == undisturbed[name], name


def test_without_any_compute_worker_an_error_names_the_label_and_the_addresses(
    programs: Template,
) -> None:
    with HeterJob(programs, OPTIONS, num_compute=2, timeout_s=3.0) as job:
        job.workers[0].wait_line("read 5$")
        for one in job.compute:
            one.kill()
        error = job.workers[0].wait_line(r"^trireme.errors.DeadlineExceeded: (.*)")[1]
        assert job.workers[0].finish() == 1
    assert "compute workers of label cpu" in error
    for address in job.addresses:
        assert address in error


def test_an_error_of_the_model_names_the_compute_worker_and_is_not_repeated(
    programs: Template,
) -> None:
    wrong = {**OPTIONS, "wrong": "forward"}
    with HeterJob(programs, OPTIONS, compute_options=wrong, num_compute=2) as job:
        error = job.workers[0].wait_line(r"^trireme.errors.BadRequest: (.*)")[1]
        assert job.workers[0].finish() == 1
        assert "compute worker 0 (cpu): RuntimeError: the tower fell" in error
        assert "batch failed" not in job.compute[1].output
        assert not any(one.has_ended for one in job.compute)


def test_another_model_is_refused_with_the_parts_that_differ(programs: Template) -> None:
    wrong = {**OPTIONS, "wrong": "model"}
    with HeterJob(programs, OPTIONS, compute_options=wrong) as job:
        error = job.workers[0].wait_line(r"^trireme.errors.SchemaMismatch: (.*)")[1]
        assert job.workers[0].finish() == 2
    assert "compute worker 0 (cpu) runs another model: parameter top.5.weight: none here" in error
    assert "float32 (1, 1) there" in error


def test_another_autocast_is_refused(programs: Template) -> None:
    half = {**OPTIONS, "autocast": "bfloat16"}
    with HeterJob(programs, half, compute_options=OPTIONS) as job:
        error = job.workers[0].wait_line(r"^trireme.errors.SchemaMismatch: (.*)")[1]
        assert job.workers[0].finish() == 2
    assert "trainer autocast: torch.bfloat16 here, None there" in error


def test_a_loop_without_a_trainer_is_refused_at_a_compute_worker(programs: Template) -> None:
    wrong = {**OPTIONS, "wrong": "optimizer"}
    with HeterJob(programs, OPTIONS, compute_options=wrong) as job:
        job.compute[0].wait_line("BadRequest: DistributedOptimizer: expected a Trainer in compute")
        assert job.compute[0].finish() == 1


def test_sigterm_ends_a_compute_worker_and_its_batches_go_to_another(
    undisturbed: dict[str, Any], programs: Template
) -> None:
    with HeterJob(programs, OPTIONS, num_compute=2) as job:
        job.workers[0].wait_line("read 10$")
        job.compute[0].signal(signal.SIGTERM)
        job.compute[0].wait_line("^SIGTERM: ends in 9 s, or with the workers if these stop")
        job.compute[0].signal(signal.SIGTERM)  # at once
        job.compute[0].wait_line("compute worker 0 .* ends: stopped by SIGTERM")
        [result] = job.results()
        assert [one.finish() for one in (*job.workers, *job.compute)] == [0, 143, 0]
    assert result == undisturbed


def test_sigterm_at_a_worker_stops_the_job_with_a_checkpoint(
    programs: Template, tmp_path: Path
) -> None:
    options = {**OPTIONS, "lengths": [100_000], "checkpoint": str(tmp_path / "saved")}
    with HeterJob(programs, options) as job:
        job.workers[0].wait_line("read 10$")
        job.workers[0].signal(signal.SIGTERM)
        assert job.workers[0].finish() == 0
        assert job.compute[0].finish() == 0
    assert list((tmp_path / "saved").iterdir())


def test_sigterm_at_all_processes_at_once_leaves_a_checkpoint(
    programs: Template, tmp_path: Path
) -> None:
    """As of a scheduler that ends a job: compute workers wait for workers that have got it too."""
    options = {**OPTIONS, "lengths": [100_000] * 2, "checkpoint": str(tmp_path / "saved")}
    with (
        DurableServers(programs, 1, tmp_path, durability="none") as servers,
        HeterJob(programs, options, servers=servers.addresses, num_workers=2) as job,
    ):
        job.workers[0].wait_line("read 10$")
        for program in (*job.compute, servers.program(0)):
            program.signal(signal.SIGTERM)
            program.wait_line("SIGTERM: ends in")
        job.workers[1].signal(signal.SIGTERM)
        assert [worker.finish() for worker in job.workers] == [0, 0], job.workers[0].output
        job.compute[0].wait_line("ends: (all workers have left|stopped by SIGTERM)")
    assert list((tmp_path / "saved").iterdir())


def test_a_compute_worker_ends_with_an_error_when_no_coordinator_answers(
    programs: Template,
) -> None:
    with HeterJob(programs, OPTIONS, timeout_s=2.0) as job:
        job.workers[0].kill()
        job.compute[0].wait_line("computes on cpu")
        for server in job.job.servers:
            server.rpc.stop()
        job.compute[0].wait_line(r"Unavailable: compute worker 0 \(cpu\): no answer for 2 s")
        assert job.compute[0].finish() == 1
