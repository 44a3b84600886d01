"""A process that serves or calls many raises its limit of open files, or says that it cannot."""

import subprocess
import sys

import pytest

SERVE = """
import resource, sys
from trireme.rpc import Limits, Server
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))
with Server("127.0.0.1:0", {}, name="server 0", limits=Limits(connections_max=1000)):
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
CONNECT = """
import resource, sys
from trireme.errors import DeadlineExceeded
from trireme.job.connecting import connect
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))
try:
    connect([f"127.0.0.1:{port}" for port in range(1, 41)], num_workers=1, timeout_s=0.1)
except DeadlineExceeded:
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("script", "raised", "needs"),
    [(SERVE, 3024, "server 0 with connections_max=1000"), (CONNECT, 2024, "worker 0 with 40")],
)
def test_the_limit_of_open_files_is_raised_or_the_error_says_by_how_much(
    script: str, raised: int, needs: str
) -> None:
    def run(hard: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, str(hard)], capture_output=True, text=True, check=False
        )

    assert run(4096).stdout == f"{raised}\n"
    line = run(1500).stderr.splitlines()[-1]
    assert line.startswith(f"trireme.errors.BadRequest: {needs}")
    assert f"a hard limit of {raised} open files or more, found 1500" in line
