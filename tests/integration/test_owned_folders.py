"""Of two jobs that would save into one folder the second is refused before it trains."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import trireme as tr
from tests.integration.test_online_passes import COLUMNS, passes, trainer_for
from tests.jobs import Job
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.storage.atomic_folder import OWNER

OTHER_JOB = """
import sys
from pathlib import Path
from trireme.storage.atomic_folder import owned_folder

with owned_folder(Path(sys.argv[1])):
    print("owned", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_job(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that owns the folder until it is killed."""
    command = [sys.executable, "-c", OTHER_JOB, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        try:
            yield process
        finally:
            process.kill()


def fit(trainer: tr.Trainer, folder: Path) -> None:
    trainer.fit([COLUMNS], checkpoints=tr.Checkpoints(folder, every_steps=1))


def publish(trainer: tr.Trainer, folder: Path) -> None:
    publishing = tr.Publishing(path=str(folder), checkpoint_per_pass=1)
    assert len(list(tr.train_passes(trainer, passes(1), publishing=publishing))) == 1


@pytest.mark.parametrize("save", [fit, publish])
def test_a_second_job_does_not_save_into_the_folder_of_one_that_is_running(
    tmp_path: Path, save: Callable[[tr.Trainer, Path], None]
) -> None:
    folder = tmp_path / "saved"

    def work(cluster: Cluster) -> str:
        try:
            save(trainer_for(cluster), folder)
        except BadRequest as error:
            return str(error)
        return "saved"

    with other_job(folder), Job(1) as job:
        for error in job.run(2, work):
            assert f"{folder} to be one job's alone, found another job that is running" in error
    assert [path.name for path in folder.iterdir()] == [OWNER]  # it was killed
    with Job(1) as job:
        assert job.run(2, work) == ["saved", "saved"]
    assert not (folder / OWNER).exists()
