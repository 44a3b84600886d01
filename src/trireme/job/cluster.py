"""The cluster object: everything that one process holds of a running job. The default one is the
only module state.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from trireme import _core, rpc
from trireme.coordinator.coordinator import Coordinator
from trireme.errors import BadRequest, DeadlineExceeded, NotReady, Stopped, TriremeError
from trireme.job.handlers import handlers_of
from trireme.protocol.columns import KeyColumns
from trireme.protocol.routing import Floats, Keys
from trireme.server.attendance import Attendance
from trireme.server.monitoring import watch_state
from trireme.server.state import ServerState
from trireme.table import Table
from trireme.telemetry.endpoint import Endpoint
from trireme.telemetry.health import STARTING, Health
from trireme.telemetry.instruments import Gauge
from trireme.telemetry.registry import new_registry
from trireme.threads import start_pool
from trireme.worker.client import Client, Pulled
from trireme.worker.monitoring import CallMetrics
from trireme.worker.transport import LOCAL, LocalTransport, Transport

log = logging.getLogger("trireme")

PENDING_MAX = 1024
READY_MESSAGE_S = 3.0
HEARTBEAT_S_MAX = 5.0
_BEATS = 6
"""Signs of life within a client's timeout; within a silence where streams are shared out."""
_SILENCES = 4
"""Of these within a client's timeout, so that streams change hands before others give up."""


@dataclass(frozen=True, eq=False)
class LookedUp:
    """Rows of one table that a forward pass has read.

    Attributes:
        keys: (K,) distinct.
        rows: (K, W), a leaf; its gradient, times `scale`, is the push.
        scale: (K, 1), or None for 1.
        columns: what the push says of the keys besides (trireme.protocol.columns).
    """

    table: Table
    keys: Keys
    rows: Tensor
    scale: Tensor | None = None
    columns: KeyColumns = field(default_factory=dict)

    def gradients(self) -> Floats | None:
        """(K, D): of the weights alone, without the shows and clicks that were pulled; None if the
        loss did not depend on the rows.
        """
        if self.rows.grad is None:
            return None
        grad_KW = self.rows.grad if self.scale is None else self.rows.grad * self.scale
        pushed: Floats = grad_KW[:, self.table.width - self.table.dim :].contiguous().numpy()
        return pushed


@dataclass
class Lookups:
    """Rows that forward passes have read since the last step: what the next push must carry.

    Attributes:
        versions: per server, the push counter of the oldest pull among them; gives the staleness.
        examples: of the largest batch among them.
    """

    entries: list[LookedUp] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    examples: int = 0

    def add(self, looked_up: LookedUp, examples: int = 0) -> None:
        """Raises BadRequest when so many have piled up that steps must be missing."""
        if len(self.entries) >= PENDING_MAX:
            raise BadRequest(
                f"forward: {PENDING_MAX} lookups since the last optimizer.step();"
                " use model.eval() or torch.no_grad() to look up without training"
            )
        self.entries.append(looked_up)
        self.examples = max(self.examples, examples)

    def pulled_at(self, versions: Sequence[int]) -> None:
        if not self.versions:
            self.versions = list(versions)
        else:
            self.versions = [min(a, b) for a, b in zip(self.versions, versions, strict=True)]

    def take(self) -> Lookups:
        """What has gathered, leaving nothing."""
        taken = Lookups(self.entries, self.versions, self.examples)
        self.entries, self.versions, self.examples = [], [], 0
        return taken


class TrainingSteps(Protocol):
    """What a cluster needs of the optimizer attached to it, to pull for the right step."""

    def pull(self, keys: Mapping[str, Keys], *, blocks: bool, number: int | None) -> Pulled:
        """A training pull, which waits for what the mode says."""

    def data_time(self) -> int:
        """What pushes and pulls carry as data time, in seconds; 0: the data has none."""


class Telling:
    """What this process tells of itself, as a worker: see trireme.worker.monitoring.

    Attributes:
        calls: counts the calls of its clients.
        num_steps, num_examples: that training has pushed; written by one thread at a time.
        queues: how much waits in each queue of the training loop, by its name.
    """

    def __init__(self, role: str, metrics: str | None, name: str = "worker") -> None:
        self.registry, self.health = new_registry(role, name), Health()
        self.calls = CallMetrics(self.registry)
        self.num_steps = self.num_examples = 0
        self.queues: dict[str, Callable[[], int]] = {}
        for gauge in self._gauges():
            self.registry.register(gauge)
        self._endpoint: Endpoint | None = None
        if metrics is not None:
            self._endpoint = Endpoint(metrics, self.registry, self.health).start()

    def _gauges(self) -> list[Gauge]:
        return [
            Gauge(
                "trireme_worker_steps_total",
                "Steps whose gradients this worker has pushed, or is about to.",
                lambda: {(): self.num_steps},
                is_counter=True,
            ),
            Gauge(
                "trireme_worker_examples_total",
                "Examples of these steps.",
                lambda: {(): self.num_examples},
                is_counter=True,
            ),
            Gauge(
                "trireme_worker_queue_depth",
                "Batches read and planned ahead (planned), with their rows (pulled), and pushes"
                " behind the training loop (pushes).",
                lambda: {(name,): read() for name, read in self.queues.copy().items()},
                ["queue"],
            ),
        ]

    def count_step(self, examples: int) -> None:
        self.num_steps += 1
        self.num_examples += examples

    def report(self) -> dict[str, int]:
        """What the servers hear of it with its signs of life, for `trireme top`."""
        depths = {name: read() for name, read in self.queues.copy().items()}
        return {"retries": self.calls.num_retries(), **depths}

    def waits(self, client: str, line: str) -> None:
        """A client waits for a peer, as the line says; "": no more."""
        if line:
            self.health.hinder(client, line)
        else:
            self.health.clear(client)

    @property
    def url(self) -> str | None:
        """Where /metrics and /healthz are; None: nowhere."""
        return None if self._endpoint is None else self._endpoint.url

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.stop()


class Cluster:
    """One process' part in a job.

    Attributes:
        client: calls to the servers. pool: threads for the core.
        worker, num_workers: place among the workers that the job begins with.
        num_streams: that workers share out among themselves; 0: each worker has its own.
        is_embedded: the tables are in this process.
        keys, insecure: how workers talk to each other: with these keys, or without keys beyond
            loopback all the same.
        telling: what it tells Prometheus.
        is_prefetching: a pipeline pulls for the coming steps, dense parameters included; step()
    need not.
        asked: whether the job is to stop, and why.
    """

    def __init__(
        self,
        client: Client,
        pool: _core.Pool,
        *,
        is_embedded: bool,
        heartbeat: Transport | None = None,
        keys: rpc.ClientKeys | None = None,
        insecure: bool = False,
        telling: Telling | None = None,
    ) -> None:
        self.client, self.pool = client, pool
        self.telling = telling or Telling("embedded" if is_embedded else "worker", None)
        self.is_embedded = is_embedded
        self.keys, self.insecure = keys, insecure
        self.worker, self.num_workers = client.worker, client.num_workers
        self.num_streams = client.num_streams
        self._pending = Lookups()
        self._of_thread = threading.local()
        self.steps: TrainingSteps | None = None
        self.is_prefetching = False
        self._closing: list[Callable[[], None]] = []
        self._running: list[Callable[[], None]] = []
        self._closed = False
        self.asked, report = Asked(), self.telling.report
        self._heartbeat = (
            None if heartbeat is None else _Heartbeat(client, heartbeat, report, self.asked)
        )
        self.telling.health.opened()
        _open.add(self)

    @property
    def streams_per_pass(self) -> int:
        """Into how many streams the data of a pass is cut."""
        return self.num_streams or self.num_workers

    @property
    def pending(self) -> Lookups:
        """What the next push of the calling thread must carry."""
        pending: Lookups = getattr(self._of_thread, "pending", self._pending)
        return pending

    def use_pending(self, pending: Lookups) -> None:
        """From now on the calling thread, which trains a replica, gathers there."""
        self._of_thread.pending = pending

    def ensure_table(self, table: Table) -> None:
        """Make sure that the servers have the table. Raises SchemaMismatch if they have another of
        that name.
        """
        self.client.create_table(table.schema)

    def pull(
        self,
        keys: Mapping[str, Keys],
        *,
        blocks: bool = False,
        training: bool = False,
        number: int | None = None,
    ) -> Pulled:
        """Fetch current rows; for training, as the mode says.

        number: of the batch in the run of batches of which each makes a step, from 0; None: the
            rows are for the next step.
        """
        if self.steps is None:
            return self.client.pull(keys, blocks=blocks)
        if training:
            return self.steps.pull(keys, blocks=blocks, number=number)
        return self.client.pull(keys, blocks=blocks, time=self.steps.data_time())

    def on_close(self, action: Callable[[], None]) -> None:
        """Run `action` when the cluster closes, the last one first; not if it is abandoned."""
        self._closing.append(action)

    def add_running(self, stop: Callable[[], None]) -> None:
        """`stop` ends threads that use the client: called before the client closes, whatever the
        reason, the last one first, unless `remove_running` took it back.
        """
        self._running.append(stop)

    def remove_running(self, stop: Callable[[], None]) -> None:
        if stop in self._running:
            self._running.remove(stop)

    def close(self) -> None:
        """Finish what is in flight, say goodbye to the servers, close the connections. Twice is
        once.

        Raises:
            What finishing raised: the last pushes may be lost.
        """
        if self._closed:
            return
        self._closed = True
        try:
            for action in reversed(self._closing):
                action()
        except BaseException:
            self._end()
            raise
        self._end(goodbye=True)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def abandon(self) -> None:
        """Close without goodbye, as after an error: the servers keep waiting for a successor, up to
        their deadline.
        """
        if not self._closed:
            self._closed = True
            self._end()

    def _end(self, *, goodbye: bool = False) -> None:
        _open.discard(self)
        _forget(self)
        for stop in reversed(self._running.copy()):
            stop()
        if self._heartbeat is not None:
            self._heartbeat.stop()
            if goodbye:
                self._say_goodbye(self._heartbeat.body)
        self.client.close()
        self.telling.close()

    def _say_goodbye(self, body: dict[str, int]) -> None:
        """What cannot be said is no loss to this worker: all its pushes have been applied."""
        try:
            self.client.say_goodbye(body)
        except TriremeError as error:
            log.warning("worker %d ends without goodbye: %s", self.worker, error)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Stopped):
            self.close()
        else:
            self.abandon()


class Asked:
    """Whether training is to stop after a step: this worker was asked to, or another one.

    Attributes:
        reason: why; empty: it is not.
        alone: this worker is to leave, and others go on for it.
    """

    def __init__(self) -> None:
        self.reason, self.alone = "", False


class _Heartbeat:
    """Tells every server now and then that this worker lives, and that it may still be waited
    for; whether all are to stop, in both directions.
    """

    def __init__(
        self,
        client: Client,
        transport: Transport,
        report: Callable[[], Mapping[str, int]],
        asked: Asked,
    ) -> None:
        self._client, self._transport, self._report = client, transport, report
        self._asked = asked
        self.body = {
            "worker": client.worker,
            "num_workers": client.num_workers,
            "incarnation": client.incarnation,
        }
        if client.is_late:
            self.body["late"] = True
        beats = _SILENCES * _BEATS if client.num_streams else _BEATS
        self._period_s = min(max(client.timeout_s / beats, 0.2), HEARTBEAT_S_MAX)
        self._stop = threading.Event()
        self._silent: set[int] = set()
        self._said: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="trireme-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            servers = self._client.map.servers
            stops = "" if self._asked.alone else self._asked.reason
            body = {**self.body, "report": self._report(), "stops": stops}
            calls = [rpc.Call(server, "server.alive", body, []) for server in servers]
            within = {"within_s": 1.5 * self._period_s}
            calls.append(rpc.Call(servers[0], "server.attendance", within, []))
            try:
                *_, attendance = self._transport.call_all(calls, timeout_s=self._period_s)
                self._say_silent(attendance.body)
                if stops := str(attendance.body["stops"]):  # or SIGTERM meanwhile would be undone
                    self._asked.reason = self._asked.reason or stops
            except TriremeError as error:
                # The calls that matter have deadlines of their own and say more.
                log.debug("heartbeat: %s", error)
            if self._stop.wait(self._period_s):
                break
        self._transport.close()

    def _say_silent(self, attendance: Mapping[str, list[int]]) -> None:
        """Say whom this worker may be waiting for, and when they are back."""
        silent = set(attendance["silent"]) - set(attendance["gone"])
        lasting = silent & self._silent  # one that is late once may just be late
        if new := sorted(lasting - self._said):
            log.warning("workers %s are not heard; whoever needs them waits", new)
        if back := sorted(self._said - silent):
            log.info("workers %s are heard again, or have ended", back)
        self._silent, self._said = silent, (self._said & silent) | lasting

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def embedded(
    *, streams: int = 0, threads: int = 0, timeout_s: float = 60.0, metrics: str | None = None
) -> Cluster:
    """A cluster of one process: worker, tables and coordinator together.

    Args:
        streams: that it trains on one after the other in each pass; 0: its data is one.
        metrics: "[host:]port" to answer /metrics and /healthz at.
    """
    telling = Telling("embedded", metrics)
    pool = start_pool(threads)
    server = ServerState(pool)
    watch_state(telling.registry, server)
    transport = LocalTransport(
        handlers_of(server, Coordinator(), Attendance().handlers(), Path("/")),
        telling.calls.observe,
    )
    client = Client(
        [LOCAL],
        lambda _: transport,
        worker=0,
        num_workers=1,
        streams=streams,
        pool=pool,
        timeout_s=timeout_s,
    )
    return Cluster(client, pool, is_embedded=True, telling=telling)


def connect(
    servers: Sequence[str],
    *,
    worker: int = 0,
    num_workers: int = 0,
    streams: int = 0,
    late: bool = False,
    threads: int = 0,
    timeout_s: float = 60.0,
    keys: rpc.ClientKeys | None = None,
    insecure: bool = False,
    metrics: str | None = None,
) -> Cluster:
    """Join a job as one of its workers; waits for servers that are not up yet.

    Args:
        worker, num_workers: its place; nothing if it comes late.
        streams: that the workers share out among themselves; 0: each has its own.
        late: the job shares out streams and runs already: take part from its next streams on.
        insecure: this worker, too, may listen beyond loopback without keys (global_shuffle).
        metrics: "[host:]port" to answer /metrics and /healthz at.

    Raises:
        DeadlineExceeded: some servers did not come up within `timeout_s`; the message lists them.
        NotAdmitted: a server does not list this worker's key.
    """
    name = "late worker" if late else f"worker {worker}"
    telling = Telling("worker", metrics, name)
    base = rpc.Client(name=name, keys=keys, watch=telling.waits, observe=telling.calls.observe)

    def transport(purpose: str) -> rpc.Client:
        return base.clone(f"{name} ({purpose})")

    try:
        telling.health.hinder(STARTING, f"waiting for servers {', '.join(servers)}")
        wait_for_servers(servers, base, timeout_s)
        pool = start_pool(threads)
        client = Client(
            servers,
            transport,
            worker=worker,
            num_workers=num_workers,
            streams=streams,
            late=late,
            silence_s=timeout_s / _SILENCES,
            pool=pool,
            timeout_s=timeout_s,
        )
    except BaseException:
        base.close()
        telling.close()
        raise
    return Cluster(
        client,
        pool,
        is_embedded=False,
        heartbeat=base,
        keys=keys,
        insecure=insecure,
        telling=telling,
    )


def wait_for_servers(servers: Sequence[str], client: rpc.Client, timeout_s: float) -> None:
    """Return as soon as every server answers; say every 3 s who is missing."""
    deadline = time.monotonic() + timeout_s
    missing, reasons = list(servers), list[str]()
    while (left_s := deadline - time.monotonic()) > 0:
        replies = client.call_all(
            [rpc.Call(server, "server.ready") for server in missing],
            timeout_s=min(READY_MESSAGE_S, left_s),
            return_errors=True,
        )
        answers = dict(zip(missing, replies, strict=True))
        for answer in answers.values():
            if isinstance(answer, TriremeError) and not answer.retry:
                raise answer
        reasons = [str(answer) for answer in answers.values() if isinstance(answer, TriremeError)]
        missing = [server for server, answer in answers.items() if isinstance(answer, TriremeError)]
        if not missing:
            return
        if time.monotonic() < deadline:
            log.warning("server not ready, still waiting; not ready endpoints: %s", missing)
    raise DeadlineExceeded(
        f"init: after {timeout_s:g} s not ready endpoints: {missing}: {'; '.join(reasons)}"
    )


# ---- the default cluster ----

_default: Cluster | None = None
_open: weakref.WeakSet[Cluster] = weakref.WeakSet()


def default() -> Cluster:
    """The cluster that `trireme.init()` made. Raises NotReady if it has not been called."""
    if _default is None:
        raise NotReady("trireme: no cluster yet; call trireme.init() first")
    return _default


def is_default_set() -> bool:
    """Whether `trireme.init()` has made a cluster that is still open."""
    return _default is not None


def set_default(cluster: Cluster) -> None:
    global _default
    _default = cluster


def _forget(cluster: Cluster) -> None:
    global _default
    if _default is cluster:
        _default = None


@atexit.register
def _close_all() -> None:
    """A script that ends without closing still says goodbye, so that servers end too; one that
    failed does not. When finishing fails, so does the script: pushes may be lost.
    """
    has_failed = getattr(sys, "last_value", None) is not None
    is_finished = True
    for cluster in list(_open):
        if has_failed:
            cluster.abandon()
            continue
        try:
            cluster.close()
        except BaseException:  # noqa: BLE001 the interpreter would print it and exit with 0
            traceback.print_exc()
            is_finished = False
    if not is_finished:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
