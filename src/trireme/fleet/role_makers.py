"""Role makers: where the role of a process comes from."""

import enum
from collections.abc import Sequence

from trireme.errors import BadRequest, check_flags, check_kind, check_values
from trireme.launch import process_role
from trireme.launch.process_role import ProcessRole


class Role(enum.IntEnum):
    """Fleet's numbers of the roles."""

    WORKER = 1
    SERVER = 2
    HETER_WORKER = 3


class PaddleCloudRoleMaker:
    """The role in the environment: TRAINING_ROLE, PADDLE_* and POD_IP, or Trireme's or torchrun's
    variables.

    is_collective: the job has no servers. init_gloo: workers meet (`fleet.util`) with either.

    Raises:
        BadRequest: an incomplete environment, or a collective job that has servers.
    """

    def __init__(self, is_collective: bool = False, *, init_gloo: bool = False) -> None:
        check_flags("fleet.PaddleCloudRoleMaker", is_collective=is_collective, init_gloo=init_gloo)
        self.role = process_role.read_role()
        self.is_collective = is_collective
        self.worker_endpoints = self.role.servers if self.role.hosts else ()
        if is_collective:
            _check_collective(self.role)


class UserDefinedRoleMaker:
    """The role that the arguments name.

    Args:
        current_id: index among the processes of the role.
        role: Role.WORKER or Role.SERVER. The environment alone can make a compute worker.
        worker_num: workers of the job; default: the number of worker_endpoints.
        server_endpoints: all servers as host:port.
        is_collective: the job has no servers; worker_endpoints has the addresses of all workers.
        init_gloo: workers meet (`fleet.util`) with either.
    """

    def __init__(
        self,
        is_collective: bool = False,
        init_gloo: bool = False,
        *,
        current_id: int,
        role: Role = Role.WORKER,
        worker_num: int | None = None,
        server_endpoints: Sequence[str] = (),
        worker_endpoints: Sequence[str] = (),
    ) -> None:
        what = "fleet.UserDefinedRoleMaker"
        check_flags(what, is_collective=is_collective, init_gloo=init_gloo)
        check_kind(what, "current_id", current_id, int, "an integer")
        if worker_num is not None:
            check_kind(what, "worker_num", worker_num, int, "an integer")
        for name, value in (("server_", server_endpoints), ("worker_", worker_endpoints)):
            check_kind(what, f"{name}endpoints", value, (list, tuple), 'a list of "host:port"')
        check_values(what, role=(role in tuple(Role), "as Role.WORKER or Role.SERVER", role))
        if is_collective and role == Role.SERVER:
            raise BadRequest(f"{what}: expected workers alone with is_collective, found a server")
        if worker_endpoints and worker_num not in (None, len(worker_endpoints)):
            raise BadRequest(
                f"{what}: expected worker_num of worker_endpoints {list(worker_endpoints)}, found"
                f" {worker_num}"
            )
        if role == Role.HETER_WORKER:
            raise BadRequest(
                "fleet.UserDefinedRoleMaker: expected Role.WORKER or Role.SERVER, found"
                " HETER_WORKER: TRIREME_HETER or PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST, and"
                " PaddleCloudRoleMaker, make a compute worker"
            )
        if is_collective != (not server_endpoints):
            raise BadRequest(
                "fleet.UserDefinedRoleMaker: expected server_endpoints, or is_collective=True with"
                f" worker_endpoints, found {is_collective} with {list(server_endpoints)}"
            )
        endpoints = list(worker_endpoints if is_collective else server_endpoints)
        if is_collective and not 0 <= current_id < len(endpoints):
            raise BadRequest(
                f"fleet.UserDefinedRoleMaker: expected current_id as a place in worker_endpoints"
                f" {endpoints}, found {current_id}"
            )
        self.is_collective = is_collective
        self.worker_endpoints = tuple(worker_endpoints)
        self.role = process_role.read_role(
            role="server" if role == Role.SERVER else "worker",
            index=current_id,
            num=len(worker_endpoints) if worker_num is None else worker_num,
            servers=endpoints,
            listen=endpoints[current_id] if is_collective else None,
        )


def _check_collective(role: ProcessRole) -> None:
    if role.role in ("server", "heter") or (role.role == "worker" and not role.hosts):
        raise BadRequest(
            "fleet.init: expected workers that hold the rows with is_collective=True, as"
            " `trireme launch --gpus 0,1`, --nproc_per_node 2 and torchrun start them, found"
            f" {role.describe()}"
        )
