"""`trireme launch --max_restart`: a real job whose servers are killed ends as one left alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.integration.processes import clean_environment

TRAINEE = str(Path(__file__).with_name("trainee.py"))
NUM_BATCHES, NUM_SERVERS, NUM_KILLS = 60, 2, 2
WAIT_S = 250.0


class Job:
    """A launched job: the lines of worker 0 as they come, its servers to be killed."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir()
        place = ["--server_num", str(NUM_SERVERS), "--worker_num", "2", "--timeout_s", "60"]
        script = [TRAINEE, "--mode", "sync", "--trainer", "--batches", str(NUM_BATCHES)]
        self._errors = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trireme.cli", "launch", *place, *options, *script],
            cwd=folder,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def wait_batch(self, number: int) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == f"batch {number}\n":
                return
        raise AssertionError(f"ended before batch {number}: {self.errors()}")

    def kill_server(self, index: int) -> None:
        os.kill(self._pid("server", index), signal.SIGKILL)

    def _pid(self, role: str, index: int) -> int:
        """The process of this job with that place; one that has ended has no environment."""
        wanted = {f"TRIREME_ROLE={role}".encode(), f"TRIREME_INDEX={index}".encode()}
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in map(int, children.split()):
            if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                return pid
        raise AssertionError(f"no {role} {index} among {children}: {self.errors()}")

    def finish(self) -> str:
        """The loss that worker 0 has printed, to the last bit."""
        out, _ = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0, self.errors()
        found = re.search(r"^loss (\S+)$", out, re.MULTILINE)
        assert found, out
        return found[1]

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()  # the kernel kills its processes then
        self.process.communicate(timeout=WAIT_S)
        self._errors.close()


@pytest.mark.timeout(300)  # two jobs, six starts of a server
def test_a_job_whose_servers_are_killed_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    seed = 20
    random = Random(seed)
    print(f"seed {seed}")
    with Job(tmp_path / "alone") as alone:
        expected = alone.finish()
    with Job(tmp_path / "killed", "--max_restart", str(NUM_KILLS)) as job:
        part = NUM_BATCHES // (NUM_KILLS + 1)
        for kill in range(NUM_KILLS):
            job.wait_batch((kill + 1) * part + random.randrange(part))
            job.kill_server(kill % NUM_SERVERS)
        assert job.finish() == expected
        errors = job.errors()
    for server in range(NUM_SERVERS):
        times = errors.count(f"trireme launch: server {server} was killed by SIGKILL")
        assert times == NUM_KILLS // NUM_SERVERS, errors
    assert not list((tmp_path / "killed/log/state").rglob("*.log")), (
        "a job that ends well tidies up"
    )
