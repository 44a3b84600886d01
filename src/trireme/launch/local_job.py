"""`trireme launch`: run the servers and workers of one job that belong on this machine.

Every process gets a log file; worker 0 also writes to the console. If one fails, all are stopped
and the job fails with its name, exit code and last lines; but one that has died is started again,
if it may be (--max_restart): a server goes on from what it has kept, a worker from where it was by
what the servers know. A stop signal is passed on to the workers, so that they end after their step,
and behind them to the servers; after a grace period comes SIGKILL. If the launcher itself is
killed, the kernel kills them (child.py).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from trireme.errors import BadRequest
from trireme.launch.launched_process import LaunchedProcess
from trireme.launch.placement import LaunchConfig, Placement, choose_placement
from trireme.launch.roles import PLACE_VARIABLES, REFUSED
from trireme.telemetry.address import nth_address

_LAST_LINES = 20
_SERVERS_END_S = 60.0  # for servers to end by themselves once all workers have
_TURN_S = 1.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Torch's threads (OpenMP, MKL and OpenBLAS all read this one) and Trireme's own.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "TRIREME_THREADS")
_WAITING = "OMP_WAIT_POLICY"
_METRICS = "TRIREME_METRICS"


def launch(config: LaunchConfig) -> int:
    """Run the job to its end; the exit code: 0, that of the process that failed, or 128 + signal.

    Must be called in the main thread, which gets the signals.

    Raises:
        BadRequest: the configuration is wrong; nothing was started.
    """
    _check_restarts(config)
    placement = choose_placement(config)
    try:
        _make_folder(config.log_dir)
        return _LocalJob(config, placement).run()
    finally:
        placement.close()


def _check_restarts(config: LaunchConfig) -> None:
    if config.max_restart < 0:
        raise BadRequest(
            f"launch: expected --max_restart of at least 0, found {config.max_restart}"
        )
    if config.max_restart > 0 and _durability_of(config) == "none":
        raise BadRequest(
            f"launch: expected --durability process or machine with --max_restart"
            f" {config.max_restart}, found none: a server that keeps nothing cannot go on"
        )


def _durability_of(config: LaunchConfig) -> str:
    """What the servers keep: as the option says, else the environment, else what restarts need."""
    usual = "process" if config.max_restart > 0 else "none"
    return config.durability or os.environ.get("TRIREME_DURABILITY", usual)


def _make_folder(log_dir: Path) -> None:
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(
            f"launch: expected --log_dir to be a folder to write to, found {log_dir}: "
            f"{error.strerror}"
        ) from error


def say(text: str) -> None:
    """A line of the launcher's own, apart from the output of worker 0."""
    print(f"trireme launch: {text}", file=sys.stderr, flush=True)


class _LocalJob:
    """The running processes, and why they were stopped, if they were."""

    def __init__(self, config: LaunchConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._servers: dict[int, LaunchedProcess] = {}
        self._workers: dict[int, LaunchedProcess] = {}
        self._num_restarts: Counter[str] = Counter()  # of each process, by its name
        self._failed: LaunchedProcess | None = None
        self._late: list[LaunchedProcess] = []  # servers that did not end after the workers
        self._signals: list[signal.Signals] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        start = time.monotonic()
        with _wakeup() as wake_fd, self._selector:
            self._selector.register(wake_fd, selectors.EVENT_READ)
            try:
                self._start()
                self._watch()
                failure = self._report_failure()
                self._stop(has_failed=failure is not None)
                failure = failure or self._stopped()
            finally:
                for child in self._children:
                    self._end(child)
        return self._conclude(failure, time.monotonic() - start)

    @property
    def _children(self) -> list[LaunchedProcess]:
        return [*self._servers.values(), *self._workers.values()]

    def _start(self) -> None:
        config, placement = self._config, self._placement
        joining = " that join" if config.join else ""
        num_workers = placement.num_workers or len(placement.workers)
        say(
            f"servers {', '.join(placement.servers)}; {_count(num_workers, 'worker')}{joining}; "
            f"logs in {config.log_dir}/"
        )
        cores = len(os.sched_getaffinity(0))
        self._threads = _choose_threads(cores, len(placement.sockets), len(placement.workers))
        for index in placement.sockets:
            self._start_server(index)
        for index in placement.workers:
            self._start_worker(index)

    def _start_server(self, index: int) -> None:
        with self._placement.listen(index) as listening:  # then it is the server's alone
            place = {
                "TRIREME_LISTEN": self._placement.servers[index],
                "TRIREME_LISTEN_FD": str(listening.fileno()),
            }
            env = self._environment("server", index) | place | self._durability(index)
            self._servers[index] = self._child("server", index, env, [listening.fileno()])

    def _start_worker(self, index: int) -> None:
        env = self._environment("worker", index)
        self._workers[index] = self._child("worker", index, env, [])

    def _environment(self, role: str, index: int) -> dict[str, str]:
        """This process's environment, less what it says of a place in a job, plus the child's."""
        config, placement = self._config, self._placement
        inherited = {
            name: value for name, value in os.environ.items() if name not in PLACE_VARIABLES
        }
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
        if config.streams is not None:
            own["TRIREME_STREAMS"] = str(config.streams)
        if config.insecure:
            own["TRIREME_INSECURE"] = "1"
        if config.keys is not None:
            own["TRIREME_KEYS"] = config.keys
        if config.root is not None:
            own["TRIREME_ROOT"] = config.root
        if config.limits is not None:
            own["TRIREME_LIMITS"] = config.limits
        if config.timeout_s is not None:
            own["TRIREME_TIMEOUT_S"] = str(config.timeout_s)
        if metrics := config.metrics or os.environ.get(_METRICS, "").strip():
            first = 0 if role == "server" else len(placement.servers)
            own[_METRICS] = nth_address(metrics, first + index)
        return self._threads[role] | inherited | own

    def _durability(self, server: int) -> dict[str, str]:
        """What tells a server what to keep, and where."""
        config = self._config
        mode = _durability_of(config)
        given = config.state_dir or os.environ.get("TRIREME_STATE_DIR")
        own = {"TRIREME_DURABILITY": mode}
        if mode != "none" or given:
            parent = Path(given or config.log_dir / "state")
            own["TRIREME_STATE_DIR"] = str(parent / f"server-{server}")
        if config.log_bytes is not None:
            own["TRIREME_LOG_BYTES"] = str(config.log_bytes)
        return own

    def _child(
        self, role: str, index: int, env: dict[str, str], pass_fds: list[int]
    ) -> LaunchedProcess:
        name, is_first_worker = f"{role} {index}", role == "worker" and index == 0
        # Those of several commands that join may write to one folder.
        kind = f"late{role}log.{os.getpid()}" if self._config.join else f"{role}log"
        child = LaunchedProcess(
            name,
            [sys.executable, *self._config.command],
            env,
            self._config.log_dir / f"{kind}.{index}",
            pass_fds=pass_fds,
            console=sys.stdout.fileno() if is_first_worker else None,
            appends=self._num_restarts[name] > 0,
        )
        if child.mirror:
            self._selector.register(child.mirror.output_fd, selectors.EVENT_READ, child.mirror)
        return child

    def _watch(self) -> None:
        """Until all have ended, one has failed, or a stop signal has come.

        Servers end by themselves after the last worker of the job; if all workers are here, they
        must do so in time. (A server that ends well before is none of the launcher's business.)
        """
        deadline = float("inf")
        while not self._signals:
            self._turn()
            self._restart_dead()
            states = {child: child.status() for child in self._children}
            self._failed = next((c for c, state in states.items() if self._is_lost(c, state)), None)
            running = [child for child, state in states.items() if state != 0]  # or about to be
            if self._failed or not running:
                return
            workers_ended = len(self._workers) == self._placement.num_workers and not any(
                child in running for child in self._workers.values()
            )
            if not workers_ended:
                continue
            deadline = min(deadline, time.monotonic() + _SERVERS_END_S)
            if time.monotonic() >= deadline:
                self._late = running
                return

    def _restart_dead(self) -> None:
        """Start those again that have died, and were not refused: they would be again."""
        for children, start in (
            (self._servers, self._start_server),
            (self._workers, self._start_worker),
        ):
            for index, child in children.items():
                state = child.status()
                if state in (None, 0) or self._is_lost(child, state):
                    continue
                self._num_restarts[child.name] += 1
                number = self._num_restarts[child.name]
                say(
                    f"{child.name} {_describe_exit(state)}; starting it again"
                    f" ({number} of at most {self._config.max_restart} times)"
                )
                self._end(child)
                start(index)

    def _is_lost(self, child: LaunchedProcess, state: int | None) -> bool:
        """Whether it has failed and may not be started again."""
        has_failed = state not in (None, 0)
        has_more = self._num_restarts[child.name] < self._config.max_restart
        return has_failed and (state == REFUSED or not has_more)

    def _end(self, child: LaunchedProcess) -> None:
        """Nothing is left of it, and what it has written is shown."""
        if child.mirror and child.mirror.output_fd in self._selector.get_map():
            self._selector.unregister(child.mirror.output_fd)
        child.end()

    def _turn(self) -> None:
        """Wait for output of worker 0, the end of a child or a signal, and deal with it."""
        for key, _ in self._selector.select(_TURN_S):
            if key.data is None:
                self._read_signals(key.fd)
            elif not key.data.pump():
                self._selector.unregister(key.fd)

    def _read_signals(self, wake_fd: int) -> None:
        for number in os.read(wake_fd, 4096):
            if number in _STOP_SIGNALS:
                self._signals.append(signal.Signals(number))
            elif number == signal.SIGWINCH:
                for child in self._children:
                    if child.mirror:
                        child.mirror.resize()

    def _report_failure(self) -> tuple[int, str] | None:
        """Say why the job ends early: (exit code, reason), or None if it has ended well."""
        if self._failed:
            child, state = self._failed, self._failed.status() or 0
            reason = f"{child.name} {_describe_exit(state)}"
            say(f"{reason}; last lines of {child.log_path}:")
            for line in child.last_lines(_LAST_LINES):
                print(f"    {line}", file=sys.stderr)
            return (state if state > 0 else 128 - state), reason
        if self._late:
            names = ", ".join(child.name for child in self._late)
            return 1, f"{names} still running {_SERVERS_END_S:.0f} s after the last worker ended"
        return None

    def _stopped(self) -> tuple[int, str] | None:
        """As _report_failure: SIGTERM is no failure if all have ended well for it."""
        if not self._signals:
            return None
        first = self._signals[0]
        has_ended_well = all(child.status() == 0 for child in self._children)
        if first == signal.SIGTERM and has_ended_well:
            return None
        return 128 + first, f"stopped by {first.name}"

    def _stop(self, *, has_failed: bool) -> None:
        """End what still runs: SIGTERM, and SIGKILL after the grace period or a further signal.

        If nothing has failed, the workers finish their step with the servers' help, which end by
        themselves then.
        """
        if not self._running():
            return
        deadline, num_signals = time.monotonic() + self._config.grace_s, len(self._signals)

        def wait(until: Callable[[], bool]) -> None:
            while not until() and len(self._signals) == num_signals:
                if time.monotonic() >= deadline:
                    break
                self._turn()

        workers = list(self._workers.values())
        if not has_failed and workers:
            self._tell(workers)
            wait(lambda: all(worker.status() is not None for worker in workers))
            if all(worker.status() == 0 for worker in workers):
                wait(lambda: not self._running())
        self._tell(self._children)
        if has_failed:
            # A worker finishes its step first, for which it would wait for those that have ended:
            # a second SIGTERM ends it there.
            servers = list(self._servers.values())
            wait(lambda: all(server.status() is not None for server in servers))
            self._tell(workers)
        wait(lambda: not self._running())
        if running := self._running():
            say(f"killing {_names(running)}, which did not end at SIGTERM")

    def _tell(self, children: list[LaunchedProcess]) -> None:
        running = [child for child in children if child.status() is None]
        if running:
            say(f"stopping {_names(running)} (at most {self._config.grace_s:g} s)")
        for child in running:
            child.ask_to_stop()

    def _running(self) -> list[LaunchedProcess]:
        return [child for child in self._children if child.status() is None]

    def _conclude(self, failure: tuple[int, str] | None, seconds: float) -> int:
        where = f"after {seconds:.1f} s; logs in {self._config.log_dir}/"
        if failure is None:
            servers, workers = (
                _count(len(self._servers), "server"),
                _count(len(self._workers), "worker"),
            )
            stopped = f", stopped by {self._signals[0].name}," if self._signals else ""
            say(f"{servers} and {workers}{stopped} ended well {where}")
            return 0
        code, reason = failure
        say(f"failed: {reason}; all processes have ended {where}")
        return code


def _names(children: list[LaunchedProcess]) -> str:
    return ", ".join(child.name for child in children)


def _count(num: int, noun: str) -> str:
    return f"{num} {noun}" + ("" if num == 1 else "s")


def _describe_exit(state: int) -> str:
    if state > 0:
        return f"failed with exit code {state}"
    name = signal.Signals(-state).name
    hint = " (is the machine out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _choose_threads(cores: int, servers: int, workers: int) -> dict[str, dict[str, str]]:
    """Thread variables for each role: its processes share the cores. What is set already stays."""
    free = [name for name in _THREAD_VARIABLES if name not in os.environ]
    threads = {
        "server": max(1, cores // max(servers, 1)),
        "worker": max(1, cores // max(workers, 1)),
    }
    if free:
        say(
            f"{cores} cores are shared: {', '.join(free)} = {threads['server']} for servers, "
            f"{threads['worker']} for workers; set them yourself to choose"
        )
    # Threads of torch that spin while they wait take the cores from the other processes.
    waiting = {} if _WAITING in os.environ else {_WAITING: "PASSIVE"}
    return {role: {**dict.fromkeys(free, str(num)), **waiting} for role, num in threads.items()}


@contextlib.contextmanager
def _wakeup() -> Iterator[int]:
    """A descriptor that gets a byte, the signal's number, for each signal the launcher heeds.

    A signal that was ignored from outside (nohup) stays ignored.
    """
    heeded = [*_STOP_SIGNALS, signal.SIGCHLD, signal.SIGWINCH]
    before = {number: signal.getsignal(number) for number in heeded}
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    old_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        yield read_fd
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read_fd)
        os.close(write_fd)
