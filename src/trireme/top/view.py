"""The state of a job as tables in the terminal."""

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trireme import drawing
from trireme.top.interval import status_of
from trireme.top.job_snapshot import Snapshot
from trireme.top.job_status import (
    JobStatus,
    LabelStatus,
    ServerStatus,
    StalenessStatus,
    TableStatus,
    WorkerStatus,
)

_NONE = "-"


def view(before: Snapshot, now: Snapshot) -> RenderableType:
    """The job at `now`; rates and latencies are those since `before`."""
    job = status_of(before, now)
    return Group(
        _summary(job),
        _servers(job),
        *(Text(f"no answer: {server.error}") for server in job.servers if server.error),
        _tables(job),
        *([_tiers(job)] if any(table.tier for table in job.tables) else []),
        _workers(job),
        *([_labels(job)] if job.labels else []),
        _staleness(job.staleness),
    )


def _summary(job: JobStatus) -> Text:
    silent = sum(bool(server.error) for server in job.servers)
    parts = [
        f"{len(job.servers)} servers" + (f" ({silent} without an answer)" if silent else ""),
        f"{len(job.workers)} workers",
        f"{_count(sum(table.num_rows for table in job.tables))} rows",
        f"{drawing.size(sum(table.num_bytes for table in job.tables))} of tables",
        f"{_count(job.num_examples)} examples",
    ]
    return Text("trireme top: " + ", ".join(parts))


def _servers(job: JobStatus) -> Table:
    table = _table(
        "server", "up", "rows", "tables", "memory", "pull/s", "push/s", "pull ms", "push ms",
        "in/s", "out/s", "queued", "running", "deferred", "full/s", "saved ago",
    )  # fmt: skip
    for server in job.servers:
        table.add_row(*(_server(server) if not server.error else (server.endpoint, "no answer")))
    return table


def _server(server: ServerStatus) -> tuple[str, ...]:
    return (
        server.endpoint,
        _seconds(server.up_s),
        _count(server.num_rows),
        drawing.size(server.table_bytes),
        drawing.size(server.process_bytes),
        _count(server.pulls_per_s),
        _count(server.pushes_per_s),
        _ms(server.pull_s),
        _ms(server.push_s),
        drawing.size(server.received_per_s),
        drawing.size(server.sent_per_s),
        _count(server.num_queued),
        _count(server.num_running),
        _count(server.num_deferred),
        _count(server.full_per_s),
        _NONE if server.saved_ago_s is None else _seconds(server.saved_ago_s),
    )


def _tables(job: JobStatus) -> Table:
    table = _table("table", "rows", "bytes", "pulled keys/s", "missing", "pushed keys/s")
    for state in job.tables:
        table.add_row(
            state.name,
            _count(state.num_rows),
            drawing.size(state.num_bytes),
            _count(state.pulled_per_s),
            _percent(state.missing_share),
            _count(state.pushed_per_s),
        )
    return table


def _tiers(job: JobStatus) -> Table:
    """Tables with rows on SSD. Written: rows written by rows that left memory."""
    table = _table(
        "on SSD", "in memory", "on SSD", "budget", "files", "in use", "hits", "reads/s",
        "reads/pull", "fetched/s", "evicted/s", "written",
    )  # fmt: skip
    for state in job.tables:
        if state.tier is not None:
            table.add_row(*_tier(state))
    return table


def _tier(table: TableStatus) -> tuple[str, ...]:
    tier = table.tier
    assert tier is not None
    in_use = tier.num_on_ssd / tier.num_kept if tier.num_kept else None
    return (
        table.name,
        _count(tier.num_in_memory),
        _count(tier.num_on_ssd),
        drawing.size(tier.memory_bytes),
        drawing.size(tier.file_bytes),
        _percent(in_use),
        _percent(tier.hit_share),
        _count(tier.reads_per_s),
        _NONE if tier.reads_per_pull is None else _count(tier.reads_per_pull),
        _count(tier.fetched_per_s),
        _count(tier.evicted_per_s),
        _NONE if tier.written is None else f"{tier.written:.2f}x",
    )


def _workers(job: JobStatus) -> Table:
    table = _table(
        "worker", "heard ago", "steps", "examples", "examples/s", "retries",
        "planned", "pulled", "pushes",
    )  # fmt: skip
    for worker in job.workers:
        table.add_row(*_worker(worker))
    return table


def _worker(worker: WorkerStatus) -> tuple[str, ...]:
    reported = worker.reported
    return (
        worker.worker,
        _seconds(worker.silence_s),
        _count(worker.num_steps),
        _count(worker.num_examples),
        _count(worker.examples_per_s),
        *(
            _count(reported[what]) if what in reported else _NONE
            for what in ("retries", "planned", "pulled", "pushes")
        ),
    )


def _labels(job: JobStatus) -> Table:
    table = _table(
        "label", "compute", "credits", "in flight", "batches/s", "ms", "busy", "failovers",
        "waiting",
    )  # fmt: skip
    for label in job.labels:
        table.add_row(*_label(label))
    return table


def _label(label: LabelStatus) -> tuple[str, ...]:
    num, reachable = label.num_compute_workers, label.num_reachable
    return (
        label.label,
        _count(num) if reachable == num else f"{_count(reachable)} of {_count(num)}",
        _count(label.num_credits),
        _count(label.num_in_flight),
        _count(label.batches_per_s),
        _ms(label.batch_s),
        _percent(label.busy_share),
        _count(label.num_failovers),
        label.waiting or _NONE,
    )


def _staleness(staleness: StalenessStatus | None) -> Text:
    if staleness is None:
        return Text("staleness: no push yet")

    def bound(value: float) -> str:
        return f"<= {value:g}" if math.isfinite(value) else f"> {staleness.largest:g}"

    return Text(
        f"staleness (pushes between pull and push): mean {staleness.mean:.2f},"
        f" median {bound(staleness.median)}, 99% {bound(staleness.quantile_99)}"
    )


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.1f}%"


def _count(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{number:.0f}" if number == int(number) else f"{number:.1f}"


def _seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _ms(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{1000 * seconds:.2f}"
