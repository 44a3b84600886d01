"""`trireme launch`: run the processes of one job that belong on this machine.

Every process has a log file; worker 0 also writes to the console. If a process fails, all are
stopped, and the launcher reports its name, exit code and last lines. With --max_restart a process
that died is restarted: a server continues from its kept state, a worker from what the servers know,
a compute worker from nothing; workers without servers are all restarted, and load their newest
checkpoint. A stop signal is passed on to the workers, which end after their step, and then to
servers and compute workers, unless they end with the workers. SIGKILL follows after a grace period.
If the launcher itself is killed, the kernel kills all of them (keeper_program.py).
"""

import contextlib
import os
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from trireme.errors import BadRequest, ResourceExhausted, check_counts
from trireme.launch.environment import inherited
from trireme.launch.fork_server import ForkServer, is_forked, start_fork_servers
from trireme.launch.job_console import start_console
from trireme.launch.launched_process import LaunchedProcess, Mirror, claimed, describe_exit
from trireme.launch.machines import spread
from trireme.launch.placement import NO_PADDLE, LaunchConfig, Placement, choose_placement
from trireme.launch.printing import Printer, printing
from trireme.launch.process_environment import (
    ROLE_NOUNS,
    ThreadShares,
    durability_of,
    durability_variables,
    process_environment,
)
from trireme.launch.process_role import REFUSED, STOPPED, read_role
from trireme.launch.serving_options import check_settings
from trireme.launch.stop_signals import NewSignals, wakeup_fd

_LAST_LINES = 20
_SERVERS_END_S = 60.0  # for servers to end by themselves once all workers have ended
_COMPUTE_END_S = 5.0  # for compute workers to end by themselves once all servers have ended
_POLL_S = 1.0
_UNFORKED = "processes load torch themselves, instead of being forked"


def launch(config: LaunchConfig) -> int:
    """Run the job to its end. Returns 0, the exit code of the process that failed, or 128 + signal.

    Must be called in the main thread, which gets the signals.

    Raises BadRequest: the configuration is wrong; nothing was started.
    """
    config = spread(config, inherited())
    placement = choose_placement(config)
    with contextlib.closing(placement):
        _check_restarts(config, placement)
        try:
            config.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadRequest(
                f"launch: expected --log_dir to be a folder to write to, found {config.log_dir}: "
                f"{error.strerror}"
            ) from error
        job = _LocalJob(config, placement)
        job.check_environments()
        with claimed(job.log_paths()), printing(config.grace_s) as (out, err):
            return job.run(out, err)


def _check_restarts(config: LaunchConfig, placement: Placement) -> None:
    check_counts("launch", low=0, **{"--max_restart": config.max_restart})
    has_servers = not placement.workers_host
    if not has_servers and config.max_restart > 0 and config.command[1:3] == ("trireme", "run"):
        raise BadRequest(
            "launch: expected a script, or -m with --stream, with --max_restart where workers hold"
            " the rows, found -m without it: trireme run would begin at its first epoch again;"
            " runner.warmup_model_path starts from a saved one"
        )
    if has_servers and config.max_restart > 0 and durability_of(config) == "none":
        raise BadRequest(
            f"launch: expected --durability process or machine with --max_restart"
            f" {config.max_restart}, found none: a server that keeps nothing cannot continue"
        )


def say(text: str) -> None:
    """Print a line of the launcher on stderr, apart from the output of worker 0."""
    print(f"trireme launch: {text}", file=sys.stderr, flush=True)


class _LocalJob:
    """The processes of a job on this machine."""

    def __init__(self, config: LaunchConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._servers: dict[int, LaunchedProcess] = {}
        self._workers: dict[int, LaunchedProcess] = {}
        self._compute: dict[int, LaunchedProcess] = {}
        self._console: LaunchedProcess | None = None
        self._fork_servers: list[ForkServer] = []
        self._num_restarts: Counter[str] = Counter()  # by name of the process
        self._continues = False  # a job that a launcher before has started
        self._over: set[LaunchedProcess] = set()  # killed when they had nothing left to do
        self._asked: set[LaunchedProcess] = set()  # to stop
        self._has_begun = False  # whether a worker has come to the servers, which have state then
        self._failed: LaunchedProcess | None = None
        self._compute_deadline = float("inf")  # for compute workers to end
        self._late: list[LaunchedProcess] = []  # others that did not end after the workers
        self._threads = ThreadShares(
            num_cores=len(os.sched_getaffinity(0)),
            num_servers=0 if placement.workers_host else len(placement.sockets),
            num_workers=len(placement.workers),
            num_heter=len(placement.heter.sockets),
        )
        self._signals: list[signal.Signals] = []
        self._new_signals = NewSignals()
        self._selector = selectors.DefaultSelector()
        self._held: list[Mirror] = []  # until the console is read, or the job is stopped

    def run(self, out: Printer, err: Printer) -> int:
        self._out, self._err = out, err
        start = time.monotonic()
        with wakeup_fd() as wake_fd, self._selector:
            self._selector.register(wake_fd, selectors.EVENT_READ)
            try:
                self._start()
                self._watch()
                failure = self._report_failure()
                self._stop(has_failed=failure is not None)
                failure = failure or self._stop_failure()
            finally:
                for process in self._processes:
                    self._end(process)
                for index in self._workers:
                    with contextlib.suppress(OSError):
                        self._joining(index).unlink()
                if self._console is not None:
                    self._end(self._console)
                self._end_fork_servers(self._fork_servers)
        return self._conclude(failure, time.monotonic() - start)

    def check_environments(self) -> None:
        """Raises BadRequest: that of a process, which would be refused in every start of it."""
        for role, index in self._places():
            listens = role != "worker" or self._placement.workers_host
            address = {"TRIREME_LISTEN": self._placement.address(role, index)} if listens else {}
            kept = durability_variables(self._config, index) if role == "server" else {}
            check_settings(read_role(self._environment(role, index) | kept | address))

    def log_paths(self) -> list[Path]:
        """Of all processes that it will start on this machine."""
        return [self._log_path(role, index) for role, index in self._places()]

    def _places(self) -> list[tuple[str, int]]:
        """Role and index of all processes of the job on this machine."""
        placement = self._placement
        servers = () if placement.workers_host else placement.sockets
        places = [("server", index) for index in servers]
        places += [("heter", index) for index in placement.heter.sockets]
        return places + [("worker", index) for index in placement.workers]

    def _log_path(self, role: str, index: int) -> Path:
        # Several commands with --join may write to one folder.
        kind = f"late{role}log.{os.getpid()}" if self._config.join else f"{role}log"
        return self._config.log_dir / f"{kind}.{index}"

    @property
    def _processes(self) -> list[LaunchedProcess]:
        kinds = (self._servers, self._workers, self._compute)
        return [process for kind in kinds for process in kind.values()]

    def _start(self) -> None:
        config, placement = self._config, self._placement
        joining = " to join" if config.join else ""
        num_workers = placement.num_workers or len(placement.workers)
        hosting = "in the workers" if placement.workers_host else ", ".join(placement.servers)
        heter = f"compute workers {placement.heter}; " if placement.heter.workers else ""
        say(
            f"servers {hosting}; {_count(num_workers, 'worker')}{joining}; {heter}"
            f"logs in {config.log_dir}/"
        )
        if self._threads.chosen:
            say(self._threads.describe())
        self._start_fork_servers()
        if self._signals:
            return
        for index in () if placement.workers_host else placement.sockets:
            self._start_server(index)
        for index in placement.heter.sockets:
            self._start_compute_worker(index)
        for index in placement.workers:
            self._start_worker(index)
        if config.console is not None:
            self._start_console(config.console)
        if config.max_restart == 0:
            self._end_fork_servers(self._fork_servers)

    def _start_fork_servers(self) -> None:
        """Have torch loaded once for all processes that load it alike, and wait for that."""
        config = self._config
        if not is_forked(config.command, config.start_method):
            return
        envs = [self._environment(role, index) for role, index in self._places()]
        try:
            self._fork_servers = start_fork_servers([sys.executable, *config.command], envs)
        except OSError as error:
            say(f"{_UNFORKED}: {error}")
            return
        for server in self._fork_servers:
            self._selector.register(server, selectors.EVENT_READ, server)
        while any(server.is_loading for server in self._fork_servers) and not self._signals:
            self._poll()
            for server in self._fork_servers:
                server.check_deadline()
        self._drop_fork_servers()

    def _drop_fork_servers(self) -> None:
        """End those that cannot fork."""
        useless = [server for server in self._fork_servers if server.obstacle]
        for server in useless:
            say(f"{_UNFORKED}: {server.obstacle}")
        self._end_fork_servers(useless)

    def _end_fork_servers(self, servers: Sequence[ForkServer]) -> None:
        for server in list(servers):
            if server.fileno() in self._selector.get_map():
                self._selector.unregister(server)
            server.close()
            self._fork_servers.remove(server)

    def _start_console(self, address: str) -> None:
        if 0 not in self._placement.sockets:
            say("the console is on the machine of server 0")
            return
        console = start_console(self._config, self._placement, address, self._err)
        self._console = self._follow_output(console)

    def _check_console(self) -> None:
        """A job goes on without its console."""
        if self._console is None or not (state := self._console.status()):
            return
        say(f"the console {describe_exit(state)}; the job goes on; see {self._console.log_path}")
        self._end(self._console)
        self._console = None

    def _start_server(self, index: int) -> None:
        variables = durability_variables(self._config, index)
        if folder := variables.get("TRIREME_STATE_DIR"):  # what happened before stays in the logs
            self._continues |= any(Path(folder).glob("log-*"))
        self._servers[index] = self._launch_listening("server", index, variables)

    def _start_worker(self, index: int) -> None:
        if self._placement.workers_host:
            self._workers[index] = self._launch_listening("worker", index, {})
            return
        with contextlib.suppress(OSError):  # its log says that it cannot write there
            self._joining(index).touch()
        variables = {"TRIREME_JOINING": str(self._joining(index).absolute())}
        self._workers[index] = self._launch("worker", index, variables)

    def _joining(self, worker: int) -> Path:
        """A file that a worker removes when it has come to the servers."""
        path = self._log_path("worker", worker)
        return path.with_name(f".{path.name}.joining")

    def _late_workers(self) -> list[LaunchedProcess]:
        """Those that were started again, and have not come to the servers."""
        again = [i for i, process in self._workers.items() if self._num_restarts[process.name]]
        return [self._workers[index] for index in again if self._joining(index).exists()]

    def _start_compute_worker(self, index: int) -> None:
        self._compute[index] = self._launch_listening("heter", index, {})

    def _launch_listening(
        self, role: str, index: int, variables: dict[str, str]
    ) -> LaunchedProcess:
        """Start a process that serves at its address."""
        with self._placement.listen(role, index) as listening:  # closed here once it has it
            place = {
                "TRIREME_LISTEN": self._placement.address(role, index),
                "TRIREME_LISTEN_FD": str(listening.fileno()),
            }
            return self._launch(role, index, place | variables, [listening.fileno()])

    def _launch(
        self, role: str, index: int, variables: dict[str, str], pass_fds: Sequence[int] = ()
    ) -> LaunchedProcess:
        name, is_first_worker = f"{ROLE_NOUNS[role]} {index}", role == "worker" and index == 0
        env = self._environment(role, index) | variables
        try:
            process = LaunchedProcess(
                name,
                [sys.executable, *self._config.command],
                env,
                self._log_path(role, index),
                pass_fds=pass_fds,
                console=self._out if is_first_worker else None,
                appends=self._continues or self._num_restarts[name] > 0,
                fork_server=next((s for s in self._fork_servers if s.has_loaded_for(env)), None),
            )
        except OSError as error:  # too many processes or open files
            raise ResourceExhausted(f"launch: cannot start {name}: {error.strerror}") from error
        self._drop_fork_servers()
        return self._follow_output(process)

    def _environment(self, role: str, index: int) -> dict[str, str]:
        own = process_environment(self._config, self._placement, role, index)
        return self._threads.variables(role) | own

    def _follow_output(self, process: LaunchedProcess) -> LaunchedProcess:
        """Copy what a process prints to its log, and to the terminal."""
        self._selector.register(process.mirror.output_fd, selectors.EVENT_READ, process.mirror)
        return process

    def _watch(self) -> None:
        """Wait until all processes have ended, one has failed, or a stop signal has come.

        Servers and compute workers end by themselves after the last worker of the job. If all
        workers run here, they must do so in time. They may also end well before the workers.
        """
        deadline = float("inf")
        while not self._signals:
            self._poll()
            self._has_begun = self._has_begun or any(
                not self._joining(i).exists() for i in self._workers
            )
            self._restart_dead()
            if self._have_servers_ended():  # a worker was killed after its goodbye
                self._ask_to_stop(self._late_workers())
            self._check_console()
            states = {process: self._judge(process) for process in self._processes}
            self._failed = next((p for p, state in states.items() if self._is_lost(p, state)), None)
            unfinished = [process for process, state in states.items() if state != 0]
            if self._failed or not unfinished:
                return
            if not self._have_workers_ended():
                continue
            deadline = min(deadline, time.monotonic() + _SERVERS_END_S)
            self._stop_compute_workers()
            if time.monotonic() >= deadline:
                self._late = unfinished
                return

    def _stop_compute_workers(self) -> None:
        """Ask those to stop that were started again too late to hear of the end."""
        if not self._have_servers_ended():
            return
        now = time.monotonic()
        self._compute_deadline = min(self._compute_deadline, now + _COMPUTE_END_S)
        if now >= self._compute_deadline:
            self._compute_deadline = now + _COMPUTE_END_S
            self._ask_to_stop(list(self._compute.values()))

    def _judge(self, process: LaunchedProcess) -> int | None:
        """Its status; 0 if it was killed when it had nothing left to do, which it says once, or is
        a server or compute worker that has stopped as it was asked to.
        """
        status = process.status()
        if not status:
            return status
        serves = process not in self._workers.values()
        has_obeyed = serves and status == STOPPED and (process in self._asked or self._signals)
        if has_obeyed or process in self._over:
            return 0
        # Only now look at the others: what had ended before this process has ended by now.
        if not self._had_nothing_left(process, status):
            return status
        say(f"{process.name} {describe_exit(status)} when the job was over: no loss")
        self._over.add(process)
        return 0

    def _have_workers_ended(self) -> bool:
        """Whether all workers of the job run here and have ended well."""
        workers = self._workers.values()
        is_job = len(workers) == self._placement.num_workers
        return is_job and all(self._judge(worker) == 0 for worker in workers)

    def _have_servers_ended(self) -> bool:
        """Whether all servers of the job run here and have ended, so that no worker can join it."""
        servers = self._servers.values()
        is_job = 0 < len(servers) == len(self._placement.servers)
        return is_job and all(self._judge(server) == 0 for server in servers)

    def _is_job_over(self) -> bool:
        """Whether all workers have said goodbye: a server ends with 0 then, and not before."""
        return any(s.status() == 0 or s in self._over for s in self._servers.values())

    def _had_nothing_left(self, process: LaunchedProcess, status: int) -> bool:
        """Whether a process was killed when it had nothing left to do: a worker when the job was
        over, also if it failed because it came too late; a server then or after all workers, unless
        it has left state; a compute worker after all workers. A successor would wait in vain. So
        would a compute worker that finds no server any more, which is an error there.
        """
        if process in self._compute.values():
            is_killed = status < 0 or status == STOPPED
            return self._have_workers_ended() and (is_killed or self._have_servers_ended())
        if status > 0 and process not in self._late_workers():
            return False
        if process in self._workers.values():
            return self._is_job_over()
        index = next(index for index, server in self._servers.items() if server is process)
        is_done = self._have_workers_ended() or self._is_job_over()
        return (is_done or self._has_removed_state(index)) and not self._has_state(index)

    def _has_removed_state(self, server: int) -> bool:
        """Whether it has had state, and has removed it."""
        folder = durability_variables(self._config, server).get("TRIREME_STATE_DIR")
        return self._has_begun and folder is not None and Path(folder).is_dir()

    def _has_state(self, server: int) -> bool:
        from trireme.server.log.state_folder import holds_state  # which loads pyarrow

        folder = durability_variables(self._config, server).get("TRIREME_STATE_DIR")
        return folder is not None and holds_state(Path(folder))

    def _restart_dead(self) -> None:
        """Start processes again that have died, except refused ones: the same would happen."""
        if self._placement.workers_host:
            self._restart_together()
            return
        for processes, start in (
            (self._servers, self._start_server),
            (self._compute, self._start_compute_worker),
            (self._workers, self._start_worker),
        ):
            for index, process in processes.items():
                state = self._judge(process)
                if state is None or state == 0 or self._is_lost(process, state):
                    continue
                self._num_restarts[process.name] += 1
                number = self._num_restarts[process.name]
                say(
                    f"{process.name} {describe_exit(state)}; starting it again"
                    f" ({number} of at most {self._config.max_restart} times)"
                )
                self._end(process)
                start(index)

    def _restart_together(self) -> None:
        """Start all workers again if one has died: they hold each other's rows."""
        states = {process: self._judge(process) for process in self._workers.values()}
        dead = [process for process, state in states.items() if state not in (None, 0)]
        if not dead or any(self._is_lost(process, states[process]) for process in dead):
            return
        self._num_restarts.update(process.name for process in states)
        number = self._num_restarts[dead[0].name]
        say(
            f"{dead[0].name} {describe_exit(states[dead[0]] or 0)}; starting all workers of this"
            f" machine again ({number} of at most {self._config.max_restart} times)"
        )
        for process in states:
            self._end(process)
        for index in self._placement.workers:
            self._start_worker(index)

    def _is_lost(self, process: LaunchedProcess, state: int | None) -> bool:
        """Whether it has failed and may not be restarted."""
        has_failed = state not in (None, 0)
        has_restarts = self._num_restarts[process.name] < self._config.max_restart
        is_late = process in self._workers.values() and self._is_job_over()
        return has_failed and (state == REFUSED or is_late or not has_restarts)

    def _end(self, process: LaunchedProcess) -> None:
        """Kill and reap what is left of a process, and show its last output."""
        fd = process.mirror.output_fd
        if fd >= 0 and fd in self._selector.get_map():
            self._selector.unregister(fd)
        process.end()

    def _poll(self) -> None:
        """Wait for output, the end of a process or a signal, and handle it."""
        for mirror in list(self._held):
            if self._signals or not mirror.is_ahead:
                self._held.remove(mirror)
                if mirror.output_fd >= 0:
                    self._selector.register(mirror.output_fd, selectors.EVENT_READ, mirror)
        for key, _ in self._selector.select(_POLL_S):
            if key.data is None:
                self._read_signals(key.fd)
            elif isinstance(key.data, Mirror) and key.data.is_ahead and not self._signals:
                self._selector.unregister(key.fd)
                self._held.append(key.data)
            elif not key.data.pump():
                self._selector.unregister(key.fd)

    def _read_signals(self, wake_fd: int) -> None:
        numbers = os.read(wake_fd, 4096)
        self._signals += self._new_signals(numbers)
        if signal.SIGWINCH in numbers:
            for process in self._processes:
                process.mirror.resize()

    def _report_failure(self) -> tuple[int, str] | None:
        """(exit code, reason) of a job that ends early; None if it has ended well."""
        if self._failed:
            process, state = self._failed, self._failed.status() or 0
            reason = f"{process.name} {describe_exit(state)}"
            say(f"{reason}; last lines of {process.log_path}:")
            lines = process.last_lines(_LAST_LINES)
            for line in lines:
                print(f"    {line}", file=sys.stderr)
            if any("No module named 'paddle" in line for line in lines):
                say(NO_PADDLE)
            return (state if state > 0 else 128 - state), reason
        if self._late:
            names = _names(self._late)
            return 1, f"{names} still running {_SERVERS_END_S:.0f} s after the last worker ended"
        return None

    def _stop_failure(self) -> tuple[int, str] | None:
        """As _report_failure. SIGTERM is not a failure if all processes have ended well."""
        if not self._signals:
            return None
        first = self._signals[0]
        states = [self._judge(process) for process in self._processes]
        have_ended_well = states and all(state == 0 for state in states)
        if first == signal.SIGTERM and have_ended_well:
            return None
        return 128 + first, f"stopped by {first.name}"

    def _stop(self, *, has_failed: bool) -> None:
        """End what still runs: SIGTERM, and SIGKILL after the grace period or a second signal.

        If nothing has failed, the workers finish their step, for which they need servers and
        compute workers. These then end by themselves.
        """
        if not self._running():
            return
        deadline, num_signals = time.monotonic() + self._config.grace_s, len(self._signals)

        def wait(until: Callable[[], bool]) -> None:
            while not until() and len(self._signals) == num_signals and time.monotonic() < deadline:
                self._poll()

        workers = list(self._workers.values())
        if not has_failed and workers:
            self._ask_to_stop(workers)
            wait(lambda: all(worker.status() is not None for worker in workers))
            if all(worker.status() == 0 for worker in workers):
                wait(lambda: not self._running())
        self._ask_to_stop(self._processes)
        if has_failed:
            # At the first SIGTERM a worker finishes its step, and a server waits for it. Servers
            # end at once at SIGINT, workers and compute workers at a second SIGTERM.
            for server in self._servers.values():
                server.ask_to_stop(signal.SIGINT)
            wait(lambda: all(server.status() is not None for server in self._servers.values()))
            self._ask_to_stop([*workers, *self._compute.values()])
        wait(lambda: not self._running())
        if running := self._running():
            say(f"killing {_names(running)}, which did not end at SIGTERM")

    def _ask_to_stop(self, processes: Sequence[LaunchedProcess]) -> None:
        """Send SIGTERM; a process that is asked again, to end at once, is not named again."""
        running = [process for process in processes if process.status() is None]
        if new := [process for process in running if process not in self._asked]:
            say(f"stopping {_names(new)} (at most {self._config.grace_s:g} s)")
        self._asked.update(running)
        for process in running:
            process.ask_to_stop()

    def _running(self) -> list[LaunchedProcess]:
        return [process for process in self._processes if process.status() is None]

    def _conclude(self, failure: tuple[int, str] | None, seconds: float) -> int:
        end = f"after {seconds:.1f} s; logs in {self._config.log_dir}/"
        if failure is None:
            kinds = {"server": self._servers, "worker": self._workers, "heter": self._compute}
            counts = [_count(len(p), ROLE_NOUNS[role]) for role, p in kinds.items() if p]
            all_counts = " and ".join(filter(None, [", ".join(counts[:-1]), counts[-1]]))
            stopped = f", stopped by {self._signals[0].name}," if self._signals else ""
            say(f"{all_counts}{stopped} ended well {end}")
            return 0
        code, reason = failure
        say(f"failed: {reason}; all processes have ended {end}")
        return code


def _names(processes: Sequence[LaunchedProcess]) -> str:
    return ", ".join(process.name for process in processes)


def _count(num: int, noun: str) -> str:
    return f"{num} {noun}" + ("" if num == 1 else "s")
