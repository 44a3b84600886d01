"""A compute worker: it runs the model of its script on batches of workers, until they have left.

    rpc's threads: check a request, begin to copy its tensors to the device -- [accepted] --> the
    main thread: forward, backward, answer

An answer is held until it is computed. A request that finds `QUEUE_MAX` others waiting is refused
as full, and its worker asks another compute worker.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from trireme import accelerator
from trireme.errors import (
    BadRequest,
    NotReady,
    ResourceExhausted,
    SchemaMismatch,
    TriremeError,
    Unavailable,
)
from trireme.job.cluster import Cluster
from trireme.job.compute_place import ComputePlace
from trireme.protocol.wire import need
from trireme.rpc import Deferred, Handler, Reply, Request, Server
from trireme.threads import frozen_objects
from trireme.train.compute.compute_messages import (
    METHOD,
    ComputeRequest,
    host_tensors,
)
from trireme.train.compute.compute_workers import READY
from trireme.train.compute.job_end import JobEnd
from trireme.train.compute.model_runner import ModelRunner
from trireme.train.compute.model_state import describe, digest
from trireme.train.compute.tensors import unpack
from trireme.train.loop.scoring import Loss

log = logging.getLogger("trireme.compute")

QUEUE_MAX = 64


@dataclass(frozen=True, eq=False)
class _Accepted:
    """A request whose turn will come."""

    body: dict[str, Any]
    tensors: list[Tensor]  # on the CPU
    sent: accelerator.Sent  # those that are needed on the device
    on_device: list[int]  # their numbers
    deadline: float
    answer: Deferred

    def request(self) -> ComputeRequest:
        tensors = self.tensors.copy()
        for number, tensor in zip(self.on_device, self.sent.receive(), strict=True):
            tensors[number] = tensor
        return ComputeRequest.from_wire(self.body, tensors)


@dataclass(frozen=True)
class _End:
    """After this nothing is computed. error: why not in good order."""

    reason: str
    error: TriremeError | None = None


class Service:
    """Computes requests for one model, in the thread that calls `run`.

    Attributes:
        num_batches: computed so far. busy_s: seconds that they took.

    Threads: `handlers` and `end` may be used by any.
    """

    def __init__(
        self, name: str, runner: ModelRunner, link: accelerator.Link, *, queue_max: int = QUEUE_MAX
    ) -> None:
        self._name, self._runner, self._link = name, runner, link
        self._description = describe(runner.model, runner.loss, runner.label)
        self._digest = digest(self._description)
        # Unbounded by itself, so that a signal handler may put: `_on_run` keeps the bound.
        self._accepted: queue.SimpleQueue[_Accepted | _End] = queue.SimpleQueue()
        self._queue_max = queue_max
        self._is_ending = False
        self.num_batches, self.busy_s = 0, 0.0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the computing thread."""
        return self._accepted.qsize()

    def handlers(self) -> dict[str, Handler]:
        return {METHOD: self._on_run, READY: self._on_ready}

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

    def _on_run(self, request: Request) -> Deferred:
        """One at a time: the server has one serving thread."""
        self._check_open()
        if self.num_waiting >= self._queue_max:
            full = ResourceExhausted(f"{self._name} has {self._queue_max} batches waiting: later")
            full.details = {"full": True}
            raise full
        if need(request.body, "model", str) != self._digest:
            raise self._mismatch()
        tensors = unpack(request.body.get("tensors"), request.arrays)
        stay = host_tensors(request.body)
        move = [number for number in range(len(tensors)) if number not in stay]
        sent = self._link.send([tensors[number] for number in move])
        answer = Deferred(lambda: f"{self._name} has {self.num_waiting} batches waiting")
        self._accepted.put(_Accepted(request.body, tensors, sent, move, request.deadline, answer))
        return answer

    def _mismatch(self) -> SchemaMismatch:
        error = SchemaMismatch(f"{self._name} runs another model")
        error.details = {"model": self._description}
        return error

    def run(self) -> str:
        """Compute until the end; returns its reason, or raises its error."""
        while not isinstance(item := self._accepted.get(), _End):
            if time.monotonic() < item.deadline:  # else nobody waits for it
                self._compute(item)
            del item
        if item.error is not None:
            raise item.error
        return item.reason

    def _compute(self, accepted: _Accepted) -> None:
        start = time.monotonic()
        try:
            request = accepted.request()
            body, arrays = self._runner.run(request).to_wire()
        except NotReady as error:
            accepted.answer.fail(error)
        except Exception as error:
            log.exception("%s: a batch failed", self._name)
            accepted.answer.fail(self._failure(error))
        else:
            accepted.answer.reply(Reply(body, arrays))
            self.num_batches += 1
            self.busy_s += time.monotonic() - start

    def _failure(self, error: Exception) -> TriremeError:
        kind = type(error) if isinstance(error, TriremeError) else BadRequest
        failure = kind(f"{self._name}: {type(error).__name__}: {error}")
        failure.details = {"raised": type(error).__name__}
        return failure


def serve_model(
    cluster: Cluster, place: ComputePlace, model: nn.Module, loss: Loss, label: str | None
) -> NoReturn:
    """Run the model for the workers of the job, on the device of the label, until they have left;
    then end the process with code 0. Runs in the main thread, where SIGTERM ends it after the
    batches that it has accepted.

    Raises Unavailable: the coordinator has not answered for `timeout_s`. BadRequest: an address
    that cannot be bound; no such device.
    """
    device = cluster.device(place.label)
    runner = ModelRunner(model.to(device), loss, label, device, cluster.pool)
    service = Service(place.name, runner, accelerator.link_to(device))
    server = Server(
        place.listen,
        service.handlers(),
        name=place.name,
        keys=place.server_keys,
        insecure=place.insecure,
        listen_fd=place.listen_fd,
        threads=1,
    )
    with (
        frozen_objects(),
        server,
        JobEnd(place, service.end),
        _end_on_signal(service),
    ):
        cluster.metrics.health.opened()
        log.info("%s computes on %s, listening on %s", place.name, device, server.endpoint)
        reason = service.run()
    log.info("%s ends: %s, after %d batches", place.name, reason, service.num_batches)
    cluster.close()
    raise SystemExit(0)


@contextmanager
def _end_on_signal(service: Service) -> Iterator[None]:
    """SIGTERM ends the service. Only the main thread can install a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: service.end("stopped by SIGTERM"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
