"""Servers and workers are killed at random moments of saves: published checkpoints are complete and
correct, unpublished ones are never loaded.
"""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random

from tests.integration.resumed_jobs import Jobs, assert_same, complete
from tests.long import pick
from tests.programs import Template
from tests.seeds import SEED
from trireme.storage.atomic_folder import OWNER

NUM_KILLS = pick(short=4, long=50)
ARGUMENTS = ("--every_steps", "1", "--epochs", "1", "--keep", "100")


def test_the_newest_checkpoint_is_whole_whenever_a_process_is_killed(
    programs: Template, tmp_path: Path
) -> None:
    """Checkpoint n is of step n, so each must equal that of an undisturbed run."""
    print(f"seed {SEED}")
    random = Random(f"{SEED} kills")
    jobs = Jobs(programs, 2, 2, tmp_path)
    whole = tmp_path / "whole"
    jobs.run(str(whole), *ARGUMENTS)
    num_torn, folder = 0, tmp_path / "0"
    for number in range(NUM_KILLS):
        if len(complete(folder)) == len(complete(whole)):  # over: there is nothing left to disturb
            folder = tmp_path / str(number)
        kill_amid_saves(jobs, folder, random)
        published = complete(folder)
        assert [int(path.name) for path in published] == list(range(1, len(published) + 1))
        if published:
            assert_same(published[-1], whole / published[-1].name)
        num_torn += any(path.name.startswith(".") for path in folder.glob("*.partial"))
        print(f"kill {number}: {len(published)} published")
    print(f"{num_torn} of {NUM_KILLS} kills came during a save")
    jobs.run(str(folder), *ARGUMENTS)
    assert_same(complete(folder)[-1], complete(whole)[-1])
    # What was left is swept up; a run that was over already has not taken the lock of a killed one.
    assert all(path.name.isdecimal() for path in folder.iterdir() if path.name != OWNER)


def kill_amid_saves(jobs: Jobs, folder: Path, random: Random) -> None:
    """Start or resume; kill one process at a random moment after a random step, then the others."""
    with jobs.started(str(folder), *ARGUMENTS) as (workers, servers):
        workers[0].wait_line(f"^step {random.randint(1, 5)}$|^done$")
        threading.Event().wait(random.uniform(0, 0.5))  # the moment, not a signal that waits
        processes = [*workers, *servers]
        random.shuffle(processes)
        for process in processes:
            process.kill()
            threading.Event().wait(random.choice([0, 0.05]))
