"""The processes of one round: started, killed, stopped, and restarted under the same identity."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import script
from tests.chaos.plan import Plan
from tests.chaos.script import Options
from tests.ports import free_ports
from tests.programs import Program, Template
from tests.proxy import Faults, Proxy
from trireme.commands import cli

SCRIPT = str(Path(script.__file__))
SERVER = ["-m", "trireme", "server"]
SERVER_WITHOUT_IO_URING = [str(Path(__file__).with_name("without_io_uring.py")), "server"]
TIMEOUT_S = 60.0
"""How long the job's processes wait for each other."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Where processes run.

    Attributes:
        programs: starts them.
        host: address of the servers' side.
        namespace: of the workers' side; empty if it is the same.
    """

    programs: Template
    host: str = "127.0.0.1"
    namespace: str = ""


@dataclass
class Place:
    """A server's or worker's identity, and the processes that have had it."""

    name: str
    start: Callable[[], Program]
    programs: list[Program] = field(default_factory=list)
    is_down: bool = False  # killed, and not restarted yet

    @property
    def program(self) -> Program:
        return self.programs[-1]

    def launch(self) -> None:
        self.programs.append(self.start())
        self.is_down = False

    def kill(self) -> bool:
        """As kill -9; whether there was anybody to kill."""
        if self.is_down or self.program.has_ended:
            return False
        self.program.kill()
        self.is_down = True
        return True

    def signal(self, number: signal.Signals) -> None:
        if not self.program.has_ended:
            self.program.signal(number)

    @property
    def output(self) -> str:
        return "".join(
            f"==== process {number} of {self.name}\n{program.output}\n"
            for number, program in enumerate(self.programs)
        )


class Job:
    """with Job(plan, options, folder, world) as job:
        job.servers[0].kill()
        job.servers[0].launch()

    Everything it writes is below `folder`: folders `disk-N` and `ssd-N` for each server, and
    checkpoints.
    """

    def __init__(self, plan: Plan, options: Options, folder: Path, world: World) -> None:
        self.plan, self.folder = plan, folder
        self._options, self._world = options, world
        self._exit = ExitStack()
        self._listeners: list[socket.socket] = []
        self.addresses: list[str] = []
        self.proxies: list[Proxy] = []
        self.servers = [
            Place(f"server {index}", self._server(index)) for index in range(plan.num_servers)
        ]
        self.workers = [
            Place(f"worker {index}", self._worker(index)) for index in range(plan.num_workers)
        ]
        self.compute = [
            Place(f"heter {index}", self._compute_worker(index))
            for index in range(plan.num_compute)
        ]
        self._compute_addresses: list[str] = []

    def __enter__(self) -> Job:
        with ExitStack() as stack:
            stack.enter_context(self._exit)
            if self.plan.has_keys:
                self._make_keys()
            if self.plan.is_handed:
                for _ in self.servers:
                    self._listeners.append(stack.enter_context(self._listener()))
            for server in self.servers:
                server.launch()
                self.addresses.append(server.program.wait_line(r"^listening on (\S+)")[1])
            if self.plan.network == "proxy":
                self.proxies = [
                    stack.enter_context(Proxy(address, self._faults(number)))
                    for number, address in enumerate(self.addresses)
                ]
                self.calm(True)
            if self.compute:
                first = free_ports(("127.0.0.1",), len(self.compute))
                self._compute_addresses = [
                    f"127.0.0.1:{first + i}" for i in range(len(self.compute))
                ]
            for place in (*self.compute, *self.workers):
                place.launch()
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.__exit__(*error)  # type: ignore[arg-type]

    @property
    def places(self) -> list[Place]:
        return [*self.servers, *self.workers, *self.compute]

    def calm(self, is_calm: bool) -> None:
        for proxy in self.proxies:
            proxy.is_calm = is_calm

    def progress(self) -> float:
        """The share of all batches that workers have come to. Compute workers may have come to some
        of them again.
        """
        total = sum(self.plan.lengths) * self.plan.num_epochs
        if self.compute:
            steps = sum(
                len(re.findall(r"^step ", one.output, re.MULTILINE)) for one in self.compute
            )
            return min(steps / total, 1.0)
        done = 0
        for worker, length in zip(self.workers, self.plan.lengths, strict=True):
            steps = re.findall(r"^step (\d+)$", worker.output, re.MULTILINE)
            before = self._options.first_epoch * length
            done += max(max(map(int, steps), default=0) - before, 0)
        return done / total

    def state_dir(self, server: int) -> Path:
        return self.disk(server) / "state"

    def disk(self, server: int) -> Path:
        return self.folder / f"disk-{server}"

    def ssd(self, server: int) -> Path:
        """Has the folders of --ssd_dir."""
        return self.folder / f"ssd-{server}"

    def _tier_options(self, server: int) -> list[str]:
        tier = self.plan.tier
        if tier is None:
            return []
        folders = [self.ssd(server) / f"folder-{number}" for number in range(tier.num_folders)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        memory = tier.memories[len(self.servers[server].programs) % len(tier.memories)]
        return ["--memory", f"{memory}MiB", "--ssd_dir", ",".join(map(str, folders))]

    def _faults(self, number: int) -> Faults:
        """Those of a repeated message not with keys: CurveZMQ takes it for an attack."""
        repeated = 0.0 if self.plan.has_keys else 0.1
        return Faults(
            seed=number + 1,
            lose_request=0.02,
            lose_reply=0.02,
            cut_request=0.02,
            cut_reply=0.02,
            duplicate=repeated,
            replay=repeated,
            delay=0.1,
            delay_s_max=0.1,
        )

    def _listener(self) -> socket.socket:
        listener = socket.create_server((self._world.host, 0))
        listener.set_inheritable(True)
        return listener

    def _make_keys(self) -> None:
        arguments = ["keys", str(self.folder / "keys"), "--worker_num", str(self.plan.num_workers)]
        if self.plan.num_compute:
            arguments += ["--heter_worker_num", str(self.plan.num_compute)]
        with contextlib.redirect_stdout(io.StringIO()) as output:
            code = cli.main(arguments)
        if code != 0:
            raise RuntimeError(f"trireme keys: {output.getvalue()}")

    def _environment(self, place: str, slot: int) -> Mapping[str, str]:
        env = {"TRIREME_TIMEOUT_S": f"{TIMEOUT_S:g}", "TRIREME_THREADS": "1"}
        env |= {"TRIREME_ROOT": str(self.folder.parent), "CHAOS_CLOCK_SLOT": str(slot)}
        if self.plan.has_keys:
            env["TRIREME_KEYS"] = str(self.folder / "keys" / place)
        elif self._world.host != "127.0.0.1":
            env["TRIREME_INSECURE"] = "1"
        return env

    def _server(self, index: int) -> Callable[[], Program]:
        def start() -> Program:
            plan = self.plan
            options = ["--durability", plan.durability, *self._tier_options(index)]
            may_use_io_uring = plan.tier is None or plan.tier.may_use_io_uring
            server = SERVER if may_use_io_uring else SERVER_WITHOUT_IO_URING
            if plan.durability != "none":
                options += ["--log_bytes", str(plan.log_bytes)]
                options += ["--state_dir", str(self.state_dir(index))]
            known = self.addresses[index:]  # none at the first start
            options += ["--listen", known[0] if known else f"{self._world.host}:0"]
            listener = self._listeners[index] if self._listeners else None
            if listener is not None:
                options[-1] = "{}:{}".format(*listener.getsockname())
            program = self._world.programs.start(
                f"server {index}",
                [*server, *options],
                self._environment("server", index),
                listener=listener,
            )
            return self._exit.enter_context(program)

        return start

    def _worker(self, index: int) -> Callable[[], Program]:
        def start() -> Program:
            return self._start_script("worker", index, len(self.servers) + index)

        return start

    def _compute_worker(self, index: int) -> Callable[[], Program]:
        def start() -> Program:
            slot = len(self.servers) + len(self.workers) + index
            return self._start_script("heter", index, slot)

        return start

    def _start_script(self, role: str, index: int, slot: int) -> Program:
        servers = [proxy.endpoint for proxy in self.proxies] or self.addresses
        env = {
            **self._environment(f"{role}.{index}", slot),
            "TRIREME_ROLE": role,
            "TRIREME_SERVERS": ",".join(servers),
            "TRIREME_INDEX": str(index),
            "TRIREME_NUM_WORKERS": str(self.plan.num_workers),
            "TRIREME_DEVICE_GPU": "cpu",
        }
        if self.compute:
            env["TRIREME_HETER"] = ",".join(f"gpu={a}" for a in self._compute_addresses)
        program = self._world.programs.start(
            f"{role} {index}",
            [SCRIPT, self._options.to_json()],
            env,
            namespace=self._world.namespace,
        )
        return self._exit.enter_context(program)
