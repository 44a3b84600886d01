"""The state of a job as tables in the terminal."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
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
    TierStatus,
    WorkerStatus,
)

_NONE = "-"
_GAP = 2
_WAITS_MAX = 3


class _Sheet:
    """A table as wide as the terminal: columns that find no place follow below, beside the first
    column again. There long names in the first column lack their middle, or take several lines
    where they would be equal.

    rows: each with the cells of the first columns. rows_max: further rows are counted alone; None:
    all are shown.
    """

    def __init__(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], rows_max: int | None
    ) -> None:
        self._columns, self._rows_max = columns, rows_max
        self._rows = [[*cells, *([""] * (len(columns) - len(cells)))] for cells in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self._rows[: self._rows_max]
        widths = [max(map(cell_len, cells)) for cells in zip(self._columns, *shown, strict=True)]
        room, name = options.max_width, widths[0]
        if sum(widths) + _GAP * len(widths[1:]) > room:
            name = min(name, max(room // 3, cell_len(self._columns[0])))
        part, width = [0], name
        for column in range(1, len(widths)):
            width += _GAP + widths[column]
            if width > room and len(part) > 1:
                yield self._table(part, shown, name)
                part, width = [0], name + _GAP + widths[column]
            part.append(column)
        yield self._table(part, shown, name)
        if len(shown) < len(self._rows):
            yield Text(f"... and {len(self._rows) - len(shown)} more")

    def _table(self, part: Sequence[int], rows: Sequence[Sequence[str]], name: int) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        names = [row[0] for row in rows]
        short = [_short(one, name) for one in names]
        if len(set(short)) < len(set(names)):
            short = names  # on several lines
        table.add_column(self._columns[0], overflow="fold", max_width=name)
        for column in part[1:]:
            table.add_column(self._columns[column], justify="right", no_wrap=True)
        for first, row in zip(short, rows, strict=True):
            table.add_row(first, *(row[column] for column in part[1:]))
        return table


def _short(name: str, width: int) -> str:
    """A name without its middle, if it is longer."""
    if cell_len(name) <= width:
        return name
    end = (width - 1) // 2
    return f"{name[: width - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[-end:]}"


def view(before: Snapshot, now: Snapshot, rows_max: int | None = None) -> RenderableType:
    """The job at `now`; rates and latencies are those since `before`. rows_max: of each kind, the
    servers that do not answer and the largest tables first.
    """
    job = status_of(before, now)
    job = replace(
        job,
        servers=sorted(job.servers, key=lambda server: not server.error),
        tables=sorted(job.tables, key=lambda table: -table.num_rows) if rows_max else job.tables,
    )
    return Group(
        _summary(job),
        _servers(job, rows_max),
        *[Text(f"no answer: {s.error}") for s in job.servers if s.error][:rows_max],
        *_waits(job),
        _tables(job, rows_max),
        *([_tiers(job, rows_max)] if any(table.tier for table in job.tables) else []),
        _workers(job, rows_max),
        *([_labels(job, rows_max)] if job.labels else []),
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


def _servers(job: JobStatus, rows_max: int | None) -> _Sheet:
    columns = (
        "server", "up", "rows", "tables", "memory", "pull/s", "push/s", "pull ms", "push ms",
        "in/s", "out/s", "queued", "running", "deferred", "full/s", "saved ago", "log", "log age",
        "staleness",
    )  # fmt: skip
    return _Sheet(columns, map(_server, job.servers), rows_max)


def _waits(job: JobStatus) -> list[Text]:
    waits = dict.fromkeys(what for server in job.servers for what in server.waits)
    return [Text(f"waits: {what}") for what in list(waits)[:_WAITS_MAX]]


def _server(server: ServerStatus) -> tuple[str, ...]:
    if server.error:
        return server.endpoint, "no answer"
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
        _NONE if server.log_bytes is None else drawing.size(server.log_bytes),
        _NONE if server.log_age_s is None else _seconds(server.log_age_s),
        _NONE if server.staleness is None else f"{server.staleness:.2f}",
    )


def _tables(job: JobStatus, rows_max: int | None) -> _Sheet:
    columns = ("table", "rows", "bytes", "pulled keys/s", "missing", "pushed keys/s")
    return _Sheet(columns, map(_table, job.tables), rows_max)


def _table(table: TableStatus) -> tuple[str, ...]:
    return (
        table.name,
        _count(table.num_rows),
        drawing.size(table.num_bytes),
        _count(table.pulled_per_s),
        _percent(table.missing_share),
        _count(table.pushed_per_s),
    )


def _tiers(job: JobStatus, rows_max: int | None) -> _Sheet:
    """Tables with rows on SSD. Written: rows written by rows that left memory."""
    columns = (
        "on SSD", "in memory", "on SSD", "budget", "files", "in use", "hits", "reads/s",
        "reads/pull", "fetched/s", "evicted/s", "written",
    )  # fmt: skip
    tiers = ((table.name, table.tier) for table in job.tables if table.tier is not None)
    return _Sheet(columns, (_tier(*named) for named in tiers), rows_max)


def _tier(name: str, tier: TierStatus) -> tuple[str, ...]:
    in_use = tier.num_on_ssd / tier.num_kept if tier.num_kept else None
    return (
        name,
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


def _workers(job: JobStatus, rows_max: int | None) -> _Sheet:
    columns = (
        "worker", "heard ago", "steps", "examples", "examples/s", "retries",
        "planned", "pulled", "pushes",
    )  # fmt: skip
    return _Sheet(columns, map(_worker, job.workers), rows_max)


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


def _labels(job: JobStatus, rows_max: int | None) -> _Sheet:
    columns = (
        "label", "compute", "credits", "in flight", "batches/s", "ms", "busy", "failovers",
        "waiting",
    )  # fmt: skip
    return _Sheet(columns, map(_label, job.labels), rows_max)


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
