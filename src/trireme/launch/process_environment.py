"""The environment of the processes that `trireme launch` starts."""

import os
from pathlib import Path

from trireme.launch.environment import PLACE_VARIABLES
from trireme.launch.fleet_stages import VARIABLES as STAGE_VARIABLES
from trireme.launch.machines import gpu_variables
from trireme.launch.placement import SERVER_OPTIONS, LaunchConfig, Placement
from trireme.telemetry.address import nth_address

# Threads of torch (OpenMP, MKL and OpenBLAS read the first) and of Trireme.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "TRIREME_THREADS")
_METRICS = "TRIREME_METRICS"
ROLE_NOUNS = {"server": "server", "worker": "worker", "heter": "compute worker"}
# What differs between the processes of a role, which is read after their libraries are loaded.
_LATE = ("TRIREME_", "PADDLE_", *gpu_variables("0"), "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def is_read_late(name: str) -> bool:
    """Whether no library reads the variable as it is loaded."""
    return name.startswith(_LATE)


class ThreadShares:
    """Threads of the processes of each role, which share the cores.

    Variables that are set already keep their values.
    """

    def __init__(
        self, *, num_cores: int, num_servers: int, num_workers: int, num_heter: int = 0
    ) -> None:
        self.num_cores = num_cores
        self.chosen = [name for name in _THREAD_VARIABLES if name not in os.environ]
        counts = {"server": num_servers, "worker": num_workers, "heter": num_heter}
        self.num_threads = {
            role: max(1, num_cores // count) for role, count in counts.items() if count > 0
        }

    def describe(self) -> str:
        """The line that is printed if any variable is chosen."""
        threads = ", ".join(
            f"{num} for {ROLE_NOUNS[role]}s" for role, num in self.num_threads.items()
        )
        return (
            f"{self.num_cores} cores are shared: {', '.join(self.chosen)} = {threads}; set them"
            " yourself to choose"
        )

    def variables(self, role: str) -> dict[str, str]:
        # Threads of torch that spin while they wait take the cores from the other processes.
        waiting = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
        return dict.fromkeys(self.chosen, str(self.num_threads[role])) | waiting


def outside_a_job() -> dict[str, str]:
    """The environment of this process without its place in a job."""
    of_a_job = {*PLACE_VARIABLES, *STAGE_VARIABLES}
    return {name: value for name, value in os.environ.items() if name not in of_a_job}


def process_environment(
    config: LaunchConfig, placement: Placement, role: str, index: int
) -> dict[str, str]:
    """This process's environment without its place in a job, and the variables of one process."""
    inherited = outside_a_job()
    own = {
        "TRIREME_ROLE": role,
        "TRIREME_SERVERS": ",".join(placement.servers),
        "PYTHONUNBUFFERED": "1",
    }
    if config.join:
        inherited.pop("TRIREME_STREAMS", None)
        own["TRIREME_JOIN"] = "1"
    else:
        own |= {"TRIREME_INDEX": str(index), "TRIREME_NUM_WORKERS": str(placement.num_workers)}
    if placement.heter.workers:
        own["TRIREME_HETER"] = str(placement.heter)
    names = ("streams", "keys", "timeout_s", "interface", *SERVER_OPTIONS)
    options = {name: getattr(config, name) for name in names}
    options["insecure"] = 1 if config.insecure else None
    own |= {f"TRIREME_{name.upper()}": str(v) for name, v in options.items() if v is not None}
    if metrics := config.metrics or os.environ.get(_METRICS, "").strip():
        first = 0 if role == "server" or placement.workers_host else len(placement.servers)
        first += placement.num_workers if role == "heter" else 0
        own[_METRICS] = nth_address(metrics, first + index)
    if role == placement.gpus_go_to:
        own |= gpu_variables(placement.gpus.get(index))
    if role == "worker" and placement.workers_host:
        own |= _fleet_variables(placement, index)
    if role == "heter":
        own |= _compute_variables(placement, index)
    return inherited | own


def _compute_variables(placement: Placement, index: int) -> dict[str, str]:
    """The label of a compute worker, and its place among those here that share the GPUs, if the
    user has not dealt them out.
    """
    label, _ = placement.heter.workers[index]
    on_gpus = placement.heter.on_gpus_here
    own = {"TRIREME_LABEL": label}
    if placement.gpus or index not in on_gpus:
        return own
    share = {"LOCAL_RANK": str(on_gpus.index(index)), "LOCAL_WORLD_SIZE": str(len(on_gpus))}
    return own | share


def _fleet_variables(placement: Placement, index: int) -> dict[str, str]:
    """Those that scripts for paddle.distributed.launch read."""
    return {
        "PADDLE_TRAINER_ID": str(index),
        "PADDLE_TRAINERS_NUM": str(placement.num_workers),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(placement.servers),
        "PADDLE_CURRENT_ENDPOINT": placement.servers[index],
    }


def durability_of(config: LaunchConfig) -> str:
    """The servers' durability: the option, else the environment, else what restarts need."""
    default = "process" if config.max_restart > 0 else "none"
    return config.durability or os.environ.get("TRIREME_DURABILITY", default)


def durability_variables(config: LaunchConfig, server: int) -> dict[str, str]:
    """The variables with which a server keeps its state, in a folder of its own."""
    mode = durability_of(config)
    state_dir = config.state_dir or os.environ.get("TRIREME_STATE_DIR")
    variables = {"TRIREME_DURABILITY": mode}
    if mode != "none" or state_dir:
        parent = Path(state_dir or config.log_dir / "state")
        variables["TRIREME_STATE_DIR"] = str(parent / f"server-{server}")
    if config.log_bytes is not None:
        variables["TRIREME_LOG_BYTES"] = str(config.log_bytes)
    if config.skip_records is not None:
        variables["TRIREME_SKIP_RECORDS"] = config.skip_records
    return variables
