"""The cost of hostile peers for a server with keys: percent of one core for each kind.

An admitted client calls the server 200 times a second all the time. The cost of these calls is
measured in every round just before the attack, and subtracted. The attacker is a process in a CPU
cgroup of its own if one can be made, else with a higher nice value; `detail` has which, its number
of attempts, the client's latencies before and during the attack, and the server's memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchError, Claim, Contest, Run, Settings
from benchmarks.macro.attackers import KINDS
from benchmarks.macro.server_process import ServerProcess
from trireme.launch.key_folder import client_keys, make_folders, make_shared_folder
from trireme.rpc import RpcClient

_CALLS_PER_S, _CALLS_MIN = 200, 10
_PATIENCE_S = 60.0
_CGROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))  # version 1, version 2


def contests(settings: Settings) -> Sequence[Contest]:
    kinds = settings.pick(smoke=["wrong_key", "nothing"], real=list(KINDS))
    return [
        Contest(
            {kind: partial(_measure, settings, kind)},
            [Claim(kind, kind, unit="% of a core")],
            settings.rounds,
        )
        for kind in kinds
    ]


def _measure(settings: Settings, kind: str, number: int) -> Run:
    del number
    alone_s = settings.pick(smoke=0.3, real=4.0)
    attacked_s = settings.pick(smoke=0.3, real=12.0)  # a blocked attacker returns twice
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trireme_bench_")))
        keys = _Keys(folder, kind)
        server = stack.enter_context(ServerProcess(folder, "--keys", str(keys.server)))
        client = stack.enter_context(_GoodClient(server.endpoint, keys.good))
        time.sleep(min(alone_s, 0.5))  # the client has just started
        alone = _watch(server, client, alone_s)
        with _attack(kind, server.endpoint, attacked_s, keys.attacker) as attacker:
            attacked = _watch(server, client, attacked_s)
            tries, is_apart = attacker()
    of_one_core = max(attacked["cpu_percent"] - alone["cpu_percent"], 0.01)
    detail = {"tries_per_s": tries / attacked_s, "in_cgroup": is_apart}
    detail |= {"alone": alone, "attacked": attacked}
    return Run(of_one_core, detail=detail)


class _Keys:
    """Folders of keys: of the server, of its client, and of the attacker."""

    def __init__(self, folder: Path, kind: str) -> None:
        make_folders(folder / "keys", ["good", "bad"])
        self.server, self.good = folder / "keys" / "server", folder / "keys" / "good"
        self.attacker = folder / "keys" / "bad"
        if kind == "wrong_key":
            make_shared_folder(folder / "other")
            self.attacker = folder / "other"
            trusted = (self.good / "server.pub").read_text()
            (self.attacker / "server.pub").write_text(trusted)


class _GoodClient:
    """Calls the server at a steady rate and records the latencies."""

    def __init__(self, at: str, keys: Path) -> None:
        self._at, self._keys = at, keys
        self._stop = threading.Event()
        self._latencies: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with RpcClient(name="good", keys=client_keys(self._keys)) as client:
            while not self._stop.wait(1 / _CALLS_PER_S):
                start = time.perf_counter()
                client.call(self._at, "server.ready", timeout_s=30)
                self._latencies.append(time.perf_counter() - start)

    def take(self) -> list[float]:
        taken, self._latencies = self._latencies, []
        return taken

    def __enter__(self) -> _GoodClient:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)


def _watch(server: ServerProcess, client: _GoodClient, seconds: float) -> dict[str, float]:
    """The CPU time of the server in some seconds, and the latencies of its client."""
    client.take()
    cpu_s, log_bytes, peak = server.cpu_s(), server.log_bytes(), 0.0
    start = time.monotonic()
    latencies: list[float] = []
    while (took_s := time.monotonic() - start) < seconds or len(latencies) < _CALLS_MIN:
        if took_s > seconds + _PATIENCE_S:
            raise BenchError(f"the good client had {len(latencies)} answers in {took_s:.0f} s")
        time.sleep(min(0.1, seconds / 4))
        peak = max(peak, server.memory_mib())
        latencies += client.take()
    return {
        "cpu_percent": 100 * (server.cpu_s() - cpu_s) / took_s,
        "calls_per_s": len(latencies) / took_s,
        "p50_ms": 1e3 * statistics.median(latencies),
        "p99_ms": 1e3 * statistics.quantiles(latencies, n=100)[98],
        "memory_mib": peak,
        "log_bytes": server.log_bytes() - log_bytes,
    }


@contextmanager
def _attack(kind: str, at: str, seconds: float, keys: Path) -> Iterator[Any]:
    """Run the attacker. The yielded function waits for it and returns its number of attempts, and
    whether it ran in a cgroup of its own.
    """
    command = [sys.executable, "-m", "benchmarks.macro.attackers", kind, "--at", at]
    command += ["--seconds", str(seconds), "--keys", str(keys)]
    with _own_group() as group:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=partial(_apart, group)
        )

        assert process.stdout is not None
        process.stdout.readline()  # wait for its start

        def finish() -> tuple[int, bool]:
            out, _ = process.communicate(timeout=60)
            if process.returncode:
                raise BenchError(f"attacker {kind}: exit code {process.returncode}")
            return int(json.loads(out)["tries"]), group is not None

        try:
            yield finish
        finally:
            process.kill()
            process.wait(30)


@contextmanager
def _own_group() -> Iterator[Path | None]:
    """A new CPU cgroup; None if this user may not make one."""
    for root in _CGROUPS:
        group = root / f"trireme_bench_{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            yield group
        finally:
            with contextlib.suppress(OSError):  # its last process is still ending
                group.rmdir()
        return
    yield None


def _apart(group: Path | None) -> None:
    """Set up the attacker process before it starts."""
    if group is None:
        os.nice(19)
    else:
        (group / "cgroup.procs").write_text(str(os.getpid()))
