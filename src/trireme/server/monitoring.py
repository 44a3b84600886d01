"""Metrics of a server. docs/metrics.md lists them; a test compares the two.

Instruments count what happens at every request; gauges read the rest from the server when
Prometheus asks.
"""

from collections.abc import Callable, Iterator

import numpy as np
from prometheus_client.core import Metric

from trireme.rpc import Handler, Reply, Request, Server
from trireme.server.attendance import Attendance
from trireme.server.state import STALENESS_MAX, ServerState
from trireme.telemetry.instruments import SECONDS, Counter, Gauge, Histogram, histogram_family
from trireme.telemetry.registry import Registry, text_of

STALENESS = tuple(float(n) for n in (0, *(2**n for n in range(11))))
assert STALENESS[-1] == STALENESS_MAX


class RequestMetrics:
    """Metrics of requests. Give `observe` to the RPC server, and that server to `watch`."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._requests = Counter(
            "trireme_server_requests_total",
            "Requests that were answered, by method and by the name of the error, OK if none.",
            ["method", "code"],
        )
        self._seconds = Histogram(
            "trireme_server_request_seconds",
            "Time of a request from its arrival to its answer, waiting for other workers included.",
            ["method"],
            SECONDS,
        )
        registry.register(self._requests)
        registry.register(self._seconds)

    def observe(self, method: str, seconds: float, error: str) -> None:
        self._requests.add(1, method, error or "OK")
        self._seconds.observe(seconds, method)

    def watch(self, server: Server) -> None:
        """Add gauges of this server's queues, connections and bytes."""

        def queues() -> dict[tuple[str, ...], float]:
            usage = server.usage()
            return {
                ("queued",): usage.queued,
                ("running",): usage.running,
                ("deferred",): usage.deferred,
            }

        gauges = [
            Gauge(
                "trireme_server_queue_requests",
                "Requests that wait for a thread (queued), that a handler works on (running), and"
                " that wait for what they asked for (deferred).",
                queues,
                ["state"],
            ),
            Gauge(
                "trireme_server_queue_bytes",
                "Bytes of requests that are not answered.",
                lambda: {(): server.usage().num_bytes},
            ),
            Gauge(
                "trireme_server_connections",
                "Connections that are open.",
                lambda: {(): server.usage().connections},
            ),
            Gauge(
                "trireme_server_received_bytes_total",
                "Bytes of the messages that came.",
                lambda: {(): server.usage().num_bytes_in},
            ),
            Gauge(
                "trireme_server_sent_bytes_total",
                "Bytes of the messages that went.",
                lambda: {(): server.usage().num_bytes_out},
            ),
            Gauge(
                "trireme_server_faults_total",
                "Messages against the protocol, or beyond a connection's credit.",
                lambda: {(): server.usage().num_faults},
            ),
        ]
        for gauge in gauges:
            self._registry.register(gauge)

    def handlers(self) -> dict[str, Handler]:
        return {"server.metrics": self._on_metrics}

    def _on_metrics(self, request: Request) -> Reply:
        """For `trireme top`, which therefore needs no other port than the server's."""
        del request
        return Reply({}, [np.frombuffer(text_of(self._registry), np.uint8)])


def watch_state(registry: Registry, state: ServerState) -> None:
    """Add gauges of a server's tables, blocks, streams, checkpoints and log."""
    for gauge in (*_table_gauges(state), *_push_gauges(state), *_log_gauges(state)):
        registry.register(gauge)
    registry.register(_Staleness(state))


def _table_gauges(state: ServerState) -> list[Gauge]:
    def of_tables(read: Callable[[str], float]) -> Callable[[], dict[tuple[str, ...], float]]:
        return lambda: {(name,): read(name) for name in list(state.tables)}

    def keys(kind: str) -> Callable[[], dict[tuple[str, ...], float]]:
        return lambda: {(name,): n for name, n in state.counts.by_table()[kind].items()}

    return [
        Gauge(
            "trireme_table_rows",
            "Rows of a table on this server.",
            of_tables(lambda name: state.tables[name].rows.rows),
            ["table"],
        ),
        Gauge(
            "trireme_table_bytes",
            "Memory of a table on this server, index included.",
            of_tables(lambda name: state.tables[name].rows.bytes),
            ["table"],
        ),
        Gauge(
            "trireme_table_pulled_keys_total",
            "Keys that pulls asked for.",
            keys("pulled"),
            ["table"],
        ),
        Gauge(
            "trireme_table_missing_keys_total",
            "Keys that pulls asked for and that had no row.",
            keys("missing"),
            ["table"],
        ),
        Gauge(
            "trireme_table_pushed_keys_total",
            "Keys with a gradient in applied pushes.",
            keys("pushed"),
            ["table"],
        ),
        Gauge("trireme_blocks", "Dense blocks here.", lambda: {(): len(state.blocks)}),
        Gauge(
            "trireme_block_bytes",
            "Memory of the dense blocks here, without their optimizers' state.",
            lambda: {(): state.blocks.num_bytes},
        ),
    ]


def _push_gauges(state: ServerState) -> list[Gauge]:
    def by_stream(kind: str) -> Callable[[], dict[tuple[str, ...], float]]:
        return lambda: {(str(s),): n for s, n in state.counts.by_stream()[kind].items()}

    return [
        Gauge(
            "trireme_pulls_total",
            "Pulls that were answered.",
            lambda: {(): state.counts.num_pulls},
        ),
        Gauge(
            "trireme_pushes_total",
            "Pushes of a stream that were applied; one that comes again does not count.",
            by_stream("pushes"),
            ["stream"],
        ),
        Gauge(
            "trireme_examples_total",
            "Examples of a stream whose gradients were applied.",
            by_stream("examples"),
            ["stream"],
        ),
        Gauge(
            "trireme_sync_held",
            "Sync: pushes staged and not applied (staged), pulls that wait for a step (waiting).",
            lambda: {(name,): n for name, n in state.sync_waits().items()},
            ["what"],
        ),
        Gauge(
            "trireme_checkpoint_age_seconds",
            "Time since the last checkpoint of this mode was published; absent before one.",
            lambda: {(mode,): age for mode, age in state.counts.checkpoint_ages_s().items()},
            ["mode"],
        ),
    ]


def _log_gauges(state: ServerState) -> list[Gauge]:
    def of_log(field: str) -> Callable[[], dict[tuple[str, ...], float]]:
        def read() -> dict[tuple[str, ...], float]:
            lag = state.journal.lag()
            return {} if lag is None else {(): getattr(lag, field)}

        return read

    return [
        Gauge(
            "trireme_log_bytes",
            "Log behind the last snapshot, which a recovery would replay; absent without one.",
            of_log("num_bytes"),
        ),
        Gauge(
            "trireme_log_age_seconds",
            "Time since that snapshot was begun, or the log if there is none yet.",
            of_log("age_s"),
        ),
    ]


class _Staleness:
    """Histograms that the server counts push by push."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield histogram_family(
            "trireme_push_staleness",
            "Pushes that were applied here between a push's pull and itself.",
            STALENESS,
            self._state.staleness.copy(),
        )
        yield histogram_family(
            "trireme_push_ahead",
            "Steps that a push was ahead of the slowest stream when it was applied.",
            STALENESS,
            self._state.pacing.ahead.copy(),
        )


def watch_workers(registry: Registry, attendance: Attendance) -> None:
    """Add gauges of the workers attached to a server."""
    registry.register(
        Gauge(
            "trireme_worker_silence_seconds",
            "Time since this server heard a worker that has not said goodbye.",
            lambda: {(str(worker),): age for worker, age in attendance.silences_s().items()},
            ["worker"],
        )
    )
    registry.register(
        Gauge(
            "trireme_worker_reported",
            "What a worker said of itself with its last sign of life, for trireme top.",
            lambda: {
                (str(worker), what): number
                for worker, report in attendance.reports().items()
                for what, number in report.items()
            },
            ["worker", "what"],
        )
    )
