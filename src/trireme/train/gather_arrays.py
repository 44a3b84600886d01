"""Arrays of all workers brought together, whatever their sizes."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.job.cluster import Cluster

log = logging.getLogger("trireme.train")

# What all workers together may bring to one meeting: half of what one message may hold.
_MEETING_BYTES_MAX = 1 << 27
_WORKER_BYTES_MAX = 1 << 26


def gather_arrays(
    cluster: Cluster, arrays: Sequence[NDArray[Any]], purpose: str
) -> dict[int, list[NDArray[Any]]]:
    """The arrays of every worker, by worker in ascending order. Every worker calls it.

    They travel as bytes, in as many meetings as the largest worker needs. A worker that comes to
    the first meeting and not to the last is left out.
    """
    own = np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays])
    forms = [[array.dtype.str, list(array.shape)] for array in arrays]
    at_a_time = max(cluster.num_workers, cluster.num_streams)
    size = min(_WORKER_BYTES_MAX, _MEETING_BYTES_MAX // at_a_time)
    chunks: dict[int, list[NDArray[np.uint8]]] = {}
    headers: dict[int, Any] = {}
    begin, end = 0, 1
    with cluster.client.script.section():
        while begin < end:
            body = {"worker": cluster.worker, "bytes": len(own), "forms": [] if begin else forms}
            received = cluster.client.coordinator.gather(
                body, [own[begin : begin + size]], purpose=purpose, patient=True
            )
            if begin == 0:
                headers = {header["worker"]: header for header, _ in received}
                end = max(header["bytes"] for header in headers.values())
            begin += size
            for header, [chunk] in received:
                chunks.setdefault(header["worker"], []).append(chunk)
    data = {worker: np.concatenate(parts) for worker, parts in chunks.items()}
    if gone := [w for w, header in headers.items() if len(data[w]) < header["bytes"]]:
        log.warning("%s: workers %s were given up during it, and what they bring", purpose, gone)
    return {w: _split(data[w], h["forms"]) for w, h in headers.items() if w not in gone}


def _split(data: NDArray[np.uint8], forms: Any) -> list[NDArray[Any]]:
    arrays, begin = [], 0
    for dtype, shape in forms:
        size = np.dtype(dtype).itemsize * math.prod(shape)
        arrays.append(data[begin : begin + size].copy().view(dtype).reshape(shape))  # aligned
        begin += size
    return arrays
