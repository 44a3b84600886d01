"""Many workers of one job in this process, which call one real server over real connections.

Each is a `WorkerClient`, which makes the messages. Those of all workers are then sent at once, each
over the worker's own connection: a worker reaches the server by an address of its own
(127.0.0.1, 127.0.0.2, ...). The job's other servers are named in the map only, and answered here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.harness import BenchError
from trireme import Table, _core, initializer, optim
from trireme.metrics import AUC
from trireme.optim import values_of_group
from trireme.protocol.block_messages import ids_to_wire, specs_to_wire
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.membership import Pace
from trireme.protocol.wire import ALL, SUM
from trireme.rpc import Call, Ended, Limits, Reply, RpcClient
from trireme.train.gather_arrays import MEETING_BYTES_MAX
from trireme.worker.client import WorkerClient
from trireme.worker.gradients import PushHeader, TableGradient

TIMEOUT_S = 300.0
DIM = 8
BLOCK = 4096
TABLE = Table("rows", dim=DIM, optimizer=optim.SGD(), initializer=initializer.Constant(0.0))
_ROWS = TABLE.class_id
_VALUES = values_of_group(TABLE.optimizer.group(), 1)


class _Captured(Exception):
    """The calls that a worker was about to make."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls


class _WorkerTransport:
    """One worker's connection for one purpose."""

    def __init__(self, job: SimulatedWorkers, worker: int, purpose: str) -> None:
        self._job, self._worker, self._purpose = job, worker, purpose

    def call_all(self, calls: Sequence[Call], *, timeout_s: float) -> list[Reply]:
        if self._job.is_capturing:
            raise _Captured(calls)
        replies = [_answer_for_other_server(call) for call in calls]
        real = [i for i, call in enumerate(calls) if self._job.is_real(call)]
        made = [self._job.call_of(self._worker, calls[i]) for i in real]
        answers = self._job.client(self._purpose).call_all(made, timeout_s=timeout_s)
        for i, answer in zip(real, answers, strict=True):
            replies[i] = answer
        return replies

    def close(self) -> None:
        """The connections end with the job."""


def _answer_for_other_server(call: Call) -> Reply:
    is_map = call.method == "ps.map"
    return Reply({"state": f"state of {call.endpoint}", "version": 1 << 32} if is_map else {})


class SimulatedWorkers:
    """The workers of a job of `num_servers` servers, of which that at `endpoint` is real. It must
    listen at all addresses of the loopback device. They join one after the other.
    """

    def __init__(self, endpoint: str, num_workers: int, num_servers: int) -> None:
        self._port = endpoint.rpartition(":")[2]
        others = [f"127.255.255.{1 + server}:{self._port}" for server in range(num_servers - 1)]
        self._servers = [f"127.0.0.1:{self._port}", *others]
        self._clients: dict[str, RpcClient] = {}
        self._pool = _core.Pool(1)
        self.num_workers, self.num_servers = num_workers, num_servers
        self.bytes_received = 0
        self.is_capturing = False
        self.workers = [self.join(worker) for worker in range(num_workers)]
        self.workers[0].create_table(TABLE.schema)

    def join(self, worker: int) -> WorkerClient:
        return WorkerClient(
            self._servers,
            lambda purpose: _WorkerTransport(self, worker, purpose),
            worker=worker,
            num_workers=self.num_workers,
            pool=self._pool,
            timeout_s=TIMEOUT_S,
        )

    def __enter__(self) -> SimulatedWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    # ---- calls ----

    def client(self, purpose: str) -> RpcClient:
        """The connections of all workers for one purpose."""
        if purpose not in self._clients:  # clones would share one context, and its sockets
            limits = Limits(handshake_timeout_s=60.0)
            self._clients[purpose] = RpcClient(
                name=purpose, limits=limits, observe=self._count, on_wait=lambda line: None
            )
        return self._clients[purpose]

    def _count(self, ended: Ended) -> None:
        self.bytes_received += ended.num_bytes_received

    def is_real(self, call: Call) -> bool:
        return call.endpoint == self._servers[0]

    def call_of(self, worker: int, call: Call) -> Call:
        """The call, over the worker's own connection."""
        address = f"127.0.{worker // 250}.{1 + worker % 250}:{self._port}"
        return Call(address, call.method, call.body, call.arrays)

    def capture(self, act: Callable[[WorkerClient], object]) -> list[Call]:
        """What each worker sends to the real server when it begins to `act`."""
        with self._capturing():
            return [self._captured(worker, act) for worker in self.workers]

    def _captured(self, worker: WorkerClient, act: Callable[[WorkerClient], object]) -> Call:
        try:
            act(worker)
        except _Captured as captured:
            [call] = filter(self.is_real, captured.calls)
            return self.call_of(worker.worker, call)
        raise BenchError(f"expected worker {worker.worker} to call servers, found that it did not")

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def send(self, purpose: str, calls: Sequence[Call]) -> list[Reply]:
        """Make the calls at once."""
        return self.client(purpose).call_all(calls, timeout_s=TIMEOUT_S)

    # ---- what workers do ----

    def begin_pass(self, number: int, *, staged: bool) -> int:
        """All begin a pass; returns its first step."""
        body = {"pass": number, "together": True, "note": []}
        begun = self.send(
            "control", self.capture(lambda w: w.coordinator.call("coord.begin_pass", body))
        )
        group = {**begun[0].body["group"], "staged": staged}
        groups = self.capture(lambda w: w.servers.everywhere("ps.group", group))
        self.send("control", groups)
        for worker in self.workers:
            worker.script.number = number
        return int(group["members"][0][1])

    def leave(self, step: int, *, staged: bool) -> None:
        """All leave the pass, one after the other."""
        for worker in self.workers:
            left = worker.coordinator.call("coord.leave", {"step": step}).body["group"]
        self.send(
            "control",
            self.capture(lambda w: w.servers.everywhere("ps.group", {**left, "staged": staged})),
        )

    def add_blocks(self, number: int) -> None:
        """Worker 0 adds so many blocks of BLOCK parameters to the map; the others then have it."""
        ids = [f"layers.{n // 1024}.weight@{n % 1024 * BLOCK}" for n in range(number)]
        first = self.workers[0]
        body, arrays = {"are_placed": False}, ids_to_wire(ids)
        first.servers.adopt(first.coordinator.call("coord.add_blocks", body, arrays))
        for worker in self.workers:
            worker.servers.map = first.servers.map

    def create_blocks(self, number: int) -> None:
        """Worker 0 adds as many, and makes those of the real server."""
        self.add_blocks(number)
        worker = self.workers[0]
        params = (block_id.split("@") for block_id in worker.servers.map.blocks_of(0))
        specs = [BlockSpec(param, int(start), BLOCK, 0) for param, start in params]
        shapes, arrays = specs_to_wire(specs)
        body = {"map": worker.servers.map.version, "optimizer": "Adam", "groups": [{"lr": 1e-3}]}
        values = np.zeros(BLOCK * len(specs), np.float32)
        call = Call(
            self._servers[0], "ps.create_blocks", body | {"shapes": shapes}, [*arrays, values]
        )
        self.send("control", [self.call_of(0, call)])

    def pulls(self, num_keys: int, *, staged: int = 0, pace: Pace | None = None) -> list[Call]:
        keys = {_ROWS: self._keys(num_keys)}
        return self.capture(lambda worker: worker.pull(keys, staged=staged, pace=pace))

    def pushes(
        self, sequence: int, num_keys: int, *, step: int = 0, staged: bool = False
    ) -> list[Call]:
        keys = self._keys(num_keys)
        gradients = {_ROWS: TableGradient(keys, torch.zeros(len(keys), DIM), _VALUES)}
        header = PushHeader(sequence, step, [], examples=1)
        return self.capture(lambda worker: worker.push(header, gradients, staged=staged))

    def sum_states(self, metric: AUC) -> None:
        """All bring the state of this metric, which the coordinator adds up."""
        state = metric.state()
        arrays = [state[entry] for entry in metric.SUMMED]
        at_a_time = MEETING_BYTES_MAX // self.num_workers // sum(array.itemsize for array in arrays)
        for begin in range(0, len(arrays[0]), at_a_time):
            self.meet({}, [array[begin : begin + at_a_time] for array in arrays], to=SUM)

    def meet(self, body: dict[str, Any], arrays: Sequence[Any], *, to: str = ALL) -> None:
        meetings = self.capture(lambda worker: worker.coordinator.gather(body, arrays, to=to))
        self.send("control", meetings)

    def _keys(self, num_keys: int) -> Any:
        return _core.unique(np.arange(num_keys, dtype=np.uint64), self._pool)[0]
