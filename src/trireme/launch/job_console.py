"""The web console of a job that `trireme launch` started, as a process beside the others."""

import sys

from trireme.launch.environment import PLACE_VARIABLES, inherited
from trireme.launch.fleet_stages import VARIABLES as STAGE_VARIABLES
from trireme.launch.launched_process import LaunchedProcess
from trireme.launch.placement import LaunchConfig, Placement


def start_console(config: LaunchConfig, placement: Placement, address: str) -> LaunchedProcess:
    """Start `trireme console` at an address, with output on stderr and in a log that, as it has the
    token, nobody else can read.
    """
    log_path = config.log_dir / "consolelog.0"
    log_path.unlink(missing_ok=True)
    log_path.touch(mode=0o600)
    of_a_job = {*PLACE_VARIABLES, *STAGE_VARIABLES, "TRIREME_METRICS"}
    environment = {name: value for name, value in inherited().items() if name not in of_a_job}
    command = [sys.executable, "-m", "trireme", "console", "--listen", address]
    command += ["--servers", ",".join(placement.servers)]
    if config.keys is not None:
        command += ["--keys", config.keys]
    return LaunchedProcess(
        "console",
        command,
        environment | {"PYTHONUNBUFFERED": "1"},
        log_path,
        console=sys.stderr.fileno(),
    )
