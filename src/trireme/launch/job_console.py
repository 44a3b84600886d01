"""The web console of a job that `trireme launch` started, as a process beside the others."""

import sys

from trireme.launch.launched_process import LaunchedProcess
from trireme.launch.placement import LaunchConfig, Placement
from trireme.launch.printing import Printer
from trireme.launch.process_environment import outside_a_job


def start_console(
    config: LaunchConfig, placement: Placement, address: str, err: Printer
) -> LaunchedProcess:
    """Start `trireme console` at an address, with output on stderr and in a log that, as it has the
    token, nobody else can read.
    """
    log_path = config.log_dir / "consolelog.0"
    log_path.unlink(missing_ok=True)
    log_path.touch(mode=0o600)
    environment = outside_a_job() | {"PYTHONUNBUFFERED": "1"}
    environment.pop("TRIREME_METRICS", None)
    command = [sys.executable, "-m", "trireme", "console", "--listen", address]
    command += ["--servers", ",".join(placement.servers)]
    if config.keys is not None:
        command += ["--keys", config.keys]
    return LaunchedProcess("console", command, environment, log_path, console=err)
