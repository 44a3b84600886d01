"""Scripts with loops of their own, and scripts that are interrupted, in real processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conditions import WAIT_S
from tests.integration.saved_rows import saved_rows
from tests.programs import Template
from tests.repo import tree

HERE = Path(__file__).parent


def launch(programs: Template, folder: Path, script: str, *arguments: str) -> list[str]:
    """What the workers print, of all of them."""
    command = ["-m", "trireme", "launch", "--server_num", "1", "--worker_num", "2"]
    printed = programs.run(folder, [*command, str(HERE / script), *arguments])
    second = (folder / "log" / "workerlog.1").read_text()
    return [*printed.splitlines(), *second.splitlines()]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_loop_of_ones_own_stops_on_all_workers_and_resumes(
    mode: str, programs: Template, tmp_path: Path
) -> None:
    lines = launch(programs, tmp_path, "own_loop.py", str(tmp_path / "saved"), mode)
    ours = [line for line in dict.fromkeys(lines) if line.startswith(("epoch", "stopped"))]
    figures = {0: [], 1: []}
    for line in ours:
        word, worker, *rest = line.split()
        figures[int(worker)].append((word, *rest))
    assert figures[0] == figures[1]
    assert figures[0][-1][0] == "stopped"
    num_epochs = int(figures[0][-1][1])
    assert 2 < num_epochs < 20
    assert [int(rest[0]) for word, *rest in figures[0][:-1]] == list(range(num_epochs))
    assert float(figures[0][-2][-1]) > 0.8  # the AUC: the script learns
    middles = [line.split() for line in dict.fromkeys(lines) if line.startswith("middle")]
    for epoch in range(num_epochs):
        losses = {middle[3] for middle in middles if int(middle[2]) == 8 * epoch + 4}
        assert len(losses) == 1
    again = launch(programs, tmp_path, "own_loop.py", str(tmp_path / "saved"), mode)
    resumed = rf"resumed from .*/{num_epochs - 1} at epoch {num_epochs + 1}, step \d+"
    assert any(re.fullmatch(resumed, line) for line in again)
    assert any(line.startswith(f"epoch 0 {num_epochs} ") for line in again)


@pytest.mark.parametrize("mode", ["sync", "bounded", "async"])
def test_a_loop_that_counts_by_the_optimizer_evaluates_with_the_others_after_a_kill(
    mode: str, programs: Template, tmp_path: Path
) -> None:
    command = ["-m", "trireme", "launch", "--server_num", "1", "--worker_num", "2"]
    command += ["--max_restart", "1", str(HERE / "killed_in_a_loop.py"), mode]
    programs.run(tmp_path, command)
    assert (tmp_path / "killed").exists()
    logs = [(tmp_path / "log" / f"workerlog.{number}").read_text() for number in (0, 1)]
    evaluated = [re.findall(r"^at (\d+) (.*)$", log, re.MULTILINE) for log in logs]
    assert [int(step) for step, _ in evaluated[0]] == list(range(5, 45, 5))
    # The successor has no figures of the epochs that were over.
    assert evaluated[1][-4:] == evaluated[0][-4:]


def test_the_page_shows_the_loop() -> None:
    page = (tree.ROOT / "docs/loops.md").read_text()
    _, script = (HERE / "own_loop.py").read_text().split('"""\n\n')
    assert script in page


def test_ctrl_c_takes_a_checkpoint_and_the_next_start_resumes(
    programs: Template, tmp_path: Path
) -> None:
    arguments = [str(HERE / "interrupted.py"), str(tmp_path / "saved"), "300"]
    with programs.start("training", arguments, {}, folder=tmp_path) as training:
        for _ in range(3):
            training.wait_line("step")
        training.signal(signal.SIGINT)
        training.wait_line("training ends after this step; Ctrl-C again interrupts it at once")
        training.wait_line(
            "worker 0 has got SIGINT: training has stopped after a step, with a checkpoint"
        )
        assert training.finish() == 130
        assert "Traceback" not in training.output
    steps = training.output.count("step\n")
    printed = programs.run(tmp_path, arguments)
    assert re.search(rf"resumed from {tmp_path}/saved/\S+ at epoch 1, step {steps}\n", printed)
    assert "done 2 600" in printed
    assert printed.count("step\n") == 600 - steps


def test_a_fit_stops_early_and_keeps_the_best_alone_and_as_a_job(
    programs: Template, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    alone = programs.run(tmp_path / "alone", [str(HERE / "stopped_early.py")]).splitlines()
    lines = launch(programs, tmp_path, "stopped_early.py")
    for printed in (alone, lines):
        (ended,) = {line for line in printed if " epochs " in line and " best " in line}
        num_epochs, best_auc, path = ended.split()[0], *ended.split()[-2:]
        assert 2 < int(num_epochs) < 20
        assert float(best_auc) > 0.8  # the script learns
        assert best_auc in printed  # of the loaded model, on every worker
        assert Path(path, "manifest.json").exists()
    assert lines.count(best_auc) >= 2
    for folder in (tmp_path, tmp_path / "alone"):
        assert len(list((folder / "runs/1").iterdir())) == 1
        assert len(list((folder / "best").iterdir())) == 1


def test_the_page_of_callbacks_shows_the_script() -> None:
    page = (tree.ROOT / "docs/callbacks.md").read_text()
    _, script = (HERE / "stopped_early.py").read_text().split('"""\n\n')
    assert script in page


def test_lightning_runs_the_loop_alone_and_as_a_job(programs: Template, tmp_path: Path) -> None:
    example = tree.ROOT / "examples/lightning_loop.py"
    printed = programs.run(tmp_path, [str(example), "alone"])
    lines = launch(programs, tmp_path, str(example), "saved")
    aucs = [
        re.search(r"^(\d) .*'valid_auc': ([\d.]+)", line)
        for line in (*printed.splitlines(), *dict.fromkeys(lines))
    ]
    ended = [(int(match[1]), float(match[2])) for match in aucs if match is not None]
    assert [worker for worker, _ in ended] == [0, 0, 1]
    assert min(auc for _, auc in ended) > 0.6
    assert ended[1][1] == ended[2][1]
    assert (tmp_path / "alone/manifest.json").exists()
    assert (tmp_path / "saved/manifest.json").exists()


@pytest.mark.parametrize(("mode", "worker"), [("sync", 0), ("async", 1)])
def test_a_worker_that_was_killed_continues_with_its_callbacks(
    mode: str, worker: int, programs: Template, tmp_path: Path
) -> None:
    command = ["-m", "trireme", "launch", "--server_num", "1", "--worker_num", "2"]
    command += ["--max_restart", "1", str(HERE / "killed_once.py"), mode, str(worker)]
    programs.run(tmp_path, command)
    assert (tmp_path / "killed").exists()
    logs = [(tmp_path / "log" / f"workerlog.{number}").read_text() for number in (0, 1)]
    ends = [re.findall(r"^ended \d (.*)$", log, re.MULTILINE) for log in logs]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 1
    num_epochs, _, _, path = ends[0][0].split()
    assert Path(path, "manifest.json").exists()
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    epochs = [event.value for event in events.Scalars("epoch")]
    assert epochs == list(range(1, int(num_epochs) + 1))


@pytest.mark.parametrize(
    ("how", "ends", "code"),
    [("next", "steps 21", 0), ("exit", "steps 1", 0), ("error", "ValueError: a mistake", 1)],
)
def test_a_loop_whose_iterator_is_kept_ends_with_the_script_or_by_close(
    how: str, ends: str, code: int
) -> None:
    command = [sys.executable, "-u", str(HERE / "left_early.py"), how]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, **streams, text=True, timeout=WAIT_S, check=False)
    printed = done.stdout.splitlines()
    assert (done.returncode, printed[-1]) == (code, ends), printed
    assert any("close its iterator, batches.close()" in line for line in printed) == (how == "next")


APPENDED = "for i in $(seq 400 449); do echo 1 0 1 $i; done > part-2"


@pytest.mark.parametrize(
    ("worker", "change", "options", "what"),
    [
        (0, APPENDED, (), "part-2 of 500 bytes"),
        (1, APPENDED, ("--streams", "3"), "part-2 of 500 bytes"),
        (0, "rm part-0", (), "found part-1 of 2000 bytes"),
        (1, "sed -i '$s/299/999/' part-0", (), "examples would be lost or repeated"),
        (1, "touch part-0", (), ""),
    ],
)
def test_a_restarted_worker_trains_each_example_once_or_names_the_files_that_changed(
    worker: int,
    change: str,
    options: tuple[str, ...],
    what: str,
    programs: Template,
    tmp_path: Path,
) -> None:
    for part in range(2):
        keys = range(200 * part + 100, 200 * part + 300)
        (tmp_path / f"part-{part}").write_text("".join(f"1 0 1 {key}\n" for key in keys))
    command = ["-m", "trireme", "launch", "--server_num", "1", "--worker_num", "2", *options]
    command += ["--max_restart", "1", str(HERE / "killed_when_files_change.py")]
    output = programs.run(tmp_path, [*command, str(worker), change], code=1 if what else 0)
    assert (tmp_path / "killed").exists()
    if what:
        assert "expected the data with which it was begun, part-0 of 2000 bytes" in output
        assert what in output
        return
    rows = saved_rows(tmp_path / "saved")["ids"]
    assert rows["key"].tolist() == list(range(100, 500))
    assert set(rows["weights"].ravel().tolist()) == {1.0}
