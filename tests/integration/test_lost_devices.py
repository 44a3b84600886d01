"""A disk with rows that goes away under a running server: typed errors in time, nothing lost."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conditions import wait_until
from tests.integration.counted_rows import KEYS, CountedRows
from tests.integration.durable_servers import DurableServers
from tests.programs import Template, template
from trireme.errors import DeadlineExceeded, TriremeError, Unavailable

THERE, FAILS, HANGS = range(3)
TIMEOUT_S = 4.0


class Disk:
    """What the server's files of rows are on. `env`: of the server's template."""

    def __init__(self, folder: Path, compiler: str) -> None:
        library, word = folder / "device.so", folder / "device"
        source = Path(__file__).with_name("device.c")
        flags = ["-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
        subprocess.run([compiler, *flags], check=True)
        word.write_bytes(bytes(4))
        with word.open("r+b") as file:
            self._word = mmap.mmap(file.fileno(), 4)
        self.env = {"LD_PRELOAD": str(library), "LOST_DEVICE": str(word)}

    def becomes(self, state: int) -> None:
        struct.pack_into("i", self._word, 0, state)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Disk:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "the core was built here, so a compiler is expected"
    return Disk(tmp_path_factory.mktemp("disk"), compiler)


@pytest.fixture(scope="module")
def programs(disk: Disk) -> Iterator[Template]:
    """Programs whose files are on the disk."""
    with template(disk.env) as made:
        yield made


@pytest.fixture
def job(tmp_path: Path, disk: Disk, programs: Template) -> Iterator[CountedRows]:
    disk.becomes(THERE)
    ssd_dir = tmp_path / "ssd"
    ssd_dir.mkdir()
    options = ["--memory", "5MiB", "--ssd_dir", str(ssd_dir)]
    with (
        DurableServers(programs, 1, tmp_path, options=options, timeout_s=TIMEOUT_S) as servers,
        servers.join(0, 1, timeout_s=TIMEOUT_S) as cluster,
    ):
        yield CountedRows(cluster)


@pytest.mark.parametrize(
    ("state", "expected"), [(FAILS, Unavailable), (HANGS, (Unavailable, DeadlineExceeded))]
)
def test_calls_fail_in_time_and_go_on_when_it_is_back(
    job: CountedRows, disk: Disk, state: int, expected: type[TriremeError]
) -> None:
    hot = KEYS[-200:]
    job.pull(hot)
    disk.becomes(state)
    start = time.monotonic()
    with pytest.raises(expected):
        job.pull(KEYS[:20_000])
    with pytest.raises(expected) as push:
        job.push(KEYS[:20_000])
    job.pull(hot)  # what is in memory needs no disk
    assert time.monotonic() - start < 4 * TIMEOUT_S
    assert "rows" in str(push.value)  # the server's words: not that it was silent
    disk.becomes(THERE)

    def goes_on() -> bool:  # once what failed to be written meanwhile has been written again
        try:
            job.push(KEYS[:100])
        except expected:
            return False
        return True

    wait_until(goes_on)
    for some in np.array_split(KEYS, 100):  # each within the deadline, on a busy machine too
        job.push(some)
    for some in np.array_split(KEYS, 100):
        job.pull(some)
