"""Two snapshots of a job as tables: what is, and what happened in between."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trireme.top.job_snapshot import ServerSamples, Snapshot

_REQUESTS = "trireme_server_request_seconds"
_NONE = "-"


def view(before: Snapshot, now: Snapshot) -> RenderableType:
    """The job at `now`; rates and latencies are of the time since `before`."""
    between = _Between(before, now)
    return Group(
        _summary(now),
        _servers(between),
        *(Text(f"no answer: {told.error}") for told in now.servers if told.error),
        _tables(between),
        _workers(between),
        _staleness(now),
    )


class _Between:
    def __init__(self, before: Snapshot, now: Snapshot) -> None:
        self.before, self.now = before, now
        self.seconds = max(now.at - before.at, 1e-9)
        self._told_before = {told.endpoint: told for told in before.servers}

    def rate(self, name: str, of: ServerSamples | None = None, **labels: str) -> float:
        """Growth of a counter per second, of a server or all; one that began anew grew from 0."""
        servers = self.now.servers if of is None else [of]
        return sum(self._growth(told, name, **labels) for told in servers) / self.seconds

    def _growth(self, told: ServerSamples, name: str, **labels: str) -> float:
        before = self._told_before.get(told.endpoint)
        value = told.total(name, **labels)
        past = 0.0 if before is None else before.total(name, **labels)
        return value - past if value >= past else value

    def mean_s(self, told: ServerSamples, method: str) -> float | None:
        """Mean time of the requests of a method that were answered in between; None: none was."""
        count = self._growth(told, f"{_REQUESTS}_count", method=method)
        return self._growth(told, f"{_REQUESTS}_sum", method=method) / count if count else None


def _summary(now: Snapshot) -> Text:
    silent = len(now.servers) - len(now.answering)
    workers = now.values_of("trireme_worker_silence_seconds", "worker")
    parts = [
        f"{len(now.servers)} servers" + (f" ({silent} without an answer)" if silent else ""),
        f"{len(workers)} workers",
        f"{_count(now.total('trireme_table_rows'))} rows",
        f"{_bytes(now.total('trireme_table_bytes'))} of tables",
        f"{_count(now.total('trireme_examples_total') / max(len(now.answering), 1))} examples",
    ]
    return Text("trireme top: " + ", ".join(parts))


def _servers(between: _Between) -> Table:
    table = _table(
        "server", "up", "rows", "tables", "memory", "pull/s", "push/s", "pull ms", "push ms",
        "in/s", "out/s", "queued", "running", "deferred", "full/s", "saved ago",
    )  # fmt: skip
    for told in between.now.servers:
        if told.error:
            table.add_row(told.endpoint, "no answer")
            continue
        queues = [
            told.total("trireme_server_queue_requests", state=state)
            for state in ("queued", "running", "deferred")
        ]
        ages = [age for _, age in told.matching("trireme_checkpoint_age_seconds")]
        table.add_row(
            told.endpoint,
            _seconds(told.total("trireme_uptime_seconds")),
            _count(told.total("trireme_table_rows")),
            _bytes(told.total("trireme_table_bytes")),
            _bytes(told.total("process_resident_memory_bytes")),
            _count(between.rate("trireme_pulls_total", told)),
            _count(between.rate("trireme_pushes_total", told)),
            _ms(between.mean_s(told, "ps.pull")),
            _ms(between.mean_s(told, "ps.push")),
            _bytes(between.rate("trireme_server_received_bytes_total", told)),
            _bytes(between.rate("trireme_server_sent_bytes_total", told)),
            *(_count(number) for number in queues),
            _count(between.rate("trireme_server_requests_total", told, code="RESOURCE_EXHAUSTED")),
            _seconds(min(ages)) if ages else _NONE,
        )
    return table


def _tables(between: _Between) -> Table:
    table = _table("table", "rows", "bytes", "pulled keys/s", "missing", "pushed keys/s")
    now = between.now
    for name in now.values_of("trireme_table_rows", "table"):
        pulled = between.rate("trireme_table_pulled_keys_total", table=name)
        missing = between.rate("trireme_table_missing_keys_total", table=name)
        table.add_row(
            name,
            _count(now.total("trireme_table_rows", table=name)),
            _bytes(now.total("trireme_table_bytes", table=name)),
            _count(pulled),
            f"{100 * missing / pulled:.1f}%" if pulled else _NONE,
            _count(between.rate("trireme_table_pushed_keys_total", table=name)),
        )
    return table


def _workers(between: _Between) -> Table:
    """As server 0 hears them; every push goes to every server, so that one can tell of all."""
    table = _table(
        "worker", "heard ago", "steps", "examples", "examples/s", "retries",
        "planned", "pulled", "pushes",
    )  # fmt: skip
    now, told = between.now, next(iter(between.now.answering))
    for worker in now.values_of("trireme_worker_silence_seconds", "worker"):
        silences = [
            age for of in now.servers
            for _, age in of.matching("trireme_worker_silence_seconds", worker=worker)
        ]  # fmt: skip
        said = {
            of["what"]: value
            for of, value in told.matching("trireme_worker_reported", worker=worker)
        }
        table.add_row(
            worker,
            _seconds(min(silences)),
            _count(told.total("trireme_pushes_total", stream=worker)),
            _count(told.total("trireme_examples_total", stream=worker)),
            _count(between.rate("trireme_examples_total", told, stream=worker)),
            *(
                _count(said[what]) if what in said else _NONE
                for what in ("retries", "planned", "pulled", "pushes")
            ),
        )
    return table


def _staleness(now: Snapshot) -> Text:
    """Of the pushes since the start, over all servers."""
    name = "trireme_push_staleness"
    bounds = sorted(float(le) for le in now.values_of(f"{name}_bucket", "le"))
    count = now.total(f"{name}_count")
    if not count:
        return Text("staleness: no push yet")

    def below(bound: float) -> float:
        return sum(
            value
            for told in now.servers
            for of, value in told.matching(f"{name}_bucket")
            if float(of["le"]) == bound
        )

    def quantile(share: float) -> str:
        bound = next(bound for bound in bounds if below(bound) >= share * count)
        return f"<= {bound:g}" if math.isfinite(bound) else f"> {bounds[-2]:g}"

    return Text(
        f"staleness (pushes between pull and push): mean {now.total(f'{name}_sum') / count:.2f},"
        f" median {quantile(0.5)}, 99% {quantile(0.99)}"
    )


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _count(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{number:.0f}" if number == int(number) else f"{number:.1f}"


def _bytes(number: float) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"


def _seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _ms(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{1000 * seconds:.2f}"
