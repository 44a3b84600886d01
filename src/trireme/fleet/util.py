"""fleet.util: files divided among workers, values combined over them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.errors import BadRequest, NotReady, check_choice
from trireme.fleet.calls import job
from trireme.job.cluster import Cluster
from trireme.job.default import default

_COMBINE: Mapping[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def get_file_shard(files: Sequence[str]) -> list[str]:
    """This worker's contiguous part of the files; the first workers get one more."""
    if isinstance(files, str):
        raise BadRequest(f"fleet.util.get_file_shard: expected a list of files, found {files!r}")
    at = _cluster()
    if at.num_streams:
        raise BadRequest(
            "fleet.util.get_file_shard: expected a job in which each worker has its own files,"
            f" found one whose workers share out {at.num_streams} streams: give the dataset all"
        )
    size, extra = divmod(len(files), at.num_workers)
    start = at.worker * size + min(at.worker, extra)
    return list(files[start : start + size + (at.worker < extra)])


def all_reduce(value: Any, mode: str = "sum", comm_world: str = "worker") -> npt.NDArray[Any]:
    """Combine an array or number of every worker element by element; returns it to all."""
    check_choice("fleet.util.all_reduce", _COMBINE, mode=mode)
    array = np.array(value, order="C")
    parts = _of_all("all_reduce", array, comm_world)
    if any(part.shape != array.shape for part in parts):
        raise BadRequest(
            f"fleet.util.all_reduce: expected one shape, found {[part.shape for part in parts]}"
        )
    combined: npt.NDArray[Any] = _COMBINE[mode].reduce(np.stack(parts), axis=0)
    return combined


def all_gather(value: Any, comm_world: str = "worker") -> list[Any]:
    """The number or array of every worker, in their order; returns them to all."""
    parts = _of_all("all_gather", np.array(value, order="C"), comm_world)
    return [part.item() if part.ndim == 0 else part for part in parts]


def barrier(comm_world: str = "worker") -> None:
    """Wait for all workers."""
    _of_all("barrier", np.empty(0), comm_world)


def print_on_rank(message: Any, rank_id: int) -> None:
    """Print on the worker of this index alone."""
    if _cluster().worker == rank_id:
        print(message)


def _of_all(name: str, array: npt.NDArray[Any], comm_world: str) -> list[npt.NDArray[Any]]:
    if comm_world != "worker":
        raise BadRequest(
            f"fleet.util.{name}: expected comm_world 'worker', found {comm_world!r}: servers run no"
            " script meanwhile, and meet nobody"
        )
    return [arrays[0] for _, arrays in _cluster().client.coordinator.gather({}, [array])]


def _cluster() -> Cluster:
    """The default cluster; after fleet.init() alone this joins it."""
    try:
        return default()
    except NotReady:
        return job.cluster()
