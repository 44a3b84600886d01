"""Who is in the job: the addresses and numbers that Fleet's scripts ask for."""

from typing import Any

from trireme.errors import BadRequest
from trireme.fleet.calls import job


def server_endpoints(to_string: bool = False) -> Any:
    """The addresses "host:port" of the servers, in order; [] without servers. to_string: joined by
    commas.
    """
    role = job.role
    return _as_asked([] if role.hosts else list(role.servers), to_string)


def server_index() -> int:
    """The index of this server. Raises BadRequest: this process is none."""
    if not job.is_server():
        raise BadRequest(f"fleet.server_index: expected a server, this is a {job.role.role}")
    return job.role.index


def worker_endpoints(to_string: bool = False) -> Any:
    """The addresses "host:port" of the workers, in order; [] in a process alone.

    Raises BadRequest: workers of a job with servers listen nowhere.
    """
    endpoints = list(job.worker_endpoints)
    if not endpoints and job.role.role != "embedded":
        raise BadRequest(
            "fleet.worker_endpoints: expected workers with addresses, as those of a job without"
            " servers, found workers that connect to servers and listen nowhere;"
            " fleet.worker_num() counts them"
        )
    return _as_asked(endpoints, to_string)


def node_num() -> int:
    """Machines on which workers run, by their addresses. Raises BadRequest: as worker_endpoints."""
    hosts = {endpoint.rpartition(":")[0] for endpoint in worker_endpoints()}
    return max(1, len(hosts))


def local_rank() -> int:
    """The place of this worker among those of its machine. Raises BadRequest: it is not stated."""
    role = job.role
    if role.role == "embedded":
        return 0
    if role.local_index is None:
        raise BadRequest(
            "fleet.local_rank: expected LOCAL_RANK, which torchrun and trireme launch --gpus set,"
            " found none; fleet.worker_index() is the place in the job"
        )
    return role.local_index


def is_coordinator() -> bool:
    """False: server 0 coordinates the job as well as serving."""
    return False


def _as_asked(endpoints: list[str], to_string: bool) -> Any:
    return ",".join(endpoints) if to_string else endpoints
