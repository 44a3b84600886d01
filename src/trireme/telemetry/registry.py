"""The metrics registry of a process."""

import importlib.metadata
import platform
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

Registry = CollectorRegistry


def new_registry(role: str, name: str) -> Registry:
    """A registry with metrics of the process: uptime, versions, memory, CPU, descriptors. Each
    server and each cluster has its own, also within one process. role: "server", "worker" or
    "embedded". name: of the process, such as "worker 0".
    """
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    registry.register(_Build(role, name))
    return registry


def text_of(registry: Registry) -> bytes:
    """All metrics in Prometheus' text format, UTF-8."""
    return generate_latest(registry)


class _Build:
    def __init__(self, role: str, name: str) -> None:
        self._started = time.monotonic()
        self._labels = {
            "role": role,
            "name": name,
            "version": _version_of("trireme-ps"),
            "python": platform.python_version(),
            "torch": _version_of("torch"),
        }

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "trireme_build_info", "1, with what runs here.", labels=list(self._labels)
        )
        info.add_metric(list(self._labels.values()), 1)
        yield info
        yield GaugeMetricFamily(
            "trireme_uptime_seconds",
            "Time since the process started its metrics.",
            value=time.monotonic() - self._started,
        )


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
