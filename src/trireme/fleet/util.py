"""fleet.util: files divided among workers, values combined over them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.errors import BadRequest, NotReady
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


def all_reduce(value: Any, mode: str = "sum") -> npt.NDArray[Any]:
    """Combine an array or number of every worker element by element; returns it to all."""
    if mode not in _COMBINE:
        raise BadRequest(
            f"fleet.util.all_reduce: expected one of {sorted(_COMBINE)}, found {mode!r}"
        )
    array = np.array(value, order="C")
    parts = [arrays[0] for _, arrays in _cluster().client.coordinator.gather({}, [array])]
    if any(part.shape != array.shape for part in parts):
        raise BadRequest(
            f"fleet.util.all_reduce: expected one shape, found {[part.shape for part in parts]}"
        )
    combined: npt.NDArray[Any] = _COMBINE[mode].reduce(np.stack(parts), axis=0)
    return combined


def barrier() -> None:
    """Wait for all workers."""
    _cluster().client.coordinator.gather({}, [])


def _cluster() -> Cluster:
    """The default cluster; after fleet.init() alone this joins it."""
    try:
        return default()
    except NotReady:
        return job.cluster()
