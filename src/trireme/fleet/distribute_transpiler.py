"""DistributeTranspiler: how scripts of the oldest generation of Fleet take their place in a job."""

import logging
from typing import Any, NoReturn

from trireme.errors import BadRequest, NotReady
from trireme.fleet import calls
from trireme.fleet.role_makers import Role, UserDefinedRoleMaker
from trireme.fleet.transpiler import DistributeTranspilerConfig

log = logging.getLogger("trireme")

_MEMORY = (
    "fleet.memory_optimize, release_memory: nothing to do: torch frees what forward has kept when"
    " backward has used it; torch.utils.checkpoint and torch.autocast need less memory"
)


class DistributeTranspiler:
    """Takes the place of this process in a job, as fleet.init does. The model stays as it is: give
    `config` to `fleet.distributed_optimizer`, or `config.strategy(...)` to a Trainer.
    """

    def __init__(self, config: DistributeTranspilerConfig | None = None) -> None:
        self.config = config or DistributeTranspilerConfig()
        self._servers: list[str] = []
        self._num_workers = 0

    def transpile(
        self,
        trainer_id: int,
        program: Any = None,
        pservers: str = "",
        trainers: int | str = 1,
        sync_mode: bool | None = None,
        startup_program: Any = None,
        current_endpoint: str = "",
    ) -> None:
        """Become worker `trainer_id`; a server follows with `get_pserver_program`.

        Args:
            program, startup_program: without a counterpart: None.
            pservers: of all servers, "host:port,host:port"; in mode nccl2 none.
            trainers: number of workers; in mode nccl2 the addresses of all, "host:port,host:port".
            sync_mode: sets that of the config.
            current_endpoint: in mode nccl2, that of this worker.
        """
        if program is not None or startup_program is not None:
            raise BadRequest("DistributeTranspiler.transpile: expected no programs, found one")
        if sync_mode is not None:
            self.config.sync_mode = sync_mode
        if self.config.is_collective:
            maker = self._collective_role(trainer_id, pservers, trainers, current_endpoint)
        else:
            maker = self._role(trainer_id, pservers, trainers, current_endpoint)
        calls.init(maker)

    def _collective_role(
        self, trainer_id: int, pservers: str, trainers: int | str, current_endpoint: str
    ) -> UserDefinedRoleMaker:
        endpoints = trainers.split(",") if isinstance(trainers, str) else []
        if pservers or endpoints[trainer_id : trainer_id + 1] != [current_endpoint]:
            raise BadRequest(
                "DistributeTranspiler.transpile: expected in mode"
                f" {self.config.mode!r} the addresses of all workers as trainers, that of worker"
                f" {trainer_id} as current_endpoint, and no pservers, found trainers={trainers!r},"
                f" current_endpoint={current_endpoint!r}, pservers={pservers!r}"
            )
        return UserDefinedRoleMaker(True, current_id=trainer_id, worker_endpoints=endpoints)

    def _role(
        self, trainer_id: int, pservers: str, trainers: int | str, current_endpoint: str
    ) -> UserDefinedRoleMaker:
        if not pservers or isinstance(trainers, str) or current_endpoint:
            raise BadRequest(
                "DistributeTranspiler.transpile: expected pservers and a number of trainers in mode"
                f" 'pserver', found pservers={pservers!r}, trainers={trainers!r},"
                f" current_endpoint={current_endpoint!r}; config.mode = 'nccl2' is without servers"
            )
        self._servers, self._num_workers = pservers.split(","), trainers
        return UserDefinedRoleMaker(
            current_id=trainer_id, worker_num=trainers, server_endpoints=self._servers
        )

    def get_trainer_program(self) -> None:
        """Wait for the other processes and join them."""
        calls.init_worker()

    def get_pserver_program(self, endpoint: str) -> NoReturn:
        """Serve at this address of `pservers` until all workers have left, then exit with 0."""
        if endpoint not in self._servers:
            raise NotReady(
                "DistributeTranspiler.get_pserver_program: expected transpile() with this address"
                f" among its pservers first, found {endpoint!r} and {self._servers}"
            )
        calls.init(
            UserDefinedRoleMaker(
                current_id=self._servers.index(endpoint),
                role=Role.SERVER,
                worker_num=self._num_workers,
                server_endpoints=self._servers,
            )
        )
        calls.run_server()
        raise AssertionError("run_server ends the process")


def memory_optimize(
    input_program: Any = None,
    skip_opt_set: Any = None,
    print_log: bool = False,
    level: int = 0,
    skip_grads: bool = False,
) -> None:
    """Do nothing, and say why: torch has no program whose variables could share memory."""
    log.warning(_MEMORY)


def release_memory(input_program: Any = None, skip_opt_set: Any = None) -> None:
    """Do nothing, and say why, as `memory_optimize`."""
    log.warning(_MEMORY)
