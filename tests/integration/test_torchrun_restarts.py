"""torchrun starts all workers again when one has died; the servers beside it keep the rows."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.programs import Template

SCRIPT = str(Path(__file__).with_name("torchrun_script.py"))
WAIT_S = 120.0


def results(programs: Template, folder: Path, mode: str) -> list[tuple[str, ...]]:
    """(worker, steps, digest of the outputs) of the workers that trained to the end."""
    with ExitStack() as stack:
        command = ["-m", "trireme", "server", "--listen", "127.0.0.1:0"]
        servers = [
            stack.enter_context(programs.start(f"server {index}", command, {}, folder=folder))
            for index in range(2)
        ]
        addresses = [server.wait_line(r"^listening on (\S+)")[1] for server in servers]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        torchrun += ["--max-restarts=1", "--no-python", programs.python]
        env = {"TRIREME_SERVERS": ",".join(addresses), "TRIREME_TIMEOUT_S": "60"}
        script = [SCRIPT, mode, str(folder)]
        output = programs.run(folder, [*torchrun, *script], env, wait_s=WAIT_S)
        assert [server.finish() for server in servers] == [0, 0]
    return sorted(re.findall(r"^RESULT (\d) (\d+) (\w+)", output, re.MULTILINE))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_that_torchrun_starts_again_train_to_the_end(
    programs: Template, tmp_path: Path, mode: str
) -> None:
    """torchrun ends the others with SIGTERM, which does not ask the job to stop."""
    (tmp_path / "dies").touch()
    restarted = results(programs, tmp_path, mode)
    assert not (tmp_path / "dies").exists()
    assert [one[:2] for one in restarted] == [("0", "80"), ("1", "80")]
    if mode == "sync":
        assert restarted == results(programs, tmp_path, mode)
