"""`trireme stream`: days of changing data, with kills and resumes, while exports are served."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from examples.planted.days import write_days
from tests.integration.saved_rows import saved_rows
from tests.programs import Program, Template
from trireme.train.online.donefiles import BASES, DELTAS, STOPPED, DoneFiles, PassPoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "online.yaml"
DAYS = ("20190720", "20190721")
END = "20190722"
PASSES = 3  # of a day
SMALL = [
    "runner.train_data_dir=days",
    "runner.model_save_path=models",
    f"runner.end_day={DAYS[-1]}",
    "runner.split_interval=240",
    "runner.prefetch=True",
    "runner.seed=1",
    "runner.sync_mode=sync",
    "runner.checkpoint_per_pass=2",
    "runner.save_delta_frequency=1",
    "runner.checkpoint_keep=100",
    "hyper_parameters.optimizer.learning_rate=5e-3",
    "runner.train_batch_size=128",
]


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "days"
    written = write_days(
        folder, start=DAYS[0], days=len(DAYS), minutes=240, num_examples=400, seed=3
    )
    assert len(list(written)) == 6 * len(DAYS)
    return folder


@pytest.fixture
def place(tmp_path: Path, days: Path) -> Path:
    """A folder with the configuration of the example and the days."""
    return prepared(tmp_path, days)


def prepared(folder: Path, days: Path) -> Path:
    shutil.copy(EXAMPLE, folder / "online.yaml")
    (folder / "days").symlink_to(days)
    return folder


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, days: Path, programs: Template
) -> tuple[Path, str]:
    """Where a run has come to its end, and what it said."""
    place = prepared(tmp_path_factory.mktemp("undisturbed"), days)
    return place, run(programs, place)


def command(*overrides: str) -> list[str]:
    return ["-m", "online.yaml", "-o", *SMALL, *overrides]


def run(
    programs: Template,
    place: Path,
    *overrides: str,
    start: tuple[str, ...] = ("stream",),
    code: int = 0,
) -> str:
    arguments = ["-m", "trireme", *start, *command(*overrides)]
    return programs.run(place, arguments, code=code, wait_s=110.0)


def points(folder: Path) -> list[PassPoint]:
    return [entry.point for entry in DoneFiles(str(folder / "models")).checkpoints()]


def test_days_are_trained_on_and_published(undisturbed: tuple[Path, str]) -> None:
    place, output = undisturbed
    assert points(place) == [
        point for day, after in zip(DAYS, (*DAYS[1:], END), strict=True)
        for point in (PassPoint(day, 2), PassPoint(after, 0))
    ]  # fmt: skip
    done = DoneFiles(str(place / "models"))
    bases = [Path(entry.path) for entry in done.exports(BASES)]
    deltas = [Path(entry.path) for entry in done.exports(DELTAS)]
    names = [str(path.relative_to(place / "models")) for path in (*bases, *deltas)]
    assert names == [
        "20190720/base", "20190721/base", "20190722/base",
        *(f"{day}/delta-{number}" for day in DAYS for number in range(1, PASSES + 1)),
    ]  # fmt: skip
    assert all(path.is_dir() for path in (*bases, *deltas))
    keys = {entry.key for entry in done.exports(DELTAS)}
    assert keys <= {entry.id for entry in done.exports(BASES)}
    lines = (place / "models" / DELTAS).read_text().splitlines()
    assert "auc:" in json.loads(lines[-1])["monitor_data"]
    aucs = [float(actual) for actual in re.findall(r"before: .*?auc ([\d.]+)", output)]
    assert len(aucs) == len(DAYS) * PASSES
    assert np.mean(aucs[-3:]) > max(aucs[0], 0.5) + 0.05, aucs
    assert "no effect" not in output
    assert f"stream: {len(aucs)} passes done, up to runner.end_day {DAYS[-1]}" in output


def test_a_killed_run_ends_with_the_same_bytes(
    place: Path, undisturbed: tuple[Path, str], programs: Template
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    _run_until_killed(programs, place, rng.randint(1, 3), rng.uniform(0.0, 1.5))
    output = run(programs, place)
    assert "continuing after pass" in output
    assert set(points(place)) == set(points(undisturbed[0]))
    assert_same_end(place, undisturbed[0])


def _run_until_killed(programs: Template, place: Path, num_lines: int, delay_s: float) -> None:
    """Kill the run `delay_s` after donefile.txt has so many lines."""
    arguments = ["-m", "trireme", "stream", *command()]
    with programs.start("stream", arguments, {}, folder=place) as program:
        pause = threading.Event()
        for _ in range(2000):
            if len(points(place)) >= num_lines or program.has_ended:
                break
            pause.wait(0.05)
        pause.wait(delay_s)
        program.kill()


def start(programs: Template, place: Path, *overrides: str, **env: str) -> Program:
    """A process, to be stopped."""
    arguments = ["-m", "trireme", "stream", *command(*overrides)]
    return programs.start("stream", arguments, env, folder=place)


@contextmanager
def job(programs: Template, place: Path, *overrides: str) -> Iterator[list[Program]]:
    """Two workers of a server."""
    root, server = {"TRIREME_ROOT": str(place)}, ["-m", "trireme", "server"]
    with ExitStack() as stack:
        started = programs.start("server", [*server, "--listen", "127.0.0.1:0"], root)
        address = stack.enter_context(started).wait_line(r"^listening on (\S+)")[1]
        env = {"TRIREME_SERVERS": address, "TRIREME_NUM_WORKERS": "2", "TRIREME_ROLE": "worker"}
        yield [
            stack.enter_context(start(programs, place, *overrides, TRIREME_INDEX=i, **env, **root))
            for i in ("0", "1")
        ]


def stop(program: Program, *others: Program) -> str:
    """SIGTERM to one of a job; all end well. Returns what the one has said."""
    program.signal(signal.SIGTERM)
    for process in (program, *others):
        assert process.finish() == 0, process.output
    return program.output


def assert_same_end(actual: Path, expected: Path, day: str = END) -> None:
    ends = [saved_rows(folder / "models" / day / "0") for folder in (expected, actual)]
    assert ends[0].keys() == ends[1].keys() == {"embedding"}
    for column, values in ends[0]["embedding"].items():
        if column != "version":  # counts saves, of which a stop makes one more
            np.testing.assert_array_equal(ends[1]["embedding"][column], values, err_msg=column)


def passes_said(*outputs: str) -> list[str]:
    return re.findall(r"stream: pass (\d+/\d+): before:", "".join(outputs))


ALL_PASSES = [f"{day}/{number}" for day in DAYS for number in range(1, PASSES + 1)]


# What a run prints that was stopped within a pass. A slow one may reach the checkpoint at its end.
WITHIN = "training has stopped after a step, with a checkpoint"


@pytest.mark.timeout(300)  # four runs or more
def test_a_stopped_run_resumes_within_its_pass(
    programs: Template, place: Path, undisturbed: tuple[Path, str]
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    outputs: list[str] = []
    was_within = False
    while sum(WITHIN in output for output in outputs) < 2:
        assert len(outputs) < 5, outputs
        with start(programs, place, "runner.print_interval=1") as program:
            for _ in range(rng.randint(1, 8)):  # seven a pass, of six
                program.wait_line(r"batch \d+")
            outputs.append(stop(program))
        assert ("stream: continuing within pass" in outputs[-1]) == was_within
        was_within = WITHIN in outputs[-1]
        assert was_within or "stopped where a checkpoint stands" in outputs[-1]
        if was_within:
            assert (place / "models" / STOPPED).read_text()
    outputs.append(run(programs, place))
    assert "stream: continuing within pass" in outputs[-1]
    assert passes_said(*outputs) == ALL_PASSES
    assert_same_end(place, undisturbed[0])
    assert points(place) == points(undisturbed[0])
    assert not (place / "models" / STOPPED).read_text(), "there are newer checkpoints"
    assert not [*(place / "models" / "stopped").glob("*")]


@pytest.mark.timeout(300)  # and the undisturbed run
def test_a_run_stopped_while_waiting_resumes_after_its_last_pass(
    programs: Template, tmp_path: Path, days: Path, undisturbed: tuple[Path, str]
) -> None:
    place = prepared(tmp_path, days)
    (place / "days").unlink()
    shutil.copytree(days / DAYS[0], place / "days" / DAYS[0])
    missing = place / "days" / DAYS[0] / "1200"  # of the second pass
    missing.rename(tmp_path / "later")
    seldom = ("runner.checkpoint_per_pass=100", "runner.prefetch=False")
    with start(programs, place, *seldom, "runner.data_sleep_second=600") as program:
        program.wait_line(f"waiting for the data of pass {DAYS[0]}/2")
        first = stop(program)
    assert "stopped between two passes, with a checkpoint" in first
    assert points(place) == []
    (tmp_path / "later").rename(missing)
    second = run(programs, place, *seldom, f"runner.end_day={DAYS[0]}")
    assert f"stream: continuing after pass {DAYS[0]}/1" in second
    assert passes_said(first, second) == ALL_PASSES[:PASSES]
    assert_same_end(place, undisturbed[0], DAYS[1])


@pytest.mark.timeout(300)  # three jobs
def test_a_stopped_and_resumed_job_ends_like_an_undisturbed_one(
    programs: Template, tmp_path: Path, days: Path
) -> None:
    for name in ("stopped", "alone"):
        (tmp_path / name).mkdir()
    stopped, alone = (prepared(tmp_path / name, days) for name in ("stopped", "alone"))
    one_day = f"runner.end_day={DAYS[0]}"
    with job(programs, stopped, one_day, "runner.print_interval=1") as workers:
        for _ in range(random.randint(1, 5)):  # of four a pass
            workers[0].wait_line(r"batch \d+")
        first = stop(*random.sample(workers, 2)) and workers[0].output
    with job(programs, stopped, one_day) as workers:
        assert [worker.finish() for worker in workers] == [0, 0]
        assert passes_said(first, workers[0].output) == ALL_PASSES[:PASSES]
    with job(programs, alone, one_day) as workers:
        assert [worker.finish() for worker in workers] == [0, 0]
    assert_same_end(stopped, alone, DAYS[1])


def test_a_stop_that_cannot_be_resumed_is_skipped(
    programs: Template, tmp_path: Path, days: Path
) -> None:
    place = prepared(tmp_path, days)
    one_day = (f"runner.end_day={DAYS[0]}", "runner.checkpoint_per_pass=1")
    with job(programs, place, *one_day, "runner.print_interval=1") as workers:
        workers[0].wait_line(f"pass {DAYS[0]}/1: before")
        workers[0].wait_line(r"batch \d+")
        stop(*workers)
    assert "within" in (place / "models" / STOPPED).read_text()
    output = run(programs, place, *one_day)  # of one worker
    assert "going further back: Trainer.resume: expected 2 workers" in output
    assert f"continuing after pass {DAYS[0]}/1" in output
    assert passes_said(output) == ALL_PASSES[1:PASSES]
    assert not (place / "models" / STOPPED).read_text()


def test_a_job_streams_as_one_process_does(place: Path, programs: Template) -> None:
    launch = ("launch", "--server_num", "2", "--worker_num", "2", "--stream")
    output = run(programs, place, f"runner.end_day={DAYS[0]}", start=launch)
    assert points(place) == [PassPoint(DAYS[0], 2), PassPoint(DAYS[1], 0)]
    assert output.count("before:") == PASSES
    again = run(programs, place, start=launch)
    assert f"continuing after pass {DAYS[1]}/0" in again
    assert again.count("before:") == PASSES


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    place: Path, undisturbed: tuple[Path, str], programs: Template
) -> None:
    shutil.copytree(undisturbed[0] / "models", place / "models")
    listed = (place / "models" / "donefile.txt").read_text()
    moved = listed.replace(str(undisturbed[0]), str(place))
    (place / "models" / "donefile.txt").write_text(moved)
    for name in (BASES, DELTAS):
        path = place / "models" / name
        path.write_text(path.read_text().replace(str(undisturbed[0]), str(place)))
    (place / "models" / END / "0" / "manifest.json").write_text("{}")
    output = run(programs, place)
    assert "cannot be loaded, trying the one before" in output
    assert f"continuing after pass {DAYS[-1]}/2" in output
    assert points(place)[-1] == PassPoint(END, 0)


def test_data_that_does_not_come_is_an_error(place: Path, programs: Template) -> None:
    when = ["runner.start_day=20200101", "runner.end_day=20200101"]
    waits = ["runner.data_sleep_second=0.1", "runner.data_timeout_second=0.5"]
    output = run(programs, place, *when, *waits, code=1)
    assert (
        "20200101/0000 to 20200101/0400, each with data.done): expected its data within 0.5 s"
        in output
    )
