"""Arrays of all workers brought together, whatever their sizes."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.job.cluster import Cluster
from trireme.protocol.wire import ALL, SUM

log = logging.getLogger("trireme.train")

# What all workers together may bring to one meeting: half of what one message may hold.
MEETING_BYTES_MAX = 1 << 27
_WORKER_BYTES_MAX = 1 << 26


def gather_arrays(
    cluster: Cluster, arrays: Sequence[NDArray[Any]], purpose: str, to: str = ALL
) -> dict[int, list[NDArray[Any]]]:
    """The arrays of every worker, by worker in ascending order. Every worker calls it. to: who gets
    them, ALL or FIRST; others get none.

    They travel as bytes, in as many meetings as the largest worker needs. A worker that comes to
    the first meeting and not to the last is left out.
    """
    own = np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays])
    forms = [[array.dtype.str, list(array.shape)] for array in arrays]
    size = _meeting_bytes(cluster)
    chunks: dict[int, list[NDArray[np.uint8]]] = {}
    headers: dict[int, Any] = {}
    begin, end = 0, 1
    with cluster.client.script.section():
        while begin < end:
            body = {"worker": cluster.worker, "bytes": len(own), "forms": [] if begin else forms}
            received = cluster.client.coordinator.gather(
                body, [own[begin : begin + size]], purpose=purpose, patient=True, to=to
            )
            if begin == 0:
                headers = {header["worker"]: header for header, _ in received}
                end = max(header["bytes"] for header in headers.values())
            begin += size
            for header, pieces in received:
                chunks.setdefault(header["worker"], []).extend(pieces)
    if to != ALL and cluster.worker != 0:
        return {}
    data = {worker: np.concatenate(parts) for worker, parts in chunks.items()}
    if gone := [w for w, header in headers.items() if len(data[w]) < header["bytes"]]:
        log.warning("%s: workers %s were given up during it, and what they bring", purpose, gone)
    return {w: _split(data[w], h["forms"]) for w, h in headers.items() if w not in gone}


def sum_arrays(
    cluster: Cluster, arrays: Sequence[NDArray[Any]], purpose: str, like: Mapping[str, Any]
) -> list[NDArray[Any]] | None:
    """On worker 0 the sums of the arrays of all workers, added in the order of the workers; None on
    the others. Every worker calls it, with arrays of the same shapes and an equal `like`. The
    coordinator adds them, so worker 0 receives as many bytes as it sends.
    """
    body = {**like, "forms": [[array.dtype.str, list(array.shape)] for array in arrays]}
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    num_meetings = -(-sum(array.nbytes for array in flat) // _meeting_bytes(cluster))
    at_a_time = -(-max(map(len, flat)) // num_meetings)
    parts: list[list[NDArray[Any]]] = []
    workers: set[int] = set()
    with cluster.client.script.section():
        while len(parts) < num_meetings:
            begin = at_a_time * len(parts)
            pieces = [array[begin : begin + at_a_time] for array in flat]
            [(summed, part)] = cluster.client.coordinator.gather(
                body, pieces, purpose=purpose, patient=True, to=SUM
            )
            parts.append(part)
            workers.add(summed["workers"])
            if len(workers) > 1:
                log.warning("%s: other workers came to a part of it: once more", purpose)
                parts, workers = [], set()
    if cluster.worker != 0:
        return None
    whole = [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]
    return [sums.reshape(array.shape) for sums, array in zip(whole, arrays, strict=True)]


def _meeting_bytes(cluster: Cluster) -> int:
    """What each worker may bring to one meeting."""
    return min(
        _WORKER_BYTES_MAX, MEETING_BYTES_MAX // max(cluster.num_workers, cluster.num_streams)
    )


def _split(data: NDArray[np.uint8], forms: Any) -> list[NDArray[Any]]:
    arrays, begin = [], 0
    for dtype, shape in forms:
        size = np.dtype(dtype).itemsize * math.prod(shape)
        arrays.append(data[begin : begin + size].copy().view(dtype).reshape(shape))  # aligned
        begin += size
    return arrays
