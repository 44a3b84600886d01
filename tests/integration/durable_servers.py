"""Server processes with durable state, which tests kill and restart at the same addresses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tests.programs import Program, Template
from trireme.job.cluster import Cluster
from trireme.job.connecting import connect
from trireme.launch.key_folder import client_keys, make_shared_folder

SERVER = ["-m", "trireme", "server"]
TIMEOUT_S = 60.0


class DurableServers:
    """with DurableServers(programs, 2, tmp_path) as servers:
        cluster = servers.join(0, 1)
        servers.kill(1)
        servers.start(1)

    state: where servers keep what they have; default `folder`, which they write checkpoints below.
    log_bytes: small, so that snapshots are frequent. keys: encrypt.
    options: of all servers, besides these.
    """

    def __init__(
        self,
        programs: Template,
        num: int,
        folder: Path,
        *,
        durability: str = "process",
        log_bytes: int = 1 << 17,
        keys: bool = False,
        state: Path | None = None,
        options: Sequence[str] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._programs, self.folder, self._state = programs, folder, state or folder
        self._timeout_s = timeout_s
        self._options = ["--durability", durability, *options]
        if durability != "none":
            self._options += ["--log_bytes", str(log_bytes)]
        self._keys = folder / "keys" if keys else None
        if self._keys is not None:
            make_shared_folder(self._keys)
            self._options += ["--keys", str(self._keys)]
        self._exit = ExitStack()
        self._running: dict[int, Program] = {}
        self.num_kills = 0
        self.addresses = ["127.0.0.1:0"] * num

    def state_dir(self, server: int) -> Path:
        return self._state / f"state-{server}"

    def launch(self, server: int) -> Program:
        """Start a process, and do not wait for it."""
        options = [*self._options, "--listen", self.addresses[server]]
        if self._options[1] != "none":
            options += ["--state_dir", str(self.state_dir(server))]
        env = {"TRIREME_TIMEOUT_S": f"{self._timeout_s:g}", "TRIREME_THREADS": "1"}
        env["TRIREME_ROOT"] = str(self.folder)
        program = self._programs.start(f"server {server}", [*SERVER, *options], env)
        self._running[server] = self._exit.enter_context(program)
        return program

    def start(self, server: int) -> Program:
        """Start a process, and wait until it serves."""
        program = self.launch(server)
        self.addresses[server] = program.wait_line(r"^listening on (\S+)")[1]
        return program

    def kill(self, server: int) -> None:
        """As kill -9."""
        self._running[server].kill()
        self.num_kills += 1

    def program(self, server: int) -> Program:
        return self._running[server]

    def join(self, worker: int, num_workers: int, timeout_s: float = TIMEOUT_S) -> Cluster:
        return connect(
            self.addresses,
            worker=worker,
            num_workers=num_workers,
            threads=1,
            timeout_s=timeout_s,
            keys=None if self._keys is None else client_keys(self._keys),
        )

    def __enter__(self) -> DurableServers:
        with ExitStack() as stack:
            stack.enter_context(self._exit)
            for server in range(len(self.addresses)):
                self.start(server)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit.__exit__(kind, value, trace)
