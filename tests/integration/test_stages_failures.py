"""Stages whose compute workers die, are slow or differ: nothing is lost or applied twice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.integration.heter_jobs import STAGES_SCRIPT, HeterJob, alone
from tests.programs import Template
from tests.seeds import SEED

OPTIONS: dict[str, Any] = {"dropout": 0.3, "norm": True, "lengths": [6]}
MIDDLE = ["cpu", "gpu", "cpu_2"]


def test_a_compute_worker_that_dies_in_backward_is_replaced(programs: Template) -> None:
    expected = alone(programs, OPTIONS, path=STAGES_SCRIPT)
    options = {**OPTIONS, "waits": {"worker": [], "heter": ["gpu"]}}
    with HeterJob(
        programs, OPTIONS, path=STAGES_SCRIPT, labels=["gpu", "gpu"], compute_options=options
    ) as job:
        first, second = job.compute
        for _ in range(3):  # forward, backward and again forward
            first.wait_line("(for|back)ward gpu")
            first.send("")
        first.wait_line("backward gpu")
        first.kill()
        for _ in range(2 + 2 * 4):  # of the second batch anew, and of those after
            second.wait_line("(for|back)ward gpu")
            second.send("")
        [result] = job.results()
    assert result == expected


def test_a_compute_worker_that_has_lost_the_graph_computes_it_again(programs: Template) -> None:
    expected = alone(programs, OPTIONS, path=STAGES_SCRIPT)
    options = {**OPTIONS, "waits": {"worker": ["cpu_2"], "heter": []}}
    with HeterJob(programs, options, path=STAGES_SCRIPT, labels=["gpu"]) as job:
        [worker] = job.workers
        for number in range(6):
            worker.wait_line("forward cpu_2")
            if number == 3:
                job.compute[0].kill()
                job.compute[0] = job.start_compute(0)
                job.compute[0].wait_line("computes on")
            worker.send("")
            worker.wait_line("backward cpu_2")
            worker.send("")
        [result] = job.finish()
    assert result == expected


@pytest.mark.parametrize("stages", [MIDDLE, ["cpu", "gpu"], ["cpu", "gpu", "cpu_2", "gpu_2"]])
def test_random_kills_lose_nothing_and_apply_nothing_twice(
    stages: list[str], programs: Template
) -> None:
    generator = random.Random(f"{SEED} {stages}")
    options = {**OPTIONS, "stages": stages, "lengths": [30]}
    expected = alone(programs, options, path=STAGES_SCRIPT)
    with HeterJob(programs, options, path=STAGES_SCRIPT, labels=["gpu", "gpu"]) as job:
        for number in sorted(generator.sample(range(3, 28), 6)):
            job.workers[0].wait_line(f"read {number}")
            index = generator.randrange(2)
            job.compute[index].kill()
            job.compute[index] = job.start_compute(index)
        [result] = job.finish()
    assert result == expected


def test_random_kills_in_async_push_each_batch_once(programs: Template) -> None:
    generator = random.Random(SEED)
    options = {**OPTIONS, "lengths": [30, 30], "strategy": {"mode": "async"}}
    with HeterJob(
        programs, options, path=STAGES_SCRIPT, labels=["gpu", "gpu"], num_workers=2
    ) as job:
        for number in sorted(generator.sample(range(3, 28), 6)):
            job.workers[generator.randrange(2)].wait_line(f"read {number}")
            index = generator.randrange(2)
            job.compute[index].kill()
            job.compute[index] = job.start_compute(index)
        results = job.finish()
    assert [result["steps"] for result in results] == [30, 30]
    assert results[0]["pushes"] == [60]


def test_while_a_stage_is_slow_no_more_batches_are_read_than_are_in_flight(
    programs: Template,
) -> None:
    options = {**OPTIONS, "lengths": [40], "threads": 3, "strategy": {"mode": "async"}}
    slow = {**options, "waits": {"worker": [], "heter": ["gpu"]}}
    with HeterJob(
        programs, options, path=STAGES_SCRIPT, labels=["gpu"], compute_options=slow
    ) as job:
        [worker], [compute] = job.workers, job.compute
        reads_max = 0
        for number in range(80):
            compute.wait_line("(for|back)ward gpu")
            num_read = worker.output.count("read ")
            reads_max = max(reads_max, num_read - number // 2)
            compute.send("")
        [result] = job.finish()
    assert result["steps"] == 40
    assert reads_max <= 3 + 8  # threads; depth, and what is pulled and planned


# ---- errors with names ----


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("forward", r"compute worker 0 \(gpu\): RuntimeError: the tower fell"),
        ("name", "stage 'gpu' to read what stage 'cpu' returns, x, half, .* it reads 'y'"),
        ("detach", "expected an output of stage 'gpu' that has a gradient"),
        ("model", r"runs another model: .*stage_gpu.layers.2.weight: none here"),
    ],
)
def test_what_is_wrong_at_a_compute_worker_is_an_error_with_names(
    wrong: str, message: str, programs: Template
) -> None:
    with HeterJob(programs, {"wrong": wrong}, path=STAGES_SCRIPT, labels=["gpu"]) as job:
        job.workers[0].wait_line(message)
        # Another model is a SchemaMismatch, which a worker that is started again would meet again.
        assert job.workers[0].finish() == (2 if wrong == "model" else 1)


@pytest.mark.parametrize(
    ("stages", "labels", "message"),
    [
        (["cpu", "npu", "cpu_2"], ["gpu"], "label 'npu' for stage 'npu', found those of gpu"),
        (["cpu", "cpu_2"], ["gpu"], "a stage for each label .* found none for gpu among cpu"),
    ],
)
def test_labels_of_stages_and_of_compute_workers_that_do_not_fit_are_named(
    stages: list[str], labels: list[str], message: str, programs: Template
) -> None:
    with HeterJob(programs, {"stages": stages}, path=STAGES_SCRIPT, labels=labels) as job:
        job.workers[0].wait_line(message)
        assert job.workers[0].finish() == 1
