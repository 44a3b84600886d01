"""The consistency modes of `Strategy`, one file or folder each."""

from trireme.errors import BadRequest
from trireme.strategy import Strategy
from trireme.train.modes.asynchronous import Async
from trireme.train.modes.base import Mode
from trireme.train.modes.bounded import Bounded
from trireme.train.modes.geo import Geo
from trireme.train.modes.hybrid import Hybrid
from trireme.train.modes.local_training import LocalTraining
from trireme.train.modes.sync import Sync

__all__ = ["LocalTraining", "Mode", "check_threads", "make_mode"]

MODES: dict[str, type[Mode]] = {
    "sync": Sync,
    "bounded": Bounded,
    "async": Async,
    "geo": Geo,
    "hybrid": Hybrid,
}


def make_mode(local: LocalTraining) -> Mode:
    """The mode of a worker by its strategy. Raises BadRequest: what the mode cannot train."""
    mode, num_streams = MODES[local.strategy.mode], local.cluster.num_streams
    if num_streams and mode.why_not_shared:
        raise BadRequest(
            f"DistributedOptimizer: expected mode 'async' in a job whose workers share out"
            f" {num_streams} streams, found {local.strategy.mode!r}, in which"
            f" {mode.why_not_shared}"
        )
    return mode(local)


def check_threads(strategy: Strategy, threads: int) -> None:
    """Raises BadRequest: in this mode one thread of a worker trains."""
    if threads > 1 and not MODES[strategy.mode].trains_in_threads:
        raise BadRequest(
            f"Trainer: expected threads=1 in {strategy.mode}, found {threads}: steps come one"
            " after the other; use more workers"
        )
