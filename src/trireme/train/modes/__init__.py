"""The consistency modes of `Strategy`, one file or folder each."""

from trireme.train.modes.asynchronous import Async
from trireme.train.modes.base import Mode
from trireme.train.modes.bounded import Bounded
from trireme.train.modes.collective.mode import Collective
from trireme.train.modes.geo.mode import Geo
from trireme.train.modes.hybrid.mode import Hybrid
from trireme.train.modes.sync import Sync

__all__ = ["Async", "Bounded", "Collective", "Geo", "Hybrid", "Mode", "Sync"]


def mode_class(name: str) -> type[Mode]:
    """The mode that a Strategy names."""
    modes: dict[str, type[Mode]] = {
        "sync": Sync,
        "bounded": Bounded,
        "async": Async,
        "geo": Geo,
        "hybrid": Hybrid,
        "collective": Collective,
    }
    return modes[name]
