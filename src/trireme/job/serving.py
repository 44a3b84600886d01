"""A server process: its state, the coordinator (used on server 0 only), and the end of the job.

A server needs only an address to listen on: the first worker brings the list of servers, the number
of workers and the schemas. It ends when all workers have said goodbye, or with an error when those
that have not are silent for too long.
"""

import itertools
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trireme.coordinator.coordinator import Coordinator
from trireme.errors import BadRequest
from trireme.job.durability import Durability, kept
from trireme.job.handlers import handlers_of
from trireme.job.heartbeat import STOP_S
from trireme.rpc import Server, ServerKeys
from trireme.server.attendance import Attendance
from trireme.server.monitoring import RequestMetrics, watch_state, watch_workers
from trireme.server.row_tier import RowTier
from trireme.server.server_limits import ServerLimits
from trireme.server.state import ServerState
from trireme.telemetry.endpoint import Endpoint
from trireme.telemetry.health import STARTING, Health
from trireme.telemetry.registry import new_registry
from trireme.threads import frozen_objects, start_pool, torch_threads

log = logging.getLogger("trireme.job")

# A step of a thousand workers makes 12,000 objects that live until it is applied. Collecting
# more often would search everything that the server has, each time.
_NEW_OBJECTS = 50_000


@contextmanager
def stop_on_signals(attendance: Attendance) -> Iterator[None]:
    """SIGTERM ends the wait, after workers that are stopping have left: whoever ends a job may
    signal all its processes at once. A second one, or SIGINT, ends it at once. Only the main thread
    can install handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    num_signals = itertools.count()

    def end(received: int, _: object) -> None:
        # No log line here: the signal may have interrupted the write of another.
        waits = next(num_signals) == 0 and received == signal.SIGTERM  # SIGINT counts, too
        reason = f"stopped by {signal.Signals(received).name}"
        attendance.stop(reason, within_s=STOP_S if waits else 0.0)

    stop = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, previous in stop.items():
            signal.signal(number, previous)


def serve(
    listen: str,
    *,
    listen_fd: int | None = None,
    threads: int = 0,
    keys: ServerKeys | None = None,
    insecure: bool = False,
    timeout_s: float = 60.0,
    root: Path | None = None,
    durability: Durability | None = None,
    limits: ServerLimits | None = None,
    tier: RowTier | None = None,
    store_hosts: frozenset[str] = frozenset(),
    name: str = "server",
    metrics: str | None = None,
) -> str:
    """Serve tables and blocks until the job is over; returns why it ended.

    Args:
        listen: "host:port"; port 0 chooses a free one.
        listen_fd: a socket that already listens there, from the process that chose the port.
        threads: for one request; 0: one per CPU.
        keys: encrypt, and admit these clients only.
        insecure: allow an address beyond loopback without keys.
        timeout_s: silence of a worker after which others may change what its pass on a device
            trains; twice as long of all remaining workers, and the job counts as lost.
        root: folder below which checkpoints are written and read; default the working directory.
        durability: what survives this process; default nothing.
        limits: on the memory that peers can make it use.
        tier: where the rows of tables lie; default in memory. Closed at the end.
        store_hosts: hosts of stores that peers may name, see trireme.server.store_hosts.
        name: its name in workers' messages, besides its address.
        metrics: "[host:]port" that answers /metrics and /healthz; port 0 chooses a free one.

    Raises:
        BadRequest: an address that may not be used, or a root that is no folder. Unavailable: the
            workers have been silent for too long.
    """
    root = Path.cwd() if root is None else root
    if not root.is_dir():
        raise BadRequest(f"serve: expected root to be a folder, found {str(root)!r}")
    registry, health = new_registry("server", name), Health()
    with ExitStack() as stack:
        if metrics is not None:  # before the server, to report that it is not open yet
            stack.enter_context(Endpoint(metrics, registry, health))
        limits = limits or ServerLimits()
        if tier is not None:
            stack.callback(tier.close)
        state = ServerState(start_pool(threads), limits.capacity, store_hosts, tier)
        attendance = Attendance()
        state.leases.has_left = lambda lease, since: attendance.has_left(
            lease.worker, lease.incarnation, since, timeout_s
        )
        coordinator = Coordinator(held=state.held)
        if durability is not None and durability.folder is not None:
            health.hinder(STARTING, f"recovering what {durability.folder} holds")
        # Recovered before it listens: until then workers say that nobody does, and try again.
        forget = stack.enter_context(
            kept(durability or Durability(), state, coordinator, attendance)
        )
        requests = RequestMetrics(registry)
        watch_state(registry, state)
        watch_workers(registry, attendance)
        handlers = handlers_of(state, coordinator, attendance.handlers(), root.resolve())
        server = Server(
            listen,
            handlers | requests.handlers(),
            name=name,
            limits=limits.messages,
            keys=keys,
            insecure=insecure,
            listen_fd=listen_fd,
            observe=requests.observe,
            state=state.state_id,
        )
        # One thread steps the blocks: they are too small to be worth waking others for.
        with frozen_objects(_NEW_OBJECTS), torch_threads(1), server, stop_on_signals(attendance):
            requests.watch(server)
            health.opened()
            log.info("listening on %s", server.endpoint)
            reason = attendance.wait(max(2 * timeout_s, 10.0))
            health.hinder("end", f"the job is over: {reason}")
        if attendance.is_over:
            forget()
    log.info("server %s ends: %s", server.endpoint, reason)
    return reason
