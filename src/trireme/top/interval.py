"""The state of a job out of two snapshots: as it is at the second, with rates since the first."""

from __future__ import annotations

import math

from trireme.top.job_snapshot import ServerSamples, Snapshot
from trireme.top.job_status import (
    JobStatus,
    LabelStatus,
    ServerStatus,
    StalenessStatus,
    TableStatus,
    TierStatus,
    WorkerStatus,
)

_REQUESTS = "trireme_server_request_seconds"
BUSY_SHARE = 0.8
"""Compute workers that are busy for more of the time are what workers wait for."""


def status_of(before: Snapshot, now: Snapshot) -> JobStatus:
    """The job at `now`; rates and latencies are those since `before`."""
    interval = _Interval(before, now)
    workers = _workers(interval)
    return JobStatus(
        servers=[_server(interval, server) for server in now.servers],
        tables=_tables(interval),
        workers=workers,
        labels=_labels(interval),
        staleness=_staleness(now),
        num_examples=now.total("trireme_examples_total") / max(len(now.answering), 1),
        examples_per_s=sum(worker.examples_per_s for worker in workers),
    )


class _Interval:
    def __init__(self, before: Snapshot, now: Snapshot) -> None:
        self.before, self.now = before, now
        self.seconds = max(now.at - before.at, 1e-9)
        self._before = {server.endpoint: server for server in before.answering}

    def has_both(self, server: ServerSamples, name: str, **labels: str) -> bool:
        """Whether the server has samples like these in both snapshots."""
        both = [server, self._before.get(server.endpoint)]
        return all(one is not None and any(one.matching(name, **labels)) for one in both)

    def first(self, name: str, **labels: str) -> ServerSamples:
        """The first server that has samples like these, in both snapshots if there is one."""
        having = [one for one in self.now.answering if any(one.matching(name, **labels))]
        return next((one for one in having if self.has_both(one, name, **labels)), having[0])

    def rate(self, name: str, server: ServerSamples | None = None, **labels: str) -> float:
        """Growth of a counter per second, of one server or all."""
        servers = self.now.servers if server is None else [server]
        return sum(self._growth(server, name, **labels) for server in servers) / self.seconds

    def _growth(self, server: ServerSamples, name: str, **labels: str) -> float:
        before, value = self._before.get(server.endpoint), server.total(name, **labels)
        if before is None:
            return 0.0  # it was silent, and has counted longer than the interval
        past = before.total(name, **labels)
        return value - past if value >= past else value  # a restarted server counts from 0

    def mean_s(self, server: ServerSamples, method: str) -> float | None:
        """Mean time of the requests of a method in the interval; None: there were none."""
        count = self._growth(server, f"{_REQUESTS}_count", method=method)
        return self._growth(server, f"{_REQUESTS}_sum", method=method) / count if count else None


def _server(interval: _Interval, server: ServerSamples) -> ServerStatus:
    if server.error:
        return ServerStatus(endpoint=server.endpoint, error=server.error)

    def queue(state: str) -> float:
        return server.total("trireme_server_queue_requests", state=state)

    return ServerStatus(
        endpoint=server.endpoint,
        up_s=server.total("trireme_uptime_seconds"),
        num_rows=server.total("trireme_table_rows"),
        table_bytes=server.total("trireme_table_bytes"),
        process_bytes=server.total("process_resident_memory_bytes"),
        pulls_per_s=interval.rate("trireme_pulls_total", server),
        pushes_per_s=interval.rate("trireme_pushes_total", server),
        pull_s=interval.mean_s(server, "ps.pull"),
        push_s=interval.mean_s(server, "ps.push"),
        received_per_s=interval.rate("trireme_server_received_bytes_total", server),
        sent_per_s=interval.rate("trireme_server_sent_bytes_total", server),
        num_queued=queue("queued"),
        num_running=queue("running"),
        num_deferred=queue("deferred"),
        full_per_s=interval.rate(
            "trireme_server_requests_total", server, code="RESOURCE_EXHAUSTED"
        ),
        saved_ago_s=_least(server, "trireme_checkpoint_age_seconds"),
        log_bytes=_least(server, "trireme_log_bytes"),
        log_age_s=_least(server, "trireme_log_age_seconds"),
        staleness=_share(
            server.total("trireme_push_staleness_sum"), server.total("trireme_push_staleness_count")
        ),
        waits=list(dict.fromkeys(server.waits)),
    )


def _least(server: ServerSamples, name: str) -> float | None:
    return min((value for _, value in server.matching(name)), default=None)


def _tables(interval: _Interval) -> list[TableStatus]:
    now, states = interval.now, []
    for name in now.values_of("trireme_table_rows", "table"):
        pulled = interval.rate("trireme_table_pulled_keys_total", table=name)
        missing = interval.rate("trireme_table_missing_keys_total", table=name)
        states.append(
            TableStatus(
                name=name,
                num_rows=now.total("trireme_table_rows", table=name),
                num_bytes=now.total("trireme_table_bytes", table=name),
                pulled_per_s=pulled,
                missing_share=_share(missing, pulled),
                pushed_per_s=interval.rate("trireme_table_pushed_keys_total", table=name),
                tier=_tier(interval, name),
            )
        )
    return states


def _tier(interval: _Interval, name: str) -> TierStatus | None:
    now = interval.now
    if name not in now.values_of("trireme_table_ssd_rows", "table"):
        return None

    def total(what: str) -> float:
        return now.total(f"trireme_table_{what}", table=name)

    def rate(what: str) -> float:
        return interval.rate(f"trireme_table_{what}_total", table=name)

    hits, evicted = rate("hits"), rate("ssd_evicted_rows")
    pulls = interval.rate("trireme_pulls_total")
    return TierStatus(
        num_in_memory=total("rows") - total("ssd_rows"),
        num_on_ssd=total("ssd_rows"),
        memory_bytes=total("memory_limit_bytes"),
        file_bytes=total("ssd_bytes"),
        num_kept=total("ssd_rows_kept"),
        hit_share=_share(hits, hits + rate("misses")),
        reads_per_s=rate("ssd_reads"),
        reads_per_pull=_share(rate("ssd_reads"), pulls),
        fetched_per_s=rate("ssd_fetched_rows"),
        evicted_per_s=evicted,
        written=_share(evicted + rate("ssd_cleaned_rows"), evicted),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _workers(interval: _Interval) -> list[WorkerStatus]:
    now, states = interval.now, []
    for worker in now.values_of("trireme_worker_silence_seconds", "worker"):
        first = interval.first("trireme_worker_silence_seconds", worker=worker)
        silences = [
            age for server in now.servers
            for _, age in server.matching("trireme_worker_silence_seconds", worker=worker)
        ]  # fmt: skip
        states.append(
            WorkerStatus(
                worker=worker,
                silence_s=min(silences),
                num_steps=first.total("trireme_pushes_total", stream=worker),
                num_examples=first.total("trireme_examples_total", stream=worker),
                examples_per_s=interval.rate("trireme_examples_total", first, stream=worker),
                reported=_by_label(first, "trireme_worker_reported", "what", worker),
                figures=_by_label(first, "trireme_worker_reported_figure", "figure", worker),
            )
        )
    return states


def _by_label(server: ServerSamples, name: str, label: str, worker: str) -> dict[str, float]:
    return {labels[label]: value for labels, value in server.matching(name, worker=worker)}


def _labels(interval: _Interval) -> list[LabelStatus]:
    now = interval.now
    return [_label(interval, label) for label in now.values_of("trireme_worker_label", "label")]


def _label(interval: _Interval, label: str) -> LabelStatus:
    name = "trireme_worker_label"
    first = interval.first(name, label=label)
    has_both = interval.has_both(first, name, label=label)  # else it has started since

    def total(what: str) -> float:
        return first.total(name, label=label, what=what)

    def rate(what: str) -> float:
        return interval.rate(name, first, label=label, what=what) if has_both else 0.0

    def numbers(what: str) -> list[float]:
        return [n for _, n in first.matching(name, label=label, what=what)]

    num, computed = max(numbers("compute_workers")), rate("computed_s")
    in_flight = total("in_flight")
    busy = computed / max(num, 1)
    return LabelStatus(
        label=label,
        num_compute_workers=num,
        num_reachable=min(numbers("reachable")),
        num_credits=total("credits"),
        num_in_flight=in_flight,
        batches_per_s=rate("batches"),
        batch_s=_share(computed, rate("batches")),
        busy_share=min(busy, 1.0),
        num_failovers=total("failovers"),
        waiting=_who_waits(label, busy, in_flight),
    )


def _who_waits(label: str, busy: float, in_flight: float) -> str:
    """Workers wait for compute workers that are busy, and others wait for the workers."""
    if busy >= BUSY_SHARE:
        return "workers"
    return label if in_flight or busy else ""


def _staleness(now: Snapshot) -> StalenessStatus | None:
    name = "trireme_push_staleness"
    bounds = sorted(float(le) for le in now.values_of(f"{name}_bucket", "le"))
    count = now.total(f"{name}_count")
    if not count:
        return None

    def below(bound: float) -> float:
        return sum(
            value
            for server in now.servers
            for labels, value in server.matching(f"{name}_bucket")
            if float(labels["le"]) == bound
        )

    def quantile(share: float) -> float:
        return next(bound for bound in bounds if below(bound) >= share * count)

    return StalenessStatus(
        mean=now.total(f"{name}_sum") / count,
        median=quantile(0.5),
        quantile_99=quantile(0.99),
        largest=max(filter(math.isfinite, bounds)),
    )
