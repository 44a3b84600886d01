"""DistributeTranspiler: how scripts of the oldest generation of Fleet take their place in a job."""

import logging
from functools import partial
from typing import Any

from trireme.errors import BadRequest, NotReady
from trireme.fleet import calls
from trireme.fleet.program import Program, ServerProgram, StartupProgram, programs
from trireme.fleet.role_makers import Role, UserDefinedRoleMaker
from trireme.fleet.transpiler import DistributeTranspilerConfig
from trireme.launch.init import log_to_stderr

log = logging.getLogger("trireme")

_MEMORY = (
    "fleet.memory_optimize, release_memory: nothing to do: torch frees what forward has kept when"
    " backward has used it; torch.utils.checkpoint and torch.autocast need less memory"
)


class DistributeTranspiler:
    """Takes the place of this process in a job, as fleet.init does, and gives the program of
    `minimize` its config. A Trainer of the script's own takes `config.strategy(...)`.
    """

    def __init__(self, config: DistributeTranspilerConfig | None = None) -> None:
        self.config = config or DistributeTranspilerConfig()
        self._program: Program | None = None
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
        slice_var_up: bool | None = None,
    ) -> None:
        """Become worker `trainer_id`; a server follows with `get_pserver_program`.

        Args:
            program: of `minimize`; None: the last one, if there is one.
            startup_program: None, or static.default_startup_program().
            pservers: of all servers, "host:port,host:port"; in mode nccl2 none.
            trainers: number of workers; in mode nccl2 the addresses of all, "host:port,host:port".
            sync_mode, slice_var_up: set those of the config.
            current_endpoint: in mode nccl2, that of this worker.
        """
        for name, value, kind in (
            ("program", program, Program),
            ("startup_program", startup_program, StartupProgram),
        ):
            if value is not None and not isinstance(value, kind):
                raise BadRequest(
                    f"DistributeTranspiler.transpile: expected {name}=None, or that of"
                    f" trireme.fleet.static, found {type(value).__name__}"
                )
        if sync_mode is not None:
            self.config.sync_mode = sync_mode
        if slice_var_up is not None:
            self.config.slice_var_up = slice_var_up
        self._program = programs.main if program is None else program
        if self._program is not None:
            self._program.strategy = self.config
        if self.config.is_collective:
            maker = self._collective_role(trainer_id, pservers, trainers, current_endpoint)
        else:
            maker = self._role(trainer_id, pservers, trainers, current_endpoint)
        log_to_stderr()
        calls.set_log_level("INFO")
        calls.job.take_role(maker)  # a server takes another one, and only the last is of interest

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

    def get_trainer_program(self, wait_port: bool = True) -> Program | None:
        """Wait for the other processes and join them. Returns the program to train; None: the
        script has called no `minimize`.
        """
        if not wait_port:
            raise BadRequest(
                "DistributeTranspiler.get_trainer_program: expected wait_port True, found False:"
                " workers always wait for the servers"
            )
        log.info("%s", calls.job.role.describe())
        calls.init_worker()
        return self._program

    def get_pserver_program(self, endpoint: str) -> ServerProgram:
        """What an executor runs at this address of `pservers`: it serves until all workers have
        left, then ends the process with 0.
        """
        if endpoint not in self._servers:
            raise NotReady(
                "DistributeTranspiler.get_pserver_program: expected transpile() with this address"
                f" among its pservers first, found {endpoint!r} and {self._servers}"
            )
        return ServerProgram(endpoint, partial(self._serve, endpoint))

    def get_pserver_programs(self, endpoint: str) -> tuple[ServerProgram, StartupProgram]:
        """Both programs of a server."""
        program = self.get_pserver_program(endpoint)
        return program, self.get_startup_program(endpoint, program)

    def get_startup_program(
        self,
        endpoint: str,
        pserver_program: ServerProgram | None = None,
        startup_program: StartupProgram | None = None,
    ) -> StartupProgram:
        """What an executor runs before the program of a server: this process is a server from now
        on. Workers give it tables and parameters when they come.
        """
        if pserver_program is not None and pserver_program.endpoint != endpoint:
            raise BadRequest(
                f"DistributeTranspiler.get_startup_program: expected the program of {endpoint!r},"
                f" found that of {pserver_program.endpoint!r}"
            )
        self.get_pserver_program(endpoint)  # checks the address
        calls.job.take_role(self._server_role(endpoint))
        return startup_program or StartupProgram(self._program)

    def _server_role(self, endpoint: str) -> UserDefinedRoleMaker:
        return UserDefinedRoleMaker(
            current_id=self._servers.index(endpoint),
            role=Role.SERVER,
            worker_num=self._num_workers,
            server_endpoints=self._servers,
        )

    def _serve(self, endpoint: str) -> None:
        calls.init(self._server_role(endpoint))
        calls.run_server()


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
