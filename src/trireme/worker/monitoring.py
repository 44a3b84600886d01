"""What a worker reports to Prometheus, to its health endpoint, and to `trireme top`.

docs/metrics.md lists the metrics; a test compares the two.
"""

from collections.abc import Callable, Mapping
from typing import Any

from trireme.protocol.figures import FIGURE_NAME_MAX, FIGURES_MAX
from trireme.protocol.label_use import LabelUse
from trireme.rpc import Ended
from trireme.telemetry.endpoint import Endpoint
from trireme.telemetry.health import Health
from trireme.telemetry.instruments import SECONDS, Counter, Gauge, Histogram
from trireme.telemetry.registry import Registry, new_registry

LABEL_GAUGES = {
    "trireme_worker_compute_credits": (
        "credits",
        "Batches that this worker may have in flight at the compute workers of a label.",
    ),
    "trireme_worker_compute_in_flight": ("in_flight", "Batches that it has there."),
    "trireme_worker_compute_reachable": (
        "reachable",
        "Compute workers of a label that it can reach, as far as it knows.",
    ),
    "trireme_worker_compute_batches_total": ("batches", "Batches computed for it."),
    "trireme_worker_compute_failovers_total": (
        "failovers",
        "Calls that another compute worker got because one did not answer or was full.",
    ),
    "trireme_worker_compute_wait_seconds_total": (
        "waited_s",
        "Time that it waited for these batches, all credits together.",
    ),
    "trireme_worker_compute_busy_seconds_total": (
        "computed_s",
        "Time that compute workers took to compute them.",
    ),
}
"""Gauges of compute workers, by label: the field of LabelUse, and the documentation."""


class WorkerMetrics:
    """The metrics and the health of a worker process; `calls` counts the calls to servers.

    listen: "[host:]port" that answers /metrics and /healthz; None: no endpoint.
    trains: False: it makes no steps, and shows nothing about them.
    num_steps, num_examples: of the pushes so far; written by one thread at a time.
    num_skipped: how many steps had no gradients, because they were not finite.
    queues: name of a queue of the training loop -> its length.
    num_credits: batches that it may have in flight at compute workers.
    figures: loss and metrics of the running pass so far, by name, when it showed them last;
        replaced as a whole.
    """

    def __init__(
        self, role: str, listen: str | None, name: str = "worker", *, trains: bool = True
    ) -> None:
        self.registry, self.health = new_registry(role, name), Health()
        own = self.registry if trains else new_registry(role, name)
        self.calls = CallMetrics(own)
        self.num_steps = self.num_examples = self.num_skipped = 0
        self.queues: dict[str, Callable[[], int]] = {}
        self.figures: Mapping[str, float] = {}
        self._labels: dict[str, Callable[[int], LabelUse]] = {}
        self.num_credits = 1
        for gauge in (
            Gauge(
                "trireme_worker_steps_total",
                "Steps whose gradients this worker has pushed, or is about to.",
                lambda: self.num_steps,
            ),
            Gauge(
                "trireme_worker_examples_total",
                "Examples of these steps.",
                lambda: self.num_examples,
            ),
            Gauge(
                "trireme_worker_skipped_steps_total",
                "Steps that were skipped because their gradients were not finite"
                " (skip_not_finite).",
                lambda: self.num_skipped,
            ),
            Gauge(
                "trireme_worker_queue_depth",
                "Batches read and planned ahead (planned), with their rows (pulled), and pushes"
                " behind the training loop (pushes).",
                self._depths,
                ["queue"],
            ),
            Gauge(
                "trireme_worker_figure",
                "Loss and metrics of the running pass so far, of this worker, as it shows them.",
                lambda: self.figures,
                ["figure"],
            ),
        ):
            own.register(gauge)
        self._endpoint: Endpoint | None = None
        if listen is not None:
            self._endpoint = Endpoint(listen, self.registry, self.health)
            self._endpoint.start()

    def _label_uses(self) -> dict[str, LabelUse]:
        return {label: read(self.num_credits) for label, read in self._labels.copy().items()}

    def watch_label(self, label: str, read: Callable[[int], LabelUse]) -> None:
        """Show how this worker uses the compute workers of a label. read: is given num_credits."""
        if not self._labels:
            for name, (field, documentation) in LABEL_GAUGES.items():
                self.registry.register(Gauge(name, documentation, self._reader(field), ["label"]))
        self._labels[label] = read

    def _reader(self, field: str) -> Callable[[], dict[str, float]]:
        return lambda: {label: getattr(use, field) for label, use in self._label_uses().items()}

    def _depths(self) -> dict[str, int]:
        return {name: read() for name, read in self.queues.copy().items()}

    def count_step(self, examples: int) -> None:
        self.num_steps += 1
        self.num_examples += examples

    def report(self) -> dict[str, Any]:
        """What heartbeats carry, for `trireme top`."""
        body: dict[str, Any] = {"report": {"retries": self.calls.num_retries(), **self._depths()}}
        if figures := list(self.figures.items())[:FIGURES_MAX]:
            body["figures"] = {name[:FIGURE_NAME_MAX]: value for name, value in figures}
        if uses := self._label_uses():
            body["labels"] = {label: use.to_wire() for label, use in uses.items()}
        return body

    def waits(self, client: str, line: str) -> None:
        """Mark a client as waiting for a peer, described by the line; "": it waits no more."""
        if line:
            self.health.hinder(client, line)
        else:
            self.health.clear(client)

    @property
    def url(self) -> str | None:
        """Where /metrics and /healthz are; None: there is no endpoint."""
        return None if self._endpoint is None else self._endpoint.url

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.stop()


class CallMetrics:
    """Counts calls. Give `observe` to the worker's clients."""

    def __init__(self, registry: Registry) -> None:
        self._calls = Counter(
            "trireme_worker_calls_total",
            "Calls that ended, by method and by the name of the error, OK if none.",
            ["method", "code"],
        )
        self._seconds = Histogram(
            "trireme_worker_call_seconds",
            "Time of a call of a worker to its servers, retries and waiting included.",
            ["method"],
            SECONDS,
        )
        self._retries = Counter(
            "trireme_worker_retries_total",
            "Requests that were sent again: the connection was lost, or the server was full.",
            ["method"],
        )
        self._sent = Counter("trireme_worker_sent_bytes_total", "Bytes of requests sent.")
        self._received = Counter("trireme_worker_received_bytes_total", "Bytes of answers.")
        for metric in (self._calls, self._seconds, self._retries, self._sent, self._received):
            registry.register(metric)

    def num_retries(self) -> int:
        """Retries of all methods."""
        return int(sum(self._retries.read().values()))

    def observe(self, ended: Ended) -> None:
        self._calls.add(1, ended.method, ended.error or "OK")
        self._seconds.observe(ended.seconds, ended.method)
        self._retries.add(ended.num_retries, ended.method)
        self._sent.add(ended.num_bytes_sent)
        self._received.add(ended.num_bytes_received)
