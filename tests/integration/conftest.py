"""Fixtures of the integration tests."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.launcher import Launcher
from tests.programs import Template, template
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded

# Sums of torch (BatchNorm's, say) have other last bits with other numbers of threads, and a server
# that a test runs in this process sets the number for all: so none may find another one.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def programs() -> Iterator[Template]:
    """Starts programs quickly: torch is imported once for all of them."""
    with template() as made:
        yield made


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    # Tests that run under nohup would hand its ignored SIGHUP on to the job, which then ignores it.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def default_cluster() -> Iterator[Cluster]:
    """Embedded tables, which modules find by themselves."""
    with embedded() as cluster:
        set_default(cluster)
        yield cluster


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("nobody but root may mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
