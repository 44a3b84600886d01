"""Bad data at every entry point: a one-line error with file, line and value, a nonzero exit code,
and nothing half-written.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import trireme as tr
from tests.damaged_files import BROKEN_LINE, CASES, NUM_LINES, SCHEMAS, TEXT, Case, compressed, text
from tests.integration import damaged_model
from tests.integration.processes import clean_environment
from tests.long import sampled
from tests.programs import Template
from trireme import fleet
from trireme.commands import cli
from trireme.data import InMemoryDataset, QueueDataset
from trireme.errors import DataError
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.launch import environment
from trireme.storage.atomic_folder import OWNER

CONFIG = """
format: {format}
runner:
  train_data_dir: "{data}"
  train_batch_size: 50
  model_path: "{model}"
  model_save_path: "out"
"""
SCRIPT = """
import sys
import trireme as tr
sys.path.insert(0, {folder!r})
import damaged_model

tr.init()
recipe = damaged_model.create({{"format": "csv"}})
data = tr.data.QueueDataset({data!r}, schema=recipe.schema, batch_size=50)
trainer = tr.Trainer.from_recipe(recipe)
trainer.fit(data)
trainer.save({path!r})
"""
DUMPS = ["runner.need_train_dump=True", "runner.dump_fields=[output]", "runner.dump_fields_path=d"]


def the_queue(path: Path, schema: tr.data.Schema, **options: Any) -> Any:
    return QueueDataset(path, schema=schema, batch_size=50, **options).stream(0, 1)


def memory(path: Path, schema: tr.data.Schema, **options: Any) -> Any:
    dataset = InMemoryDataset(path, schema=schema, batch_size=50, **options)
    dataset.load_into_memory()
    return dataset.stream(0, 1)


def a_preload(path: Path, schema: tr.data.Schema) -> Any:
    dataset = InMemoryDataset(path, schema=schema, batch_size=50)
    dataset.preload_into_memory(thread_num=2)
    dataset.wait_preload_done()
    return dataset.stream(0, 1)


def fleets_queue(path: Path, schema: tr.data.Schema) -> Any:
    dataset = fleet.QueueDataset()
    dataset.init(batch_size=50, thread_num=2, schema=schema)
    dataset.set_filelist([str(path)])
    return dataset.stream(0, 1)


def fleets_memory(path: Path, schema: tr.data.Schema) -> Any:
    dataset = fleet.InMemoryDataset()
    dataset.init(batch_size=50, schema=schema)
    dataset.set_filelist([str(path)])
    dataset.load_into_memory()
    return dataset.stream(0, 1)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def check_message(case: Case, message: str, path: Path) -> None:
    first, *rest = message.splitlines()
    assert str(path) in first
    for part in case.says.split("|"):
        assert part in first
    if case.has_schema:
        assert rest[0] == str(SCHEMAS[case.format])
    assert len(message) < 2000


@sampled(keep=len(CASES))
@pytest.mark.parametrize("read", [the_queue, memory, a_preload, fleets_queue, fleets_memory])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bad_data_is_named_by_every_reader(
    tmp_path: Path, case: Case, read: Callable[..., Any]
) -> None:
    path = case.make(tmp_path / "part")
    with pytest.raises(DataError) as error:
        list(read(path, SCHEMAS[case.format]))
    check_message(case, str(error.value), path)


@sampled(keep=len(CASES))
@pytest.mark.parametrize("reader", ["QueueDataset", "InMemoryDataset"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_ends_with_one_error_and_saves_nothing(
    tmp_path: Path, case: Case, reader: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = case.make(tmp_path / "part")
    configure(tmp_path, case.format, path.name)
    dumps = [] if case.format in ("criteo", "libsvm") else DUMPS  # which have no names of examples
    options = ["-o", f"runner.reader_type={reader}", *dumps]
    assert cli.main(["run", "-m", str(tmp_path / "config.yaml"), *options]) == 2
    actual = capsys.readouterr().err.partition("trireme run: error: ")[2]
    if case.name == "a directory":  # all files below a folder are data
        assert actual == f"runner.train_data_dir: expected files below {path}, found none\n"
    else:
        check_message(case, actual, path)
    assert written(tmp_path) == []


def configure(folder: Path, format: str, data: str) -> None:
    config = CONFIG.format(format=format, data=data, model=damaged_model.__file__)
    (folder / "config.yaml").write_text(config)


def written(folder: Path) -> list[Path]:
    """Files below what a run writes to, but for what tells that a killed one owned the folder."""
    paths = [path for top in ("out", "d") for path in (folder / top).rglob("*")]
    return [path for path in paths if path.is_file() and path.name != OWNER]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("read", [the_queue, memory])
@pytest.mark.parametrize("format", TEXT)
def test_broken_lines_are_left_out_and_counted_if_asked_to(
    tmp_path: Path, format: str, read: Callable[..., Any], ending: str
) -> None:
    lines = [line for line, _ in TEXT[format].broken.values()]
    path = tmp_path / f"part{ending}"
    path.write_bytes(compressed(text(TEXT[format], "\n".join(lines)), ending))
    stream = read(path, SCHEMAS[format], on_error="count")
    assert sum(batch.num_examples for batch in stream) == NUM_LINES
    assert stream.num_broken_lines == len(lines)


@pytest.mark.parametrize("read", [the_queue, memory])
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("head -n 100; echo gone wrong >&2; exit 3", "expected exit code 0, found 3;|gone wrong"),
        ("no-such-command at all", "expected exit code 0, found 127;|no-such-command"),
        ("head -n 100; kill -9 $$", "signal 9"),
        (f"head -n {BROKEN_LINE}; echo what", f"line {BROKEN_LINE + 1} of what 'head|'what'"),
        ("cat | false", "expected exit code 0, found 1;"),
    ],
)
def test_a_command_that_fails_is_named(
    tmp_path: Path, read: Callable[..., Any], command: str, says: str
) -> None:
    path = tmp_path / "part"
    path.write_bytes(text(TEXT["multislot"]))
    with pytest.raises(DataError) as error:
        list(read(path, SCHEMAS["multislot"], pipe_command=command))
    for part in [str(path), command, *says.split("|")]:
        assert part in str(error.value)


@pytest.mark.parametrize("format", TEXT)
def test_fewer_files_than_threads_and_than_workers_are_read_once(
    tmp_path: Path, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "part.gz"
    path.write_bytes(compressed(text(TEXT[format]), ".gz"))
    dataset = QueueDataset(path, schema=SCHEMAS[format], batch_size=50, threads=8)
    assert sum(batch.num_examples for batch in dataset) == NUM_LINES
    shares = [sum(b.num_examples for b in dataset.stream(i, 3)) for i in range(3)]
    assert shares == [NUM_LINES, 0, 0]
    (warning,) = caplog.messages
    assert "at least 3 files for 3 streams" in warning
    assert "found 1: the last 2 streams have no data" in warning


def test_a_run_without_examples_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "part").write_bytes(text(TEXT["csv"], size=0))
    configure(tmp_path, "csv", "part")
    assert cli.main(["run", "-m", str(tmp_path / "config.yaml")]) == 2
    assert "train: expected examples, found none at any worker" in capsys.readouterr().err
    assert written(tmp_path) == []


def test_a_failed_training_may_be_tried_again(tmp_path: Path) -> None:
    broken, _ = TEXT["csv"].broken["a word"]
    (tmp_path / "bad").write_bytes(text(TEXT["csv"], broken))
    (tmp_path / "good").write_bytes(text(TEXT["csv"]))
    with embedded() as cluster:
        set_default(cluster)
        recipe = damaged_model.create({"format": "csv"})
        trainer = tr.Trainer.from_recipe(recipe, progress=False, cluster=cluster)
        with pytest.raises(DataError, match="line 202"):
            trainer.fit(QueueDataset(tmp_path / "bad", schema=recipe.schema, batch_size=50))
        good = QueueDataset(tmp_path / "good", schema=recipe.schema, batch_size=50)
        assert trainer.fit(good)["examples"] == NUM_LINES


def command(
    folder: Path, *arguments: str, python: str = sys.executable, file_bytes: int = -1
) -> tuple[int, str]:
    """Run the command on the configuration in the folder: its exit code and stderr.

    file_bytes: the most that a file of its processes may have, as on a disk that is full.
    """
    name, *options = arguments
    done = subprocess.run(
        [python, "-m", "trireme", name, "-m", "config.yaml", *options],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes)),
    )
    return done.returncode, done.stderr


def launch(folder: Path, workers: int, *options: str, **how: Any) -> tuple[int, str]:
    """A job of one server, as `command` runs it."""
    numbers = ["--server_num", "1", "--worker_num", str(workers)]
    return command(folder, "launch", *numbers, "-o", *options, **how)


@pytest.mark.parametrize(
    ("workers", "options", "says"),
    [
        (
            1,
            ["runner.pipe_command=head -n 100; exit 3", *DUMPS],
            r"pipe_command 'head -n 100; exit 3' on .*/data/0: expected exit code 0, found 3;",
        ),
        (
            2,
            ["runner.train_data_dir=bad", "runner.reader_type=InMemoryDataset", *DUMPS],
            rf"/bad/1\.gz line {BROKEN_LINE + 1}: field 3 \(dense\): .* found 'what'",
        ),
    ],
)
def test_a_job_ends_with_the_error_of_the_worker_that_failed(
    tmp_path: Path, programs: Template, workers: int, options: list[str], says: str
) -> None:
    good, (broken, _) = text(TEXT["multislot"]), TEXT["multislot"].broken["a word"]
    bad = compressed(text(TEXT["multislot"], broken), ".gz")
    put(tmp_path, {"data/0": good, "bad/0.gz": compressed(good, ".gz"), "bad/1.gz": bad})
    configure(tmp_path, "multislot", "data")
    code, stderr = launch(tmp_path, workers, *options, python=programs.python)
    assert code == 2
    assert re.search(f"    trireme run: error: .*{says}", stderr)
    assert "Traceback" not in stderr
    assert "killing" not in stderr, "the other one waited for servers that had ended"
    assert written(tmp_path) == []


def test_a_model_outside_of_the_root_is_refused_before_training(
    tmp_path: Path, programs: Template
) -> None:
    (tmp_path / "part").write_bytes(text(TEXT["csv"]))
    configure(tmp_path, "csv", "part")
    (tmp_path / "root").mkdir()
    serve = ["-m", "trireme", "server", "--listen", "127.0.0.1:0", "--root", str(tmp_path / "root")]
    run = ["-m", "trireme", "run", "-m", str(tmp_path / "config.yaml"), "-o"]
    run.append("runner.model_save_path=elsewhere")
    with programs.start("server", serve, {}) as server:
        env = {"TRIREME_ROLE": "worker", "TRIREME_NUM_WORKERS": "1", "TRIREME_INDEX": "0"}
        env["TRIREME_SERVERS"] = server.wait_line(r"^listening on (\S+)")[1]
        with programs.start("worker", run, env) as worker:
            assert worker.finish() == 2
            assert "--root or TRIREME_ROOT of the servers says where" in worker.output
            assert "batch 1" not in worker.output
            assert "run: epoch" not in worker.output


def test_with_fewer_files_than_workers_one_has_none_and_the_job_trains(
    tmp_path: Path, programs: Template
) -> None:
    (tmp_path / "part.gz").write_bytes(compressed(text(TEXT["csv"]), ".gz"))
    configure(tmp_path, "csv", "part.gz")
    serve = ["-m", "trireme", "server", "--listen", "127.0.0.1:0", "--root", str(tmp_path)]
    run = ["-m", "trireme", "run", "-m", str(tmp_path / "config.yaml")]
    with programs.start("server", serve, {}) as server, ExitStack() as workers:
        env = {"TRIREME_ROLE": "worker", "TRIREME_NUM_WORKERS": "2"}
        env["TRIREME_SERVERS"] = server.wait_line(r"^listening on (\S+)")[1]
        started = [
            workers.enter_context(programs.start(f"worker {i}", run, {**env, "TRIREME_INDEX": i}))
            for i in "01"
        ]
        assert [worker.finish() for worker in started] == [0, 0]
        assert "at least 2 files for 2 streams" in started[0].output
        assert re.search(rf"run: epoch 0: .*examples {NUM_LINES},", started[0].output)


def test_a_disk_that_is_full_of_a_dump_ends_the_job_and_leaves_nothing(tmp_path: Path) -> None:
    put(tmp_path, {"data/0": text(TEXT["multislot"], size=3000)})
    configure(tmp_path, "multislot", "data")
    code, stderr = launch(tmp_path, 2, *DUMPS, file_bytes=16384)
    assert code == 1
    assert re.search(r"error: Dump: cannot write part-0000. in .*/d/0: File too large\n", stderr)
    assert "Traceback" not in stderr
    assert written(tmp_path) == []


def test_a_disk_that_is_full_of_a_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(text(TEXT["csv"]))
    configure(tmp_path, "csv", "part")
    code, stderr = command(tmp_path, "run", file_bytes=4096)
    assert code == 1
    assert re.search(
        r"\ntrireme run: error: checkpoint: server 0 cannot write .*: File too large\n$", stderr
    )
    assert "Traceback" not in stderr
    assert written(tmp_path) == []


def test_a_worker_that_is_killed_leaves_no_dump(tmp_path: Path, programs: Template) -> None:
    (tmp_path / "part").write_bytes(text(TEXT["multislot"]))
    configure(tmp_path, "multislot", "part")
    run = ["-m", "trireme", "run", "-m", str(tmp_path / "config.yaml"), "-o", *DUMPS]
    run += ["runner.print_interval=1", f"runner.pipe_command=yes '{TEXT['multislot'].line(1)}'"]
    with programs.start("run", run, {}) as program:
        program.wait_line(r"batch 3:")
        program.kill()
    assert written(tmp_path) == []


def test_a_script_ends_with_the_error_by_name(tmp_path: Path, programs: Template) -> None:
    script = tmp_path / "train.py"
    places = {"folder": str(Path(__file__).parent), "data": str(tmp_path / "part.gz")}
    script.write_text(SCRIPT.format(**places, path=str(tmp_path / "out")))
    (tmp_path / "part.gz").write_bytes(compressed(text(TEXT["csv"]), ".gz")[:-9])
    with programs.start("script", [str(script)], {}) as program:
        assert program.finish() == 1
        last = program.output.splitlines()[-1]
    assert last.startswith("trireme.errors.DataError: cannot decompress ")
    assert last.endswith("Truncated compressed stream")
    assert written(tmp_path) == []


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
