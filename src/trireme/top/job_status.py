"""The state of a job in numbers, as the terminal and the console show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServerStatus:
    """One server. `_s` are seconds, `_per_s` rates in the interval; None: unknown or none.

    Attributes:
        error: why it did not answer, then the other numbers are 0; "" if it did.
        pull_s, push_s: mean time of a request in the interval.
        num_queued, num_running, num_deferred: requests that wait for a thread, that a handler works
            on, and that wait for what they asked for.
        full_per_s: requests refused for now because a limit was reached.
        saved_ago_s: since the last checkpoint of any mode.
        log_bytes, log_age_s: of what a recovery would replay.
        staleness: mean of all pushes since the start, in pushes.
        waits: what some of the pulls that wait for other workers wait for.
    """

    endpoint: str
    error: str = ""
    up_s: float = 0.0
    num_rows: float = 0.0
    table_bytes: float = 0.0
    process_bytes: float = 0.0
    pulls_per_s: float = 0.0
    pushes_per_s: float = 0.0
    pull_s: float | None = None
    push_s: float | None = None
    received_per_s: float = 0.0
    sent_per_s: float = 0.0
    num_queued: float = 0.0
    num_running: float = 0.0
    num_deferred: float = 0.0
    full_per_s: float = 0.0
    saved_ago_s: float | None = None
    log_bytes: float | None = None
    log_age_s: float | None = None
    staleness: float | None = None
    waits: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class TierStatus:
    """The rows of a table that lie on SSD, over all servers.

    Attributes:
        memory_bytes: the table's part of the budget. file_bytes: its files on SSD.
        num_kept: rows that these files held when they were written.
        hit_share: of the keys of the interval, those whose row was in memory; None: no keys.
        reads_per_pull: None: no pull.
        written: rows written for each row that left memory; None: none left.
    """

    num_in_memory: float
    num_on_ssd: float
    memory_bytes: float
    file_bytes: float
    num_kept: float
    hit_share: float | None
    reads_per_s: float
    reads_per_pull: float | None
    fetched_per_s: float
    evicted_per_s: float
    written: float | None


@dataclass(frozen=True, kw_only=True)
class TableStatus:
    """One table, over all servers. missing_share: of the keys pulled, those without a row."""

    name: str
    num_rows: float
    num_bytes: float
    pulled_per_s: float
    missing_share: float | None
    pushed_per_s: float
    tier: TierStatus | None


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One worker, as the first server that answers counts it: every push goes to every server.

    Attributes:
        reported: retries and depths of queues (planned, pulled, pushes) by name, at most 5 s old.
        figures: loss and metrics of the running pass so far, of this worker, by name.
    """

    worker: str
    silence_s: float
    num_steps: float
    num_examples: float
    examples_per_s: float
    reported: Mapping[str, float]
    figures: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class LabelStatus:
    """The compute workers of a label, as all workers together report them to the first server that
    answers.

    Attributes:
        batch_s: mean time to compute a batch; None: there was none.
        busy_share: of the time of all compute workers of the label.
        waiting: who waits: "workers" for compute workers, or the label's for work; "": nobody.
    """

    label: str
    num_compute_workers: float
    num_reachable: float
    num_credits: float
    num_in_flight: float
    batches_per_s: float
    batch_s: float | None
    busy_share: float
    num_failovers: float
    waiting: str


@dataclass(frozen=True, kw_only=True)
class StalenessStatus:
    """The staleness of all pushes since the start, over all servers, in pushes. A quantile is the
    upper bound of its bucket, infinite beyond the last; `largest` is the last finite bound.
    """

    mean: float
    median: float
    quantile_99: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """A job at one time. num_examples: trained on since the servers started."""

    servers: Sequence[ServerStatus]
    tables: Sequence[TableStatus]
    workers: Sequence[WorkerStatus]
    labels: Sequence[LabelStatus]
    staleness: StalenessStatus | None
    num_examples: float
    examples_per_s: float
