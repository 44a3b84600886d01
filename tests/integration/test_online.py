"""`trireme stream`: days of a service that changes, killed and gone on with, served meanwhile."""

from __future__ import annotations

import json
import random
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.integration.saved_rows import saved_rows
from tests.programs import Template
from trireme.data.planted_days import write_days
from trireme.train.donefiles import BASES, DELTAS, DoneFiles, Point

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
    arguments = ["-m", "trireme.cli", *start, *command(*overrides)]
    return programs.run(place, arguments, code=code, wait_s=110.0)


def points(of: Path) -> list[Point]:
    return [entry.point for entry in DoneFiles(str(of / "models")).checkpoints()]


def test_days_are_trained_on_and_published(undisturbed: tuple[Path, str]) -> None:
    place, output = undisturbed
    assert points(place) == [
        point for day, after in zip(DAYS, (*DAYS[1:], END), strict=True)
        for point in (Point(day, 2), Point(after, 0))
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
    aucs = [float(found) for found in re.findall(r"before: .*?auc ([\d.]+)", output)]
    assert len(aucs) == len(DAYS) * PASSES
    assert np.mean(aucs[-3:]) > max(aucs[0], 0.5) + 0.05, aucs
    assert "no effect" not in output
    assert f"stream: {len(aucs)} passes done; up to runner.end_day {DAYS[-1]} all is" in output


def test_a_killed_run_ends_with_the_same_bytes(
    place: Path, undisturbed: tuple[Path, str], programs: Template
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    _run_until_killed(programs, place, rng.randint(1, 3), rng.uniform(0.0, 1.5))
    output = run(programs, place)
    assert "going on behind pass" in output
    assert set(points(place)) == set(points(undisturbed[0]))
    ends = [folder / "models" / END / "0" for folder in (undisturbed[0], place)]
    expected, found = (saved_rows(end) for end in ends)
    assert expected.keys() == found.keys() == {"embedding"}
    for column, values in expected["embedding"].items():
        if column != "version":  # counts exports, some of which were made twice
            np.testing.assert_array_equal(found["embedding"][column], values, err_msg=column)


def _run_until_killed(programs: Template, place: Path, num_lines: int, delay_s: float) -> None:
    """Kill the run `delay_s` after donefile.txt has so many lines."""
    arguments = ["-m", "trireme.cli", "stream", *command()]
    with programs.start("stream", arguments, {}, folder=place) as program:
        pause = threading.Event()
        for _ in range(2000):
            if len(points(place)) >= num_lines or program.has_ended:
                break
            pause.wait(0.05)
        pause.wait(delay_s)
        program.kill()


def test_a_job_streams_as_one_process_does(place: Path, programs: Template) -> None:
    launch = ("launch", "--server_num", "2", "--worker_num", "2", "--stream")
    output = run(programs, place, f"runner.end_day={DAYS[0]}", start=launch)
    assert points(place) == [Point(DAYS[0], 2), Point(DAYS[1], 0)]
    assert output.count("before:") == PASSES
    again = run(programs, place, start=launch)
    assert f"going on behind pass {DAYS[1]}/0" in again
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
    assert f"going on behind pass {DAYS[-1]}/2" in output
    assert points(place)[-1] == Point(END, 0)


def test_data_that_does_not_come_is_an_error(place: Path, programs: Template) -> None:
    when = ["runner.start_day=20200101", "runner.end_day=20200101"]
    waits = ["runner.data_sleep_second=0.1", "runner.data_timeout_second=0.5"]
    output = run(programs, place, *when, *waits, code=1)
    assert (
        "20200101/0000 to 20200101/0400, each with data.done): expected its data within 0.5 s"
        in output
    )
