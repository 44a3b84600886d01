"""`trireme launch --max_restart`: a job whose processes are killed ends like an undisturbed one;
and a job stops on SIGTERM.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from tests.integration import restarted_script, training_script
from tests.integration.processes import clean_environment
from tests.integration.resumed_jobs import RESUMED_SCRIPT, Jobs, assert_same, complete
from tests.ports import free_ports
from tests.programs import Template

SCRIPT = str(Path(restarted_script.__file__))
# Of 27 steps of worker 0; it is the last, since its successor counts its steps anew.
KILLED = ["server 0", "worker 1", "server 1", "worker 0"]
STEPS_MAX = 5
WAIT_S = 250.0


# The launcher itself, whose processes run another Python.
LAUNCHER = """
import sys
from trireme.commands import cli
sys.executable = {python!r}
sys.exit(cli.main())
"""


class Job:
    """A launched job: the lines of worker 0 as they come, its processes to be killed."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        python: str,
        script: Sequence[str] = (),
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        place = ["--server_num", "2", "--worker_num", "2", "--timeout_s", "60"]
        script = [*script] or [SCRIPT, "."]
        launcher = LAUNCHER.format(python=python)
        self._errors = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", launcher, "launch", *place, *options, *script],
            cwd=folder,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def wait_steps(self, num: int) -> None:
        """Until worker 0 has made so many more."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            num -= line.startswith("step ")
            if num == 0:
                return
        raise AssertionError(f"ended {num} steps before: {self.errors()}")

    def kill(self, name: str) -> None:
        """The forked program itself: what stands for it ends likewise once it is gone."""
        place = self._pid(*name.split())
        described = [path.read_text() for path in Path(f"/proc/{place}/fdinfo").iterdir()]
        [program] = re.findall(r"^Pid:\s*(\d+)$", "".join(described), re.MULTILINE)
        os.kill(int(program), signal.SIGKILL)

    def _pid(self, role: str, index: str) -> int:
        """What the launcher has started there (tests/quick_python.py); an ended process has no
        environment.
        """
        wanted = {f"TRIREME_ROLE={role}".encode(), f"TRIREME_INDEX={index}".encode()}
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in map(int, children.split()):
            if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                return pid
        raise AssertionError(f"no {role} {index} among {children}: {self.errors()}")

    def finish(self) -> str:
        """What worker 0 has printed since the last line waited for; all have ended well."""
        out, _ = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0, self.errors()
        return out

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()  # the kernel kills its processes then
        self.process.communicate(timeout=WAIT_S)
        self._errors.close()


@pytest.mark.timeout(300)  # two jobs, eight starts of processes
def test_a_job_whose_processes_are_killed_ends_like_an_undisturbed_one(
    programs: Template, tmp_path: Path
) -> None:
    seed = 20
    random = Random(seed)
    print(f"seed {seed}")
    with Job(tmp_path / "alone", python=programs.python) as alone:
        assert "done" in alone.finish().splitlines()
    with Job(tmp_path / "killed", "--max_restart", "1", python=programs.python) as job:
        for name in KILLED:
            job.wait_steps(random.randint(1, STEPS_MAX))
            job.kill(name)
        assert "done" in job.finish().splitlines()
        errors = job.errors()
    for name in ("between", "last"):
        assert_same(tmp_path / "killed" / name, tmp_path / "alone" / name, versions=False)
    for name in KILLED:
        assert errors.count(f"trireme launch: {name} was killed by SIGKILL") == 1, errors
        assert (tmp_path / "killed/log" / name.replace(" ", "log.")).is_file()
    assert not list((tmp_path / "killed/log/state").rglob("*.log")), (
        "a job that ends well tidies up"
    )


def test_a_job_that_goes_on_after_its_launcher_keeps_what_it_has_logged(
    programs: Template, tmp_path: Path
) -> None:
    first = free_ports(["127.0.0.1"], 2)
    addresses = f"127.0.0.1:{first},127.0.0.1:{first + 1}"
    options = ["--max_restart", "1", "--servers", addresses]
    with Job(tmp_path / "job", *options, python=programs.python) as killed:
        killed.wait_steps(2)
    logs = {path: path.read_bytes() for path in (tmp_path / "job/log").glob("*log.*")}
    assert len(logs) == 4
    with Job(tmp_path / "job", *options, python=programs.python) as job:
        assert "done" in job.finish().splitlines()
    for path, before in logs.items():
        assert path.read_bytes().startswith(before)
        assert len(path.read_bytes()) > len(before)


def test_a_job_that_is_stopped_takes_a_checkpoint_and_exits_with_0(
    programs: Template, tmp_path: Path
) -> None:
    stopped, alone = str(tmp_path / "stopped"), str(tmp_path / "alone")
    options = ["--every_steps", "100000", "--epochs", "4"]
    script = [RESUMED_SCRIPT, stopped, *options]
    python = programs.python
    with Job(tmp_path / "job", "--root", str(tmp_path), script=script, python=python) as job:
        job.wait_steps(2)  # of 20 of the first epoch
        # As timeout(1) does, to its command and to the command's group; as systemd may.
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            job.process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):  # else the kernel makes one of two
                job.process.wait(0.1)
        assert "done" not in job.finish().splitlines()
        errors = job.errors()
    assert "stopping worker 0, worker 1" in errors
    assert "2 servers and 2 workers, stopped by SIGTERM, ended well" in errors
    assert len(complete(Path(stopped))) == 1
    assert "training has stopped after a step, with a checkpoint" in "".join(
        (tmp_path / f"job/log/workerlog.{worker}").read_text() for worker in (0, 1)
    )
    jobs = Jobs(programs, 2, 2, tmp_path)
    for path in (stopped, alone):
        jobs.run(path, *options)
    actual, expected = (complete(Path(path))[-1] for path in (stopped, alone))
    assert_same(actual, expected, versions=False)


def test_a_job_that_is_stopped_still_has_the_workers_of_its_loader(
    programs: Template, tmp_path: Path
) -> None:
    script = [str(Path(training_script.__file__)), "--trainer", "--loader", "--batches", "1000000"]
    with Job(tmp_path / "job", script=script, python=programs.python) as job:
        assert job.process.stdout is not None
        for line in job.process.stdout:  # its progress
            if line.startswith("train: "):
                break
        job.process.send_signal(signal.SIGTERM)
        job.finish()
        assert (
            "nothing was saved: fit takes checkpoints="
            in (tmp_path / "job/log/workerlog.0").read_text()
        )


FAILING_SCRIPT = """
import trireme as tr
tr.init()
try:
    {cause}
except Exception as error:
    raise tr.errors.{error}("line 3 of a.txt: expected a number, found 'x'") from error
"""
OF_VALUE, OF_DISK = "float('x')", "raise OSError('the disk does not answer')"
OF_FILE = """
    try:
        raise OSError("the disk does not answer")
    except OSError as error:
        raise tr.errors.DataError("cannot read a.txt") from error
"""
IN_LOADER = """
    from torch.utils.data import DataLoader, IterableDataset
    class OfDisk(IterableDataset):
        def __iter__(self):
            try:
                raise OSError("the disk does not answer")
            except OSError as error:
                raise tr.errors.DataError("cannot read") from error
            yield
    next(iter(DataLoader(OfDisk(), num_workers=1)))
"""


@pytest.mark.parametrize(
    ("error", "cause", "num_restarts"),
    [
        ("DataError", OF_VALUE, 0),
        ("NotFinite", OF_VALUE, 0),
        ("SchemaMismatch", OF_VALUE, 0),
        ("DataError", OF_DISK, 1),
        ("DataError", OF_FILE, 1),
        ("DataError", IN_LOADER, 1),
        ("Unavailable", OF_VALUE, 1),
        ("wrong_argument", OF_VALUE, 0),
        ("wrong_argument", OF_DISK, 1),
        ("BadRequest", OF_VALUE, 1),
    ],
)
def test_an_error_that_a_restarted_worker_would_meet_again_ends_the_job(
    programs: Template, tmp_path: Path, error: str, cause: str, num_restarts: int
) -> None:
    (tmp_path / "train.py").write_text(FAILING_SCRIPT.format(error=error, cause=cause))
    place = ["--server_num", "1", "--worker_num", "1"]
    script = [*place, str(tmp_path / "train.py")]
    with Job(tmp_path / "job", "--max_restart", "1", script=script, python=programs.python) as job:
        job.process.wait(WAIT_S)
        assert job.errors().count("starting it again") == num_restarts, job.errors()
        code = 1 if num_restarts else 2
        assert job.process.returncode == code
        assert f"failed: worker 0 failed with exit code {code}" in job.errors()
        assert "line 3 of a.txt: expected a number" in job.errors()


SERVER_SCRIPT = "import trireme as tr\ntr.init(role='server')\n"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"TRIREME_INSECURE": "yes"}, "expected TRIREME_INSECURE to be 0 or 1, found 'yes'"),
        ({"TRIREME_LOG_BYTES": "5GiB"}, "expected TRIREME_LOG_BYTES to be an integer >= 1"),
        ({"TRIREME_INSECUR": "1"}, "did you mean TRIREME_INSECURE?"),
        ({}, "a server needs an address to listen on"),
    ],
)
def test_a_server_whose_environment_is_wrong_ends_with_the_code_that_is_not_repeated(
    programs: Template, tmp_path: Path, env: dict[str, str], message: str
) -> None:
    (tmp_path / "train.py").write_text(SERVER_SCRIPT)
    listen = {"TRIREME_LISTEN": "127.0.0.1:0"} if env else {}
    output = programs.run(tmp_path, ["train.py"], {**env, **listen}, code=2)
    assert output.startswith("trireme server: error: init: "), output
    assert message in output
    assert "Traceback" not in output


@pytest.mark.parametrize("num_servers", [1, 0])
@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("TRIREME_INSECURE", "yes", "init: expected TRIREME_INSECURE"),
        ("TRIREME_LOG_BYTES", "5GiB", "init: expected TRIREME_LOG_BYTES"),
        ("TRIREME_MEMORY", "2GiB", "server: expected --ssd_dir with --memory"),
        ("TRIREME_SSD_DIR", "none", "--ssd_dir: expected a folder, found 'none'"),
        ("TRIREME_LIMITS", "tables_max=many", "limits: expected"),
        ("TRIREME_STORE_HOSTS", ":", "store_hosts: expected HOST or HOST:PORT"),
        ("TRIREME_ROOT", "none", "expected root to be a folder"),
        ("TRIREME_KEYS", "none", "keys: none/server."),
        ("TRIREME_INTERFACE", "none", "interface: expected a network device"),
    ],
)
def test_a_wrong_environment_is_refused_before_anything_starts(
    tmp_path: Path, num_servers: int, name: str, value: str, what: str
) -> None:
    place = ["--server_num", str(num_servers), "--worker_num", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "trireme", "launch", *place, SCRIPT, "."],
        cwd=tmp_path,
        env={**clean_environment(), name: value},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"trireme launch: error: {what}" in done.stderr
    assert "servers 127" not in done.stderr
