"""The default cluster, which `trireme.init()` made: the only module state that users see."""

from functools import partial

from trireme.errors import NotReady
from trireme.job.cluster import Cluster

_default: Cluster | None = None


def default() -> Cluster:
    """The cluster that `trireme.init()` made. Raises NotReady if there is none that is open."""
    if _default is None:
        raise NotReady("trireme: no cluster yet; call trireme.init() first")
    return _default


def is_default_set() -> bool:
    """Whether `trireme.init()` has made a cluster that is still open."""
    return _default is not None


def set_default(cluster: Cluster) -> None:
    """Make this the default until it is closed."""
    global _default
    _default = cluster
    cluster.add_running(partial(_forget, cluster))


def _forget(cluster: Cluster) -> None:
    global _default
    if _default is cluster:
        _default = None
