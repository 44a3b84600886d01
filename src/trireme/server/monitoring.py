"""Metrics of a server. docs/metrics.md lists them; a test compares the two.

Instruments count what happens at every request; gauges read the rest from the server when
Prometheus asks.
"""

from collections.abc import Callable, Iterator

import numpy as np
from prometheus_client.core import Metric

from trireme.rpc import Handler, Reply, Request, Server
from trireme.server.attendance import Attendance
from trireme.server.server_stats import sync_waits
from trireme.server.state import ServerState
from trireme.server.streams import STALENESS_MAX
from trireme.telemetry.instruments import (
    SECONDS,
    Counter,
    Gauge,
    Histogram,
    Numbers,
    histogram_family,
)
from trireme.telemetry.registry import Registry, text_of

STALENESS = tuple(float(n) for n in (0, *(2**n for n in range(11))))
assert STALENESS[-1] == STALENESS_MAX

USAGE = {
    "trireme_server_queue_bytes": ("num_bytes", "Bytes of requests that are not answered."),
    "trireme_server_connections": ("connections", "Connections that are open."),
    "trireme_server_received_bytes_total": ("num_bytes_in", "Bytes of the messages received."),
    "trireme_server_sent_bytes_total": ("num_bytes_out", "Bytes of the messages sent."),
    "trireme_server_faults_total": (
        "num_faults",
        "Messages against the protocol, or beyond a connection's credit.",
    ),
}
"""Gauges of a server: the field of `Usage` that each reads, and its documentation."""


TIER = {
    "trireme_table_memory_limit_bytes": (
        "memory_bytes",
        "With rows on SSD: the memory that the table may take, its part of --memory.",
    ),
    "trireme_table_ssd_rows": ("rows", "Rows of a table that lie on SSD."),
    "trireme_table_ssd_index_bytes": ("index_bytes", "Memory of what finds the rows on SSD."),
    "trireme_table_ssd_bytes": ("ssd_bytes", "Bytes of a table's files on SSD."),
    "trireme_table_ssd_rows_kept": (
        "rows_written",
        "Rows that these files held when they were written; those that are left are"
        " trireme_table_ssd_rows.",
    ),
    "trireme_table_hits_total": ("hits", "Keys whose row was in memory when it was needed."),
    "trireme_table_misses_total": ("misses", "Keys whose row may lie on SSD, and was looked for."),
    "trireme_table_ssd_reads_total": ("reads", "Reads from SSD; one may read several pages."),
    "trireme_table_ssd_read_pages_total": ("pages_read", "Pages read from SSD."),
    "trireme_table_ssd_written_pages_total": ("pages_written", "Pages written to SSD."),
    "trireme_table_ssd_evicted_rows_total": ("evicted", "Rows written because memory was needed."),
    "trireme_table_ssd_cleaned_rows_total": (
        "cleaned",
        "Rows written again to free the files around them. Write amplification is evicted plus"
        " cleaned rows by evicted rows.",
    ),
    "trireme_table_ssd_refused_rows_total": (
        "refused",
        "Rows that pulls read from SSD and that found no room in memory.",
    ),
    "trireme_table_ssd_fetched_rows_total": (
        "fetched",
        "Rows brought into memory because workers announced that they will pull them.",
    ),
    "trireme_table_ssd_damaged_pages": (
        "damaged_pages",
        "Pages on SSD that cannot be read, while others of their disk can. Rows in them are errors"
        " of whoever needs them.",
    ),
    "trireme_table_ssd_failed_writes_total": (
        "failed_writes",
        "Writes to SSD that failed. Their pages stayed in memory, to be written elsewhere.",
    ),
}
"""Gauges of a table with rows on SSD: the field of `_core.Table.tier`, and the documentation."""


WAITS_MAX = 3
"""How many of the waiting pulls `server.metrics` lists with the workers that they wait for."""


class RequestMetrics:
    """Metrics of requests. Give `observe` to the RPC server, and that server to `watch`."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._waits: Callable[[], list[str]] = list
        self._requests = Counter(
            "trireme_server_requests_total",
            "Requests answered, by method and by the name of the error, OK if none.",
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
        self._waits = lambda: server.waits(("ps.pull", "ps.norm"), WAITS_MAX)

        def queues() -> dict[str, int]:
            usage = server.usage()
            return {state: getattr(usage, state) for state in ("queued", "running", "deferred")}

        self._registry.register(
            Gauge(
                "trireme_server_queue_requests",
                "Requests that wait for a thread (queued), that a handler works on (running), and"
                " that wait for what they asked for (deferred).",
                queues,
                ["state"],
            )
        )
        for name, (field, documentation) in USAGE.items():
            self._registry.register(Gauge(name, documentation, _field(server.usage, field)))

    def handlers(self) -> dict[str, Handler]:
        """For `trireme top`, which therefore needs no other port than the server's."""
        registry = self._registry

        def on_metrics(_: Request) -> Reply:
            text = np.frombuffer(text_of(registry), np.uint8)
            return Reply({"waits": self._waits()}, [text])

        return {"server.metrics": on_metrics}


Read = Callable[[], Numbers]


def _field(read: Callable[[], object], field: str) -> Read:
    """Reads one field of what `read` returns; no number if that is None."""
    return lambda: None if (value := read()) is None else getattr(value, field)


Gauges = dict[str, tuple[str, Read]]
"""Documentation and numbers by name."""


def watch_state(registry: Registry, state: ServerState) -> None:
    """Add gauges of a server's tables, blocks, streams, checkpoints and log."""
    gauges = {"table": _by_table(state), "": _of_server(state), "stream": _by_stream(state)}
    gauges["what"] = {
        "trireme_sync_held": (
            "Sync: pushes staged and not applied (staged), pulls that wait for a step (waiting).",
            lambda: sync_waits(state),
        )
    }
    gauges["mode"] = {
        "trireme_checkpoint_age_seconds": (
            "Time since the last checkpoint of this mode was published; absent before one.",
            state.counts.checkpoint_ages_s,
        )
    }
    for label, of_label in gauges.items():
        for name, (documentation, read) in of_label.items():
            registry.register(Gauge(name, documentation, read, [label] if label else []))
    registry.register(_Staleness(state))


def _by_table(state: ServerState) -> Gauges:
    def rows(field: str) -> Read:
        return lambda: {n: getattr(t.rows, field) for n, t in list(state.tables.items())}

    def keys(kind: str) -> Read:
        return lambda: state.counts.read(kind)

    def tier(field: str) -> Read:
        def read() -> dict[str, int]:
            uses = {name: table.rows.tier for name, table in list(state.tables.items())}
            return {name: use[field] for name, use in uses.items() if use is not None}

        return read

    tier_gauges = {name: (text, tier(field)) for name, (field, text) in TIER.items()}
    memory = "Memory of a table on this server, index included."
    missing = "Keys that pulls asked for and that had no row."
    pushed = "Keys with a gradient in applied pushes."
    return {
        "trireme_table_rows": ("Rows of a table on this server.", rows("rows")),
        "trireme_table_bytes": (memory, rows("bytes")),
        **({} if state.tier is None else tier_gauges),
        "trireme_table_pulled_keys_total": ("Keys that pulls asked for.", keys("pulled")),
        "trireme_table_missing_keys_total": (missing, keys("missing")),
        "trireme_table_pushed_keys_total": (pushed, keys("pushed")),
    }


def _of_server(state: ServerState) -> Gauges:
    return {
        "trireme_blocks": ("Dense blocks here.", lambda: len(state.blocks)),
        "trireme_block_bytes": (
            "Memory of the dense blocks here, without their optimizers' state.",
            _field(lambda: state.blocks, "num_bytes"),
        ),
        "trireme_pulls_total": (
            "Pulls that were answered.",
            _field(lambda: state.counts, "num_pulls"),
        ),
        "trireme_log_bytes": (
            "Log after the last snapshot, which a recovery would replay; absent without one.",
            _field(lambda: state.journal.lag(), "num_bytes"),
        ),
        "trireme_log_age_seconds": (
            "Time since that snapshot was begun, or the log if there is none yet.",
            _field(lambda: state.journal.lag(), "age_s"),
        ),
    }


def _by_stream(state: ServerState) -> Gauges:
    return {
        "trireme_pushes_total": (
            "Pushes of a stream that were applied; a repeated push does not count.",
            lambda: state.counts.read("pushes"),
        ),
        "trireme_examples_total": (
            "Examples of a stream whose gradients were applied.",
            lambda: state.counts.read("examples"),
        ),
    }


class _Staleness:
    """Histograms that the server counts push by push."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield histogram_family(
            "trireme_push_staleness",
            "Pushes that were applied here between a push's pull and itself.",
            STALENESS,
            self._state.streams.staleness.copy(),
        )
        yield histogram_family(
            "trireme_push_ahead",
            "Steps that a push was ahead of the slowest stream when it was applied.",
            STALENESS,
            self._state.pacing.ahead.copy(),
        )


def watch_workers(registry: Registry, attendance: Attendance) -> None:
    """Add gauges of the workers attached to a server."""

    def label_uses() -> dict[int, dict[str, dict[str, float]]]:
        return {
            worker: {label: use.to_wire() for label, use in uses.items()}
            for worker, uses in attendance.label_uses().items()
        }

    for gauge in (
        Gauge(
            "trireme_worker_silence_seconds",
            "Time since the last heartbeat of a worker that has not left the job.",
            attendance.silences_s,
            ["worker"],
        ),
        Gauge(
            "trireme_worker_reported",
            "What a worker reported with its last heartbeat, for trireme top.",
            attendance.reports,
            ["worker", "what"],
        ),
        Gauge(
            "trireme_worker_reported_figure",
            "Loss and metrics of a worker's running pass so far, as its last heartbeat reported.",
            attendance.figures,
            ["worker", "figure"],
        ),
        Gauge(
            "trireme_worker_label",
            "What a worker reported of the compute workers of a label, for trireme top.",
            label_uses,
            ["worker", "label", "what"],
        ),
    ):
        registry.register(gauge)
