"""The default cluster, which `trireme.init()` made: the only module state that users see."""

from functools import partial
from typing import Any

from trireme.errors import NotReady
from trireme.job.cluster import Cluster

_default: Cluster | None = None
_settings: Any = None  # that it was made with


def default() -> Cluster:
    """The cluster that `trireme.init()` made. Raises NotReady if there is none that is open."""
    if _default is None:
        raise NotReady("trireme: no cluster yet; call trireme.init() first")
    return _default


def is_default_set() -> bool:
    """Whether `trireme.init()` has made a cluster that is still open."""
    return _default is not None


def default_settings() -> Any:
    """What `trireme.init()` made the default cluster with."""
    return _settings


def set_default(cluster: Cluster, settings: Any = None) -> None:
    """Make this the default until it is closed."""
    global _default, _settings
    _default, _settings = cluster, settings
    cluster.add_running(partial(_forget, cluster))


def _forget(cluster: Cluster) -> None:
    global _default
    if _default is cluster:
        _default = None
