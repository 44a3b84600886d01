"""Two snapshots of a job as tables: its present state, and rates since the first one."""

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trireme import drawing
from trireme.top.job_snapshot import ServerSamples, Snapshot

_REQUESTS = "trireme_server_request_seconds"
_NONE = "-"
BUSY_SHARE = 0.8
"""Compute workers that are busy for more of the time are what workers wait for."""


def view(before: Snapshot, now: Snapshot) -> RenderableType:
    """The job at `now`; rates and latencies are those since `before`."""
    interval = _Interval(before, now)
    return Group(
        _summary(now),
        _servers(interval),
        *(Text(f"no answer: {server.error}") for server in now.servers if server.error),
        _tables(interval),
        *([_tiers(interval)] if now.values_of("trireme_table_ssd_rows", "table") else []),
        _workers(interval),
        *([_labels(interval)] if now.values_of("trireme_worker_label", "label") else []),
        _staleness(now),
    )


class _Interval:
    def __init__(self, before: Snapshot, now: Snapshot) -> None:
        self.before, self.now = before, now
        self.seconds = max(now.at - before.at, 1e-9)
        self._before_by_endpoint = {server.endpoint: server for server in before.servers}

    def rate(self, name: str, server: ServerSamples | None = None, **labels: str) -> float:
        """Growth of a counter per second, of one server or all."""
        servers = self.now.servers if server is None else [server]
        return sum(self._growth(server, name, **labels) for server in servers) / self.seconds

    def _growth(self, server: ServerSamples, name: str, **labels: str) -> float:
        before = self._before_by_endpoint.get(server.endpoint)
        value = server.total(name, **labels)
        past = 0.0 if before is None else before.total(name, **labels)
        return value - past if value >= past else value  # a restarted server counts from 0

    def mean_s(self, server: ServerSamples, method: str) -> float | None:
        """Mean time of the requests of a method in the interval; None: there were none."""
        count = self._growth(server, f"{_REQUESTS}_count", method=method)
        return self._growth(server, f"{_REQUESTS}_sum", method=method) / count if count else None


def _summary(now: Snapshot) -> Text:
    silent = len(now.servers) - len(now.answering)
    workers = now.values_of("trireme_worker_silence_seconds", "worker")
    parts = [
        f"{len(now.servers)} servers" + (f" ({silent} without an answer)" if silent else ""),
        f"{len(workers)} workers",
        f"{_count(now.total('trireme_table_rows'))} rows",
        f"{drawing.size(now.total('trireme_table_bytes'))} of tables",
        f"{_count(now.total('trireme_examples_total') / max(len(now.answering), 1))} examples",
    ]
    return Text("trireme top: " + ", ".join(parts))


def _servers(interval: _Interval) -> Table:
    table = _table(
        "server", "up", "rows", "tables", "memory", "pull/s", "push/s", "pull ms", "push ms",
        "in/s", "out/s", "queued", "running", "deferred", "full/s", "saved ago",
    )  # fmt: skip
    for server in interval.now.servers:
        if server.error:
            table.add_row(server.endpoint, "no answer")
            continue
        queues = [
            server.total("trireme_server_queue_requests", state=state)
            for state in ("queued", "running", "deferred")
        ]
        ages = [age for _, age in server.matching("trireme_checkpoint_age_seconds")]
        table.add_row(
            server.endpoint,
            _seconds(server.total("trireme_uptime_seconds")),
            _count(server.total("trireme_table_rows")),
            drawing.size(server.total("trireme_table_bytes")),
            drawing.size(server.total("process_resident_memory_bytes")),
            _count(interval.rate("trireme_pulls_total", server)),
            _count(interval.rate("trireme_pushes_total", server)),
            _ms(interval.mean_s(server, "ps.pull")),
            _ms(interval.mean_s(server, "ps.push")),
            drawing.size(interval.rate("trireme_server_received_bytes_total", server)),
            drawing.size(interval.rate("trireme_server_sent_bytes_total", server)),
            *(_count(number) for number in queues),
            _count(
                interval.rate("trireme_server_requests_total", server, code="RESOURCE_EXHAUSTED")
            ),
            _seconds(min(ages)) if ages else _NONE,
        )
    return table


def _tables(interval: _Interval) -> Table:
    table = _table("table", "rows", "bytes", "pulled keys/s", "missing", "pushed keys/s")
    now = interval.now
    for name in now.values_of("trireme_table_rows", "table"):
        pulled = interval.rate("trireme_table_pulled_keys_total", table=name)
        missing = interval.rate("trireme_table_missing_keys_total", table=name)
        table.add_row(
            name,
            _count(now.total("trireme_table_rows", table=name)),
            drawing.size(now.total("trireme_table_bytes", table=name)),
            _count(pulled),
            _percent(missing, pulled),
            _count(interval.rate("trireme_table_pushed_keys_total", table=name)),
        )
    return table


def _tiers(interval: _Interval) -> Table:
    """Tables with rows on SSD. Written: rows written by rows that left memory."""
    table = _table(
        "on SSD", "in memory", "on SSD", "budget", "files", "in use", "hits", "reads/s",
        "reads/pull", "fetched/s", "evicted/s", "written",
    )  # fmt: skip
    now, pulls = interval.now, interval.rate("trireme_pulls_total")
    for name in now.values_of("trireme_table_ssd_rows", "table"):

        def total(what: str, name: str = name) -> float:
            return now.total(f"trireme_table_{what}", table=name)

        def rate(what: str, name: str = name) -> float:
            return interval.rate(f"trireme_table_{what}_total", table=name)

        cold, kept = total("ssd_rows"), total("ssd_rows_kept")
        hits, misses = rate("hits"), rate("misses")
        reads, evicted = rate("ssd_reads"), rate("ssd_evicted_rows")
        cleaned = rate("ssd_cleaned_rows")
        table.add_row(
            name,
            _count(total("rows") - cold),
            _count(cold),
            drawing.size(total("memory_limit_bytes")),
            drawing.size(total("ssd_bytes")),
            _percent(cold, kept),
            _percent(hits, hits + misses),
            _count(reads),
            _count(reads / pulls) if pulls else _NONE,
            _count(rate("ssd_fetched_rows")),
            _count(evicted),
            f"{(evicted + cleaned) / evicted:.2f}x" if evicted else _NONE,
        )
    return table


def _workers(interval: _Interval) -> Table:
    """As the first server that answers counts them: every push goes to every server."""
    table = _table(
        "worker", "heard ago", "steps", "examples", "examples/s", "retries",
        "planned", "pulled", "pushes",
    )  # fmt: skip
    now, first = interval.now, next(iter(interval.now.answering))
    for worker in now.values_of("trireme_worker_silence_seconds", "worker"):
        silences = [
            age for server in now.servers
            for _, age in server.matching("trireme_worker_silence_seconds", worker=worker)
        ]  # fmt: skip
        reported = {
            labels["what"]: value
            for labels, value in first.matching("trireme_worker_reported", worker=worker)
        }
        table.add_row(
            worker,
            _seconds(min(silences)),
            _count(first.total("trireme_pushes_total", stream=worker)),
            _count(first.total("trireme_examples_total", stream=worker)),
            _count(interval.rate("trireme_examples_total", first, stream=worker)),
            *(
                _count(reported[what]) if what in reported else _NONE
                for what in ("retries", "planned", "pulled", "pushes")
            ),
        )
    return table


def _labels(interval: _Interval) -> Table:
    """The compute workers of each label, as all workers together report them to the first server
    that answers. Busy: of the time of all compute workers of the label.
    """
    table = _table(
        "label",
        "compute",
        "credits",
        "in flight",
        "batches/s",
        "ms",
        "busy",
        "failovers",
        "waiting",
    )
    now, first = interval.now, next(iter(interval.now.answering))
    for label in now.values_of("trireme_worker_label", "label"):

        def total(what: str, label: str = label) -> float:
            return first.total("trireme_worker_label", label=label, what=what)

        def rate(what: str, label: str = label) -> float:
            return interval.rate("trireme_worker_label", first, label=label, what=what)

        def numbers(what: str, label: str = label) -> list[float]:
            samples = first.matching("trireme_worker_label", label=label, what=what)
            return [number for _, number in samples]

        num, reachable = max(numbers("compute_workers")), min(numbers("reachable"))
        batches, computed = rate("batches"), rate("computed_s")
        busy = computed / max(num, 1)
        table.add_row(
            label,
            _count(num) if reachable == num else f"{_count(reachable)} of {_count(num)}",
            _count(total("credits")),
            _count(total("in_flight")),
            _count(batches),
            _ms(computed / batches if batches else None),
            _percent(min(busy, 1.0), 1.0),
            _count(total("failovers")),
            _who_waits(label, busy, total("in_flight")),
        )
    return table


def _who_waits(label: str, busy: float, in_flight: float) -> str:
    """Workers wait for compute workers that are busy, and others wait for the workers."""
    if busy >= BUSY_SHARE:
        return "workers"
    return label if in_flight or busy else _NONE


def _staleness(now: Snapshot) -> Text:
    """The staleness of all pushes since the start, over all servers."""
    name = "trireme_push_staleness"
    bounds = sorted(float(le) for le in now.values_of(f"{name}_bucket", "le"))
    count = now.total(f"{name}_count")
    if not count:
        return Text("staleness: no push yet")

    def below(bound: float) -> float:
        return sum(
            value
            for server in now.servers
            for labels, value in server.matching(f"{name}_bucket")
            if float(labels["le"]) == bound
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


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else _NONE


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
