"""What all imports and exports share: every worker calls them, worker 0 has the servers act."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import xxhash

from trireme.errors import BadRequest
from trireme.progress import display
from trireme.train.first_worker import let_first_worker
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.trainer import Trainer


def on_first_worker(
    optimizer: DistributedOptimizer, name: str, act: Callable[[], dict[str, Any]], *asked: Any
) -> dict[str, Any]:
    """Wait until every worker calls the function `name` and all pushes are applied; returns what
    `act` returns on worker 0. asked: arguments that all workers must have in common. Raises
    BadRequest: they have not, and nothing was done; within a pass on a device.
    """
    optimizer.mode.check_between_passes(name)
    optimizer.flush()
    optimizer.refresh()  # in sync, the last step is staged until then; a pull ends an import
    body = {} if optimizer.cluster.num_workers == 1 else {"asked": _digest(asked)}
    replies = optimizer.cluster.client.coordinator.gather(body, [], purpose=name)
    if any(reply != replies[0][0] for reply, _ in replies):
        raise BadRequest(
            f"{name}: expected the same arguments at all workers, for worker 0 acts for all, found"
            " different ones; nothing was done"
        )

    def settled() -> dict[str, Any]:
        optimizer.cluster.client.servers.everywhere_current("import.settled", {})
        return act()

    return let_first_worker(optimizer.cluster, name, settled)


def _digest(asked: Iterable[Any]) -> str:
    """Of numbers by their bytes, without a copy: there may be gigabytes."""
    digest = xxhash.xxh3_128()
    for one in asked:
        array = np.asarray(one) if hasattr(one, "__array__") else None
        if array is None or array.dtype.hasobject:
            digest.update(repr(one.tolist() if hasattr(one, "tolist") else one).encode())
        else:
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def data_time(optimizer: DistributedOptimizer, time: int | None) -> int:
    """A data time in seconds; None: that of `set_time`."""
    return optimizer.data_time.seconds() if time is None else time


@contextmanager
def progress_of(
    trainer: Trainer | DistributedOptimizer, title: str
) -> Iterator[Callable[[float], None]]:
    """A function that shows the fraction done, where the trainer shows progress."""
    shows = isinstance(trainer, Trainer) and trainer.shows_progress
    with display(title, is_quiet=not shows) as shown:

        def watch(fraction: float) -> None:
            if shown.is_due():
                shown.show_fraction(fraction)

        yield watch
