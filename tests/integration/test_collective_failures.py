"""Killed workers of a job without servers: the others end with an error that names them, and the
job goes on from its newest checkpoint.
"""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

from tests.integration.test_collective_jobs import torchrun_ranks
from tests.programs import WAIT_S, Template

SCRIPT = str(Path(__file__).with_name("collective_script.py"))
ENVIRONMENT = {"TRIREME_TIMEOUT_S": "30"}
ONCE_PER_EPOCH = r"COUNTS \[2\.0\]"


def test_the_others_name_a_killed_rank_and_any_number_goes_on(
    tmp_path: Path, programs: Template
) -> None:
    saved, root = tmp_path / "saved", {**ENVIRONMENT, "TRIREME_ROOT": str(tmp_path)}
    with torchrun_ranks(3, [SCRIPT, str(saved), "13", "wait"], programs, **root) as ranks:
        ranks[1].wait_line("step 13$")
        ranks[1].kill()
        for rank in (ranks[0], ranks[2]):
            assert rank.finish() == 1
            assert re.search(
                r"Unavailable: collective: all-to-all of 3 workers: workers \[1\] have gone",
                rank.output,
            )
    for num in (2, 3, 1):
        script = [SCRIPT, str(shutil.copytree(saved, tmp_path / f"of {num}")), "0", "none"]
        with torchrun_ranks(num, script, programs, **root) as ranks:
            for rank in ranks:
                assert rank.wait_line(ONCE_PER_EPOCH)
                assert rank.finish() == 0


def test_a_rank_that_stops_without_a_lost_connection_is_named_at_the_deadline(
    tmp_path: Path, programs: Template
) -> None:
    arguments = [SCRIPT, str(tmp_path), "13", "wait"]
    env = {"TRIREME_TIMEOUT_S": "2", "TRIREME_ROOT": str(tmp_path)}
    with torchrun_ranks(3, arguments, programs, **env) as ranks:
        ranks[1].wait_line("step 13$")
        ranks[1].signal(signal.SIGSTOP)
        for rank in (ranks[0], ranks[2]):
            assert rank.finish() == 1
            assert re.search(
                r"DeadlineExceeded: collective: all-to-all of 3 workers: not complete within 2 s;"
                r" silent: workers \[1\]|workers \[[02]\] have gone",
                rank.output,
            )
        assert "silent: workers [1]" in ranks[0].output + ranks[2].output


def test_torchrun_starts_the_job_again_after_a_kill(tmp_path: Path, programs: Template) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [SCRIPT, str(tmp_path / "saved"), "20", "die"]
    env = {**ENVIRONMENT, "TRIREME_ROOT": str(tmp_path)}
    output = programs.run(
        tmp_path,
        [*torchrun, "--max-restarts=1", "--no-python", programs.python, *script],
        env,
        wait_s=WAIT_S,
    )
    made = [int(steps) for steps in re.findall(ONCE_PER_EPOCH + r" steps (\d+)", output)]
    # 38 steps an epoch; worker 1 died in the 20th, and the newest checkpoint was of the 15th.
    assert made == [2 * 38 - 15] * 2
