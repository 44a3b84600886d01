"""A server and its coordinator with many workers, and a map of many servers.

w1000_s100   1,000 simulated workers call one real server, of 100 that the map names

`value`: the server's CPU time per request of a step in async, microseconds: each worker pulls and
pushes, and has no keys on this server. `detail` has what else grows with workers (W) or servers
(S); `python -m benchmarks.macro.scale FILE` prints a table of it from a file of results.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.server_process import ServerProcess
from benchmarks.macro.simulated_workers import BLOCK, SimulatedWorkers
from trireme.checkpoint.worker_side.save import save_checkpoint
from trireme.metrics import AUC
from trireme.protocol.membership import Member, Pace
from trireme.protocol.wire import Push
from trireme.server.pacing import Pacing
from trireme.server.staging import Staging

_BATCH_KEYS = 512  # of a worker's step, on all servers together
_BOUND = 2
_DENSE_PARAMETERS = (2 << 30) // 100  # of a server: 2 G on a hundred
_ROWS = (
    *(
        "join_ms",
        "create_blocks_ms",
        "barrier_ms",
        "barrier_mib_out",
        "auc_s",
        "auc_cpu_s",
        "auc_mib_out",
    ),
    *("pull_empty_us", "push_empty_us", "pull_us", "push_us"),
    *("sync_step_ms", "sync_step_cpu_ms", "sync_bookkeeping_ms"),
    *("bounded_step_cpu_ms", "bounded_bookkeeping_ms"),
    *("successor_ms", "save_s", "start_mib", "end_mib"),
)


def contests(settings: Settings) -> Sequence[Contest]:
    sizes = [(w, s) for s in (1, 10, 100) for w in (10, 100, 1000)]
    return [_contest(settings, *size) for size in settings.pick(smoke=[(3, 1), (3, 2)], real=sizes)]


def _contest(settings: Settings, num_workers: int, num_servers: int) -> Contest:
    name = f"w{num_workers}_s{num_servers}"
    return Contest(
        {name: partial(_measure, settings, num_workers, num_servers)},
        [Claim(name, name, unit="us per request")],
        settings.rounds,
    )


def _measure(settings: Settings, num_workers: int, num_servers: int, number: int) -> Run:
    del number
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trireme_bench_")))
        server = stack.enter_context(ServerProcess(folder, "--insecure", listen="0.0.0.0:0"))
        detail = {"start_mib": server.memory_mib()}
        with _measured(server, detail, "join", num_workers):
            job = stack.enter_context(SimulatedWorkers(server.endpoint, num_workers, num_servers))
        num_blocks = settings.pick(smoke=5, real=_DENSE_PARAMETERS // BLOCK)
        with _measured(server, detail, "create_blocks", 1):
            job.create_blocks(num_blocks * num_servers)
        repeats = settings.pick(smoke=1, real=max(7, 3000 // num_workers))
        detail |= _Steps(server, job, repeats).figures()
        if num_servers == 1:
            start = time.monotonic()
            save_checkpoint(job.workers[0], folder / "saved", extra={}, tensors={})
            detail["save_s"] = time.monotonic() - start
        detail["end_mib"] = server.memory_mib()
    value = (detail["pull_empty_us"] + detail["push_empty_us"]) / 2
    return Run(value, detail={"workers": num_workers, "servers": num_servers, **detail})


@contextmanager
def _measured(
    server: ServerProcess, detail: dict[str, float], name: str, per: float
) -> Iterator[None]:
    """Note the server's CPU time in the block, in milliseconds divided by `per`."""
    before = server.cpu_s()
    yield
    detail[f"{name}_ms"] = 1e3 * (server.cpu_s() - before) / per


class _Steps:
    """What the workers do. CPU is the server's; wall time is that of all processes."""

    def __init__(self, server: ServerProcess, job: SimulatedWorkers, repeats: int) -> None:
        self._server, self._job, self._repeats = server, job, repeats
        self._sequence = 0

    def figures(self) -> dict[str, float]:
        detail = {**self._async(), **self._sync(), **self._bounded()}
        detail |= {**self._barrier(), **self._auc(), **_bookkeeping(self._job.num_workers)}
        with _measured(self._server, detail, "successor", 1):
            self._job.workers[-1] = self._job.join(self._job.num_workers - 1)
        return detail

    def _cpu_and_wall(self, act: Callable[[], object]) -> tuple[float, float]:
        cpu_s, start = self._server.cpu_s(), time.monotonic()
        act()
        wall_s = time.monotonic() - start
        return self._server.cpu_s() - cpu_s, wall_s

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _async(self) -> dict[str, float]:
        job, detail = self._job, {}
        self._job.send("push", job.pushes(self._next(), _BATCH_KEYS))  # makes connections and rows
        job.send("pull", job.pulls(_BATCH_KEYS))
        for num_keys, suffix in ((0, "_empty"), (_BATCH_KEYS, "")):
            spent: dict[str, list[float]] = {"pull": [], "push": []}
            for _ in range(self._repeats):
                calls = {"pull": job.pulls(num_keys), "push": job.pushes(self._next(), num_keys)}
                for purpose in spent:
                    send = partial(job.send, purpose, calls[purpose])
                    spent[purpose].append(1e6 * self._cpu_and_wall(send)[0] / job.num_workers)
            detail |= {f"{purpose}{suffix}_us": median(us) for purpose, us in spent.items()}
        return detail

    def _sync(self) -> dict[str, float]:
        job = self._job
        first = job.begin_pass(1, staged=True)
        spent = []
        for step in range(first, first + self._repeats):
            pushes = job.pushes(self._next(), 0, step=step, staged=True)
            pulls = job.pulls(0, staged=step)
            pushed = self._cpu_and_wall(partial(job.send, "push", pushes))
            pulled = self._cpu_and_wall(partial(job.send, "pull", pulls))
            spent.append((pushed[0] + pulled[0], pushed[1] + pulled[1]))
        job.leave(first + self._repeats, staged=True)
        cpu_s, wall_s = (median(seconds) for seconds in zip(*spent, strict=True))
        return {"sync_step_cpu_ms": 1e3 * cpu_s, "sync_step_ms": 1e3 * wall_s}

    def _bounded(self) -> dict[str, float]:
        job = self._job
        first = job.begin_pass(2, staged=False)
        cpu_s = 0.0
        for step in range(first, first + self._repeats):
            pulls = job.pulls(0, pace=Pace(step, step - 1, _BOUND))
            pushes = job.pushes(self._next(), 0, step=step)
            for purpose, calls in (("pull", pulls), ("push", pushes)):
                cpu_s += self._cpu_and_wall(partial(job.send, purpose, calls))[0]
        job.leave(first + self._repeats, staged=False)
        return {"bounded_step_cpu_ms": 1e3 * cpu_s / self._repeats}

    def _barrier(self) -> dict[str, float]:
        """A meeting to which workers bring nothing."""
        job = self._job
        before = job.bytes_received
        cpu_s, _ = self._cpu_and_wall(lambda: job.meet({}, []))
        num_bytes = job.bytes_received - before
        return {"barrier_ms": 1e3 * cpu_s, "barrier_mib_out": num_bytes / (1 << 20)}

    def _auc(self) -> dict[str, float]:
        """The states of all workers are added up, and worker 0 tells the figures."""
        job, metric = self._job, AUC()
        before = job.bytes_received

        def merge() -> None:
            job.sum_states(metric)
            job.meet({}, [])

        cpu_s, wall_s = self._cpu_and_wall(merge)
        mib = (job.bytes_received - before) / (1 << 20)
        return {"auc_s": wall_s, "auc_cpu_s": cpu_s, "auc_mib_out": mib}


def _bookkeeping(num_workers: int) -> dict[str, float]:
    """What a step costs a server beside its requests, without their messages: milliseconds."""
    members = {stream: Member(1, None) for stream in range(num_workers)}
    staging, pacing = Staging(lambda pushes, norm: None, lambda pushes: 0), Pacing()
    staging.set_members(1, members)
    pacing.set_members(1, members)
    empty = Push(0, 1, 1, 0, True, 0, 1, (), 0, 1, [], None)
    spent: dict[str, list[float]] = {"sync": [], "bounded": []}
    for step in range(1, 8):
        pushes = [replace(empty, stream=stream, step=step) for stream in members]
        start = time.perf_counter()
        for push in pushes:
            staging.admit(push)
            staging.stage(push)
        for stream in members:
            staging.declare(stream, step)
            staging.when_applied(stream, step, _ignore)
        staging.apply_complete()
        spent["sync"].append(time.perf_counter() - start)
        start = time.perf_counter()
        for stream in members:
            pacing.when_within(stream, Pace(step, step - 1, _BOUND), _ignore)
        for stream in members:
            pacing.record(stream, step)
        spent["bounded"].append(time.perf_counter() - start)
    return {f"{mode}_bookkeeping_ms": 1e3 * median(seconds) for mode, seconds in spent.items()}


def _ignore() -> None:
    """Nobody waits."""


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The details of results, a column each, as text."""
    columns = [result["detail"] for result in results]
    lines = [["W x S", *(f"{c['workers']} x {c['servers']}" for c in columns)]]
    lines += [[row, *(f"{c[row]:.4g}" if row in c else "" for c in columns)] for row in _ROWS]
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    )


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    print(table([line for line in map(json.loads, lines) if line["bench"] == "scale"]))
