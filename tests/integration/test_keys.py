"""Jobs of real processes with keys of `trireme keys`: unlisted keys are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.programs import Program, Template
from trireme.commands import cli
from trireme.launch.key_folder import client_keys, server_keys

TRAINING_SCRIPT = str(Path(__file__).with_name("training_script.py"))
TRIREME = ["-m", "trireme"]
TRAINED = "trained 5 steps"


class Cast:
    """Processes of one test, and the folder with its keys."""

    def __init__(self, programs: Template, stack: ExitStack, folder: Path) -> None:
        self._programs, self._stack, self.folder = programs, stack, folder
        self.address = ""

    def start(self, name: str, arguments: list[str], **env: str) -> Program:
        env = {"TRIREME_THREADS": "1", "TRIREME_TIMEOUT_S": "60", **env}
        return self._stack.enter_context(self._programs.start(name, arguments, env, is_quick=True))

    def server(self) -> Program:
        options = ["--listen", "127.0.0.1:0", "--keys", str(self.folder / "server")]
        server = self.start("server", [*TRIREME, "server", *options])
        self.address = server.wait_line(r"^listening on (\S+)")[1]
        return server

    def worker(self, index: int, *, keys: Path | None, num: int = 2, **env: str) -> Program:
        place = {"TRIREME_ROLE": "worker", "TRIREME_SERVERS": self.address}
        place |= {"TRIREME_INDEX": str(index), "TRIREME_NUM_WORKERS": str(num), **env}
        if keys is not None:
            place["TRIREME_KEYS"] = str(keys)
        return self.start(f"worker {index}", [TRAINING_SCRIPT, "--batches", "5"], **place)


@pytest.fixture
def cast(programs: Template, tmp_path: Path) -> Iterator[Cast]:
    with ExitStack() as stack:
        yield Cast(programs, stack, tmp_path / "keys")


def test_a_launched_job_runs_with_one_folder_of_keys(cast: Cast, tmp_path: Path) -> None:
    assert cli.main(["keys", str(cast.folder)]) == 0
    options = ["--server_num", "1", "--worker_num", "1", "--log_dir", str(tmp_path / "log")]
    job = cast.start(
        "launch",
        [
            *TRIREME,
            "launch",
            *options,
            "--keys",
            str(cast.folder),
            TRAINING_SCRIPT,
            "--batches",
            "5",
        ],
    )
    assert job.finish() == 0
    assert TRAINED in (tmp_path / "log" / "workerlog.0").read_text()


def test_a_job_by_hand_runs_with_a_folder_for_each(cast: Cast) -> None:
    assert cli.main(["keys", str(cast.folder), "--worker_num", "2"]) == 0
    server = cast.server()
    workers = [cast.worker(i, keys=cast.folder / f"worker.{i}") for i in range(2)]
    for program in [*workers, server]:
        assert program.finish() == 0
    assert all(TRAINED in worker.output for worker in workers)


def test_a_worker_whose_key_is_not_listed_ends_at_once_and_the_others_train(
    cast: Cast, tmp_path: Path
) -> None:
    cli.main(["keys", str(cast.folder), "--worker_num", "1"])
    cli.main(["keys", str(tmp_path / "other")])
    own = client_keys(tmp_path / "other").own.public
    (tmp_path / "other" / "server.pub").write_text(
        (cast.folder / "worker.0" / "server.pub").read_text()
    )
    server = cast.server()
    # Long before its deadline: the program's end is waited for no longer than WAIT_S.
    stranger = cast.worker(0, keys=tmp_path / "other", num=1, TRIREME_TIMEOUT_S="3600")
    assert stranger.finish() == 1
    last = stranger.output.splitlines()[-1]
    assert last.startswith("trireme.errors.NotAdmitted: server.ready at ")
    assert f"the server does not admit this client's key {own}" in last
    admitted = cast.worker(0, keys=cast.folder / "worker.0", num=1)
    assert admitted.finish() == 0
    assert server.finish() == 0
    assert f"key {own} is not admitted" in server.output


@pytest.mark.parametrize("which", ["none", "of another server"])
def test_a_worker_without_the_right_keys_learns_nothing_but_that(
    cast: Cast, tmp_path: Path, which: str
) -> None:
    cli.main(["keys", str(cast.folder), "--worker_num", "1"])
    cli.main(["keys", str(tmp_path / "other")])
    server = cast.server()
    keys = None if which == "none" else tmp_path / "other"
    stranger = cast.worker(0, keys=keys, num=1, TRIREME_TIMEOUT_S="2")
    assert stranger.finish() == 1
    last = stranger.output.splitlines()[-1]
    assert last.startswith("trireme.errors.DeadlineExceeded: init: after 2 s not ready endpoints:")
    assert "or keys on one side only" in last
    assert ("a wrong server key" in last) == (keys is not None)
    admitted = cast.worker(0, keys=cast.folder / "worker.0", num=1)
    assert admitted.finish() == 0
    assert server.finish() == 0


def test_an_added_worker_is_admitted_by_servers_that_start_then(cast: Cast) -> None:
    cli.main(["keys", str(cast.folder), "--worker_num", "1"])
    cli.main(["keys", str(cast.folder), "--add", "worker.1"])
    assert len(server_keys(cast.folder / "server").admitted) == 2
    server = cast.server()
    workers = [cast.worker(i, keys=cast.folder / f"worker.{i}") for i in range(2)]
    for program in [*workers, server]:
        assert program.finish() == 0
