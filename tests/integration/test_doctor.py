"""`trireme doctor` on machines that lack something: the limits are real, and those of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import trireme
from tests.chaos import without_io_uring
from tests.programs import Template, clean_environment
from trireme import _core
from trireme.doctor import cgroup, machine, network
from trireme.doctor.finding import ok

DOCTOR = ("-m", "trireme", "doctor")


def doctor(command: Sequence[str], env: Mapping[str, str], code: int) -> dict[str, Any]:
    """What a command with --json prints, which ends with this code."""
    done = subprocess.run(
        [*command, "--json"],
        env={**clean_environment(), **env},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (code, ""), done.stdout
    answer: dict[str, Any] = json.loads(done.stdout)
    findings = answer["findings"]
    assert answer["problems"] == sum(one["status"] == "problem" for one in findings)
    assert answer["notes"] == sum(one["status"] == "note" for one in findings)
    assert all(bool(one["advice"]) == (one["status"] != "ok") for one in findings)
    return answer


def one(answer: Mapping[str, Any], section: str, words: str) -> dict[str, str]:
    """The finding of a section that has these words."""
    findings = [f for f in answer["findings"] if f["section"] == section and words in f["text"]]
    assert len(findings) == 1, answer
    finding: dict[str, str] = findings[0]
    return finding


def test_doctor_finds_nothing_wrong_where_jobs_run(programs: Template, tmp_path: Path) -> None:
    text = programs.run(tmp_path, DOCTOR)
    lines = text.splitlines()
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in lines)
    for words in (
        "ok Python 3.",
        "torch 2.",
        "the core uses ",
        "open files",
        " free in ",
        "nothing prevents a job",
    ):
        assert words in " ".join(text.split())


def test_doctor_says_what_limits_hinder_a_job() -> None:
    """Limits of files and cores, seccomp, and variables with a wrong name and value, at once."""
    core = min(os.sched_getaffinity(0))
    shell = f'ulimit -n 3000; exec taskset -c {core} {sys.executable} "$@"'
    command = ["bash", "-c", shell, "doctor", without_io_uring.__file__, "doctor"]
    env = {"TRIREME_SEVERS": "a:1", "TRIREME_TIMEOUT_S": "soon", "PYTHONPATH": os.getcwd()}
    answer = doctor(command, env, 1)
    files = one(answer, "Limits", "3,000 open files")
    assert files["status"] == "problem"
    assert "needs 11,264" in files["text"]
    assert "--limits connections_max=988" in files["advice"]
    uring = one(answer, "Disk", "no io_uring: ")
    assert "Operation not permitted" in uring["text"]
    assert uring["status"] == "note"
    if (os.cpu_count() or 1) > 1:
        assert one(answer, "Processor", "1 of ")["status"] == "note"
    unknown = one(answer, "Environment", "TRIREME_SEVERS")
    assert (unknown["status"], unknown["advice"]) == ("problem", "did you mean TRIREME_SERVERS?")
    wrong = one(answer, "Environment", "expected TRIREME_TIMEOUT_S to be")
    assert wrong["status"] == "problem"


def test_doctor_needs_as_many_files_as_the_limits_in_the_environment(
    programs: Template, tmp_path: Path
) -> None:
    """What it advises is enough for a server, and one connection more is not."""
    script = tmp_path / "limited.py"
    script.write_text(
        "import resource, sys\n"
        "from trireme import rpc\n"
        "from trireme.commands import cli\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 3000))\n"
        "for number in (988, 989):\n"
        "    limits = rpc.Limits(connections_max=number)\n"
        "    try:\n"
        "        with rpc.Server('127.0.0.1:0', {}, name='s', limits=limits): pass\n"
        "        print('starts with', number)\n"
        "    except ValueError as error:\n"
        "        print('refuses', number, error)\n"
        "sys.exit(cli.main(['doctor']))\n"
    )
    env = {"TRIREME_LIMITS": "connections_max=988"}
    text = programs.run(tmp_path, [str(script)], env)
    assert "starts with 988" in text
    assert "refuses 989" in text
    assert "0 problems" in text
    assert "TRIREME_LIMITS=connections_max=988" in text


def test_doctor_works_without_torch(tmp_path: Path) -> None:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    import numpy

    for path in Path(numpy.__file__).parents[1].iterdir():
        if not path.name.startswith(("torch", "trireme", "_")):
            (libraries / path.name).symlink_to(path)
    package = libraries / "trireme"
    package.mkdir()
    for path in [*Path(trireme.__file__).parent.iterdir(), Path(_core.__file__)]:
        if not (package / path.name).exists():
            (package / path.name).symlink_to(path)
    answer = doctor([sys.executable, "-S", *DOCTOR], {"PYTHONPATH": str(libraries)}, 0)
    assert one(answer, "GPU", "torch sees GPUs, and cannot be imported")["status"] == "note"
    assert one(answer, "Software", "but not installed")["status"] == "note"

    about = libraries / "trireme_ps-0.1.0.dist-info"
    about.mkdir()
    needs = "Requires-Dist: torch>=2.10\nRequires-Dist: numpy>=99.1\n"
    about.joinpath("METADATA").write_text(f"Name: trireme-ps\nVersion: 0.1.0\n{needs}")
    answer = doctor([sys.executable, "-S", *DOCTOR], {"PYTHONPATH": str(libraries)}, 1)
    missing = one(answer, "Software", "expected torch >= 2.10, found none")
    assert missing["status"] == "problem"
    assert "pip install 'torch>=2.10'" in missing["advice"]
    assert one(answer, "Software", "expected numpy >= 99.1, found ")["status"] == "problem"


@contextmanager
def control_group(values: Mapping[str, str]) -> Iterator[Path]:
    """A control group, of version 1, with these values; skips the test without the right to it."""
    controller = next(iter(values)).partition(".")[0]
    folder = cgroup._MOUNT / controller / f"trireme-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group: {error}")
    try:
        for name, value in values.items():
            folder.joinpath(name).write_text(value)
        yield folder
    finally:
        folder.rmdir()


def test_doctor_sees_the_limits_of_a_container() -> None:
    quota = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}
    limit = {"memory.limit_in_bytes": str(400 << 20)}
    with control_group(quota) as cpu, control_group(limit) as memory:
        enter = "".join(f"echo $$ > {folder}/cgroup.procs; " for folder in (cpu, memory))
        answer = doctor(["sh", "-c", f'{enter} exec "$@"', "sh", sys.executable, *DOCTOR], {}, 1)
    cores = one(answer, "Processor", "0.5 cores by quota")
    assert "TRIREME_THREADS=1 and OMP_NUM_THREADS=1" in cores["advice"]
    assert one(answer, "Memory", "free of 400.0 MiB, the limit")["status"] == "problem"


def test_limits_of_control_groups_of_version_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least of those around this process counts; its own files are not there in a container."""
    monkeypatch.setattr(cgroup, "_MOUNT", tmp_path)
    monkeypatch.setattr(cgroup, "_OWN", tmp_path / "own")
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    files = {
        "own": "0::/outer/inner\n",
        "outer/cpu.max": "150000 100000\n",
        "outer/memory.max": "1000\n",
        "outer/memory.current": "900\n",
        "outer/memory.stat": "anon 500\ninactive_file 300\n",
        "outer/inner/cpu.max": "max 100000\n",
        "outer/inner/memory.max": "max\n",
        "outer/inner/memory.current": "800\n",
    }
    for name, text in files.items():
        tmp_path.joinpath(name).write_text(text)
    assert cgroup.quota_cores() == 1.5
    assert cgroup.memory() == (1000, 400)
    tmp_path.joinpath("own").write_text("0::/elsewhere\n")
    assert (cgroup.quota_cores(), cgroup.memory()) == (None, None)


@pytest.mark.parametrize(("load", "is_busy"), [(0.0, False), (1000.5, True)])
def test_a_busy_machine_is_a_note(
    load: float, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    notes = [one.text for one in machine.cores() if one.status == "note"]
    assert any(note.startswith("a load of 1000.5 on") for note in notes) == is_busy


@pytest.mark.parametrize(("vendor", "is_named"), [("AuthenticAMD", True), ("GenuineIntel", False)])
def test_a_cpu_whose_avx512_mkl_does_not_use_is_a_note(
    vendor: str, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {"vendor_id": {vendor}, "flags": {"avx2", "avx512f"}}
    monkeypatch.setattr(machine, "_cpuinfo", lambda *names: lines[names[0]])
    notes = [one for one in machine.cores() if "AVX2, AVX-512" in one.text]
    assert [one.status for one in notes] == ["note" if is_named else "ok"]
    assert ("tr.nn.use_onednn(model)" in notes[0].advice) == is_named


def test_a_host_name_without_address_is_a_note() -> None:
    finding = network._host_name("no-such-host.invalid")
    assert (finding.status, "--interface" in finding.advice) == ("note", True)
    assert network._host_name("localhost") == ok("the host name localhost is 127.0.0.1")
