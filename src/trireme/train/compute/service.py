"""A compute worker: it runs the model of its script on batches of workers, until they have left.

    rpc's threads: check a request, begin to copy its tensors to the device -- [accepted] --> the
    computing threads, of which the main thread is one: forward, backward, answer

An answer is held until it is computed. A request that finds `QUEUE_MAX` others waiting is refused
as full, and its worker asks another compute worker.
"""

from __future__ import annotations

import logging
import math
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from trireme import accelerator
from trireme.errors import (
    BadRequest,
    NotReady,
    ResourceExhausted,
    SchemaMismatch,
    TriremeError,
    Unavailable,
    start_thread,
)
from trireme.job.cluster import Cluster
from trireme.job.compute_place import ComputePlace
from trireme.job.heartbeat import STOP_S
from trireme.nn.stages import Stages
from trireme.protocol.wire import need
from trireme.rpc import Call, Deferred, Handler, Reply, Request, RpcClient, Server
from trireme.telemetry.instruments import Gauge
from trireme.telemetry.registry import Registry
from trireme.threads import frozen_objects, torch_threads
from trireme.train.compute.compute_workers import COMPUTED_S, READY
from trireme.train.compute.kept_graphs import KeptGraphs
from trireme.train.compute.model_runner import Method, ModelRunner
from trireme.train.compute.model_state import describe, digest
from trireme.train.compute.stage_runner import StageRunner
from trireme.train.compute.tensors import unpack
from trireme.train.loop.scoring import Scorer

log = logging.getLogger("trireme.compute")

QUEUE_MAX = 64
_SIGNALLED = "stopped by SIGTERM"


@dataclass(frozen=True, eq=False)
class _Accepted:
    """A request whose turn will come."""

    method: Method
    body: dict[str, Any]
    tensors: list[Tensor]  # on the CPU
    sent: accelerator.Sent  # those that are needed on the device
    on_device: list[int]  # their numbers
    deadline: float
    answer: Deferred

    def run(self) -> Reply:
        tensors = self.tensors.copy()
        for number, tensor in zip(self.on_device, self.sent.receive(), strict=True):
            tensors[number] = tensor
        return Reply(*self.method.run(self.body, tensors))


@dataclass(frozen=True)
class _End:
    """After this nothing is computed. error: why not in good order."""

    reason: str
    error: TriremeError | None = None


class Service:
    """Computes requests for one model, in the thread that calls `run` and those that it starts.

    Attributes:
        num_batches: computed so far. busy_s: seconds that they took. idle_s: seconds without one.
            Seconds are those of all threads.

    Threads: `handlers` and `end` may be used by any.
    """

    def __init__(
        self,
        name: str,
        runner: ModelRunner | StageRunner,
        link: accelerator.Link,
        *,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        self._name, self._runner, self._link = name, runner, link
        self._description = describe(runner.model, runner.scorer)
        self._digest = digest(self._description)
        # Unbounded by itself, so that a signal handler may put: `_on_run` keeps the bound.
        self._accepted: queue.SimpleQueue[_Accepted | _End] = queue.SimpleQueue()
        self._queue_max = queue_max
        self._is_ending = False
        self._lock = threading.Lock()  # of the numbers
        self.num_batches, self.busy_s, self.idle_s = 0, 0.0, 0.0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the computing thread."""
        return self._accepted.qsize()

    def handlers(self) -> dict[str, Handler]:
        queued = {
            name: partial(self._on_run, method) for name, method in self._runner.methods().items()
        }
        return {**queued, **self._runner.handlers(), READY: self._on_ready}

    def end(self, reason: str, error: TriremeError | None = None) -> None:
        """Accept no more requests, and let `run` end after those that are accepted."""
        self._is_ending = True
        self._accepted.put(_End(reason, error))

    def _on_ready(self, _: Request) -> Reply:
        self._check_open()
        return Reply()

    def _check_open(self) -> None:
        if self._is_ending:
            raise Unavailable(f"{self._name} ends")

    def _on_run(self, method: Method, request: Request) -> Deferred:
        """One at a time: the server has one serving thread."""
        self._check_open()
        if self.num_waiting >= self._queue_max:
            full = ResourceExhausted(f"{self._name} has {self._queue_max} batches waiting: later")
            full.details = {"full": True}
            raise full
        if need(request.body, "model", str) != self._digest:
            error = SchemaMismatch(f"{self._name} runs another model")
            error.details = {"model": self._description}
            raise error
        tensors = unpack(request.body.get("tensors"), request.arrays)
        stay = method.host_tensors(request.body)
        move = [number for number in range(len(tensors)) if number not in stay]
        sent = self._link.send([tensors[number] for number in move])
        answer = Deferred(lambda: f"{self._name} has {self.num_waiting} batches waiting")
        self._accepted.put(
            _Accepted(method, request.body, tensors, sent, move, request.deadline, answer)
        )
        return answer

    def run(self) -> str:
        """Compute until the end; returns its reason, or raises its error."""
        num_threads = self._runner.num_threads
        others = [
            threading.Thread(target=self._compute_all, name=f"trireme-compute-{i}", daemon=True)
            for i in range(1, num_threads)
        ]
        with torch_threads(max(1, torch.get_num_threads() // num_threads)):
            for thread in others:
                start_thread(thread)
            end = self._compute_all()
            for thread in others:
                thread.join()
        if end.error is not None:
            raise end.error
        return end.reason

    def _compute_all(self) -> _End:
        while not isinstance(item := self._next(), _End):
            if time.monotonic() < item.deadline:  # else nobody waits for it
                self._compute(item)
            del item
        self._accepted.put(item)  # for the other threads
        return item

    def _next(self) -> _Accepted | _End:
        start = time.monotonic()
        item = self._accepted.get()
        with self._lock:
            self.idle_s += time.monotonic() - start
        return item

    def _compute(self, accepted: _Accepted) -> None:
        start = time.monotonic()
        try:
            reply = accepted.run()
        except NotReady as error:
            accepted.answer.fail(error)
        except Exception as error:
            log.exception("%s: a batch failed", self._name)
            kind = type(error) if isinstance(error, TriremeError) else BadRequest
            failure = kind(f"{self._name}: {type(error).__name__}: {error}")
            failure.details = {"raised": type(error).__name__}
            accepted.answer.fail(failure)
        else:
            seconds = time.monotonic() - start
            accepted.answer.reply(Reply({**reply.body, COMPUTED_S: seconds}, reply.arrays))
            with self._lock:
                self.num_batches += 1
                self.busy_s += seconds


def watch_service(registry: Registry, service: Service) -> None:
    """Add gauges of a compute worker."""
    gauges: dict[str, tuple[str, Callable[[], float]]] = {
        "trireme_compute_batches_total": (
            "Batches that this compute worker has computed.",
            lambda: service.num_batches,
        ),
        "trireme_compute_busy_seconds_total": ("Time that they took.", lambda: service.busy_s),
        "trireme_compute_idle_seconds_total": (
            "Time in which there was no batch: it waited for workers.",
            lambda: service.idle_s,
        ),
        "trireme_compute_queue_batches": (
            "Batches that wait to be computed.",
            lambda: service.num_waiting,
        ),
    }
    for name, (documentation, read) in gauges.items():
        registry.register(Gauge(name, documentation, read))


def serve_model(
    cluster: Cluster, place: ComputePlace, model: nn.Module, scorer: Scorer, *, in_flight: int
) -> NoReturn:
    """Run the model for the workers of the job, on the device of the label, until they have left;
    then end the process with code 0. Runs in the main thread, where SIGTERM ends it with code
    `place.stopped_code`, see JobEnd, after the batches that it has accepted.

    in_flight: batches that a worker sends at a time. On the CPU as many are computed at a time, as
        far as torch has threads, since one thread for a batch wastes less than several do.

    Raises Unavailable: the coordinator has not answered for `timeout_s`. BadRequest: an address
    that cannot be bound; no such device.
    """
    device = cluster.device(place.label)
    link = accelerator.link_to(device)
    runner: ModelRunner | StageRunner
    model.to(device)
    if isinstance(model, Stages):
        graphs = KeptGraphs(place.timeout_s)
        runner = StageRunner(model, scorer, device, cluster.pool, graphs)
    else:
        threads = min(in_flight, torch.get_num_threads()) if link.is_host else 1
        runner = ModelRunner(model, scorer, device, cluster.pool, threads=threads)
    service = Service(place.name, runner, link)
    watch_service(cluster.metrics.registry, service)
    server = Server(
        place.listen,
        service.handlers(),
        name=place.name,
        keys=place.server_keys,
        insecure=place.insecure,
        listen_fd=place.listen_fd,
        threads=1,
    )
    with frozen_objects(), server, JobEnd(place, service.end):
        cluster.metrics.health.opened()
        log.info("%s computes on %s, listening on %s", place.name, device, server.endpoint)
        reason = service.run()
    log.info("%s ends: %s, after %d batches", place.name, reason, service.num_batches)
    cluster.close()
    raise SystemExit(place.stopped_code if reason == _SIGNALLED else 0)


PERIOD_S = 2.0
_STOP_S = STOP_S + PERIOD_S  # until the coordinator, which workers tell that they stop, says so


class JobEnd:
    """Asks the coordinator, in a thread, as long as the `with` block runs. The answer comes when
    the job is over, or after a period, so that a coordinator that has gone is noticed.

    After SIGTERM it is the end when workers have not said for _STOP_S that all stop: whoever ends a
    job may signal all its processes at once. After a second one it is the end at once.

    end: called with the reason; and the error if no coordinator has answered for `place.timeout_s`,
        or it refuses this process.
    """

    def __init__(
        self, place: ComputePlace, end: Callable[[str, TriremeError | None], None]
    ) -> None:
        self._place, self._end = place, end
        self._stop, self._ends_at = threading.Event(), math.inf
        self._client = RpcClient(name=place.name, keys=place.client_keys, on_wait=lambda _: None)
        self._thread = threading.Thread(
            target=lambda: end(*self._wait()), name="trireme-job-end", daemon=True
        )
        self._handler: Any = signal.SIG_DFL

    def __enter__(self) -> JobEnd:
        start_thread(self._thread)
        if threading.current_thread() is threading.main_thread():  # only it can install one
            self._handler = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _on_signal(self, *_: object) -> None:
        if self._ends_at < math.inf:
            self._end(_SIGNALLED, None)
        else:  # no log line: the signal may have interrupted the write of another
            self._ends_at = time.monotonic() + _STOP_S

    def _wait(self) -> tuple[str, TriremeError | None]:
        address, timeout_s = self._place.coordinator, self._place.timeout_s
        period_s = min(PERIOD_S, timeout_s)
        heard, who = time.monotonic(), {"within_s": period_s, "worker": 0}
        is_told = False
        while not self._stop.is_set() and time.monotonic() < self._ends_at:
            if self._ends_at < math.inf and not is_told:
                is_told = True
                log.info("SIGTERM: ends in %g s, or with the workers if these stop", _STOP_S)
            is_alive, is_over = self._client.call_all(
                [Call(address, "server.attendance", who), Call(address, "server.end")],
                timeout_s=period_s,
                return_errors=True,
            )
            if isinstance(is_over, Reply):
                return "all workers have left", None
            if isinstance(is_alive, Reply):
                heard = time.monotonic()
                if is_alive.body["stops"] and self._ends_at < math.inf:
                    self._ends_at = heard + _STOP_S
                continue
            if not is_alive.retry:
                return "refused", is_alive
            if time.monotonic() - heard > timeout_s:
                silence = f"no answer for {timeout_s:g} s: {is_alive}"
                return "silence", Unavailable(f"{self._place.name}: {silence}")
            self._stop.wait(0.1)
        return _SIGNALLED, None
