"""Role makers: where the role of a process comes from."""

import enum
from collections.abc import Sequence

from trireme.errors import BadRequest
from trireme.launch import process_role


class Role(enum.IntEnum):
    """Fleet's numbers of the roles."""

    WORKER = 1
    SERVER = 2


class PaddleCloudRoleMaker:
    """The role in the environment: TRAINING_ROLE, PADDLE_* and POD_IP, or Trireme's variables.

    Raises:
        BadRequest: a collective job, or an incomplete environment.
    """

    def __init__(self, is_collective: bool = False) -> None:
        if is_collective:
            raise BadRequest("fleet: expected a job with servers; collective comes later")
        self.role = process_role.read_role()


class UserDefinedRoleMaker:
    """The role that the arguments name.

    Args:
        current_id: index among the processes of the role.
        role: Role.WORKER or Role.SERVER.
        worker_num: workers of the job.
        server_endpoints: all servers as host:port.
    """

    def __init__(
        self, *, current_id: int, role: Role, worker_num: int, server_endpoints: Sequence[str]
    ) -> None:
        self.role = process_role.read_role(
            role="server" if role == Role.SERVER else "worker",
            index=current_id,
            num=worker_num,
            servers=list(server_endpoints),
        )
