"""A sync run that is killed and goes on from its newest checkpoint ends with the same bytes as one
that was never stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.integration import resumer
from tests.integration.resumer import NUM_BATCHES
from tests.long import pick
from tests.programs import Program, Template
from tests.property.seeds import SEED

RESUMER = str(Path(resumer.__file__))
SERVER = ["-m", "trireme.cli", "server"]
EVERY = 7


def contents(path: Path) -> dict[str, Any]:
    """All that a checkpoint says of the state of a run: the bytes of its files, and the rest of the
    manifest but for where the servers listened and how fast it went.
    """
    files = {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != "manifest.json"
    }
    extra = json.loads((path / "manifest.json").read_text())["manifest"]["extra"]
    del extra["user"]["figures"]
    return {**files, "extra": json.dumps(extra)}


def newest(folder: Path) -> Path:
    return max((p for p in folder.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))


def assert_same(found: Path, expected: Path) -> None:
    found_contents, expected_contents = contents(found), contents(expected)
    assert found_contents.keys() == expected_contents.keys()
    differing = [k for k in found_contents if found_contents[k] != expected_contents[k]]
    assert not differing


class Jobs:
    """Jobs of real processes, one after the other."""

    def __init__(self, programs: Template, num_workers: int, num_servers: int, root: Path) -> None:
        self._programs, self._root = programs, root
        self._num_workers, self._num_servers = num_workers, num_servers

    def run(self, *arguments: str, kill_at: int | None = None) -> None:
        """Until all end by themselves; or until worker 0 has begun so many steps, then all are
        killed at once.
        """
        env = {"TRIREME_TIMEOUT_S": "60", "TRIREME_THREADS": "1", "TRIREME_ROOT": str(self._root)}
        with ExitStack() as stack:

            def start(name: str, arguments: Iterable[str], **more: str) -> Program:
                program = self._programs.start(name, [*arguments], {**env, **more})
                return stack.enter_context(program)

            servers = [
                start(f"server {i}", [*SERVER, "--listen", "127.0.0.1:0"])
                for i in range(self._num_servers)
            ]
            addresses = [server.wait_line(r"^listening on (\S+)")[1] for server in servers]
            place = {
                "TRIREME_ROLE": "worker",
                "TRIREME_SERVERS": ",".join(addresses),
                "TRIREME_NUM_WORKERS": str(self._num_workers),
            }
            workers = [
                start(f"worker {i}", [RESUMER, *arguments], TRIREME_INDEX=str(i), **place)
                for i in range(self._num_workers)
            ]
            if kill_at is None:
                assert [p.finish() for p in (*workers, *servers)] == [0] * len([*workers, *servers])
                return
            workers[0].wait_line(f"^step {kill_at}$")
            for program in (*servers, *workers):
                program.kill()


@pytest.mark.parametrize(
    ("num_workers", "num_servers"),
    pick(short=[(1, 1), (2, 2)], long=[(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]),
)
def test_killed_and_resumed_equals_never_stopped(
    programs: Template, tmp_path: Path, num_workers: int, num_servers: int
) -> None:
    random = Random(f"{SEED} {num_workers} {num_servers}")
    jobs = Jobs(programs, num_workers, num_servers, tmp_path)
    whole = tmp_path / "whole"
    jobs.run(str(whole), "--every_steps", str(EVERY))
    for number in range(pick(short=1, long=10)):
        killed = tmp_path / f"killed{number}"
        kill_at = random.randint(1, 2 * NUM_BATCHES)
        print(f"seed {SEED}: killed at step {kill_at}")
        jobs.run(str(killed), "--every_steps", str(EVERY), kill_at=kill_at)
        jobs.run(str(killed), "--every_steps", str(EVERY))
        assert_same(newest(killed), newest(whole))
