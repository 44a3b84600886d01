"""Arrays of all workers brought together, whatever their sizes."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.job.cluster import Cluster
from trireme.protocol.meeting_arrays import ALL, SUM

log = logging.getLogger("trireme.train")

# What all workers together may bring to one meeting: half of what one message may hold.
_MEETING_BYTES_MAX = 1 << 27
_WORKER_BYTES_MAX = 1 << 26


def gather_arrays(
    cluster: Cluster, arrays: Sequence[NDArray[Any]], purpose: str, to: str = ALL
) -> dict[int, list[NDArray[Any]]]:
    """The arrays of every worker, by worker in ascending order. Every worker calls it. to: who gets
    them, ALL or FIRST; others get none.

    They travel as bytes, in as many meetings as the largest worker needs. A worker that comes to
    the first meeting and not to the last is left out.
    """
    own = _as_bytes(arrays)
    forms = [[array.dtype.str, list(array.shape)] for array in arrays]
    size = meeting_bytes(_num_workers(cluster))
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
    forms = [[array.dtype.str, list(array.shape)] for array in arrays]
    sums: list[NDArray[Any]] = []
    with cluster.client.script.section():
        for pieces in pieces_by_meeting(arrays, meeting_bytes(_num_workers(cluster))):
            body = {**like, "forms": forms}
            [(_, summed)] = cluster.client.coordinator.gather(
                body, pieces, purpose=purpose, patient=True, to=SUM
            )
            sums += summed
    return _split(_as_bytes(sums), forms) if cluster.worker == 0 else None


def pieces_by_meeting(
    arrays: Sequence[NDArray[Any]], num_bytes_max: int
) -> list[list[NDArray[Any]]]:
    """The arrays, flat and in order, cut into what each meeting takes."""
    meetings: list[list[NDArray[Any]]] = [[]]
    room = num_bytes_max
    for array in arrays:
        rest = np.ascontiguousarray(array).reshape(-1)
        while len(rest):
            if (num := room // rest.itemsize) == 0:
                meetings.append([])
                room = num_bytes_max
                continue
            meetings[-1].append(rest[:num])
            room -= rest[:num].nbytes
            rest = rest[num:]
    return meetings


def meeting_bytes(num_workers: int) -> int:
    """What each of so many workers may bring to one meeting."""
    return min(_WORKER_BYTES_MAX, _MEETING_BYTES_MAX // num_workers)


def _num_workers(cluster: Cluster) -> int:
    """That may come to a meeting."""
    return max(cluster.num_workers, cluster.num_streams)


def _as_bytes(arrays: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    return np.concatenate([np.empty(0, np.uint8), *flat])


def _split(data: NDArray[np.uint8], forms: Any) -> list[NDArray[Any]]:
    arrays, begin = [], 0
    for dtype, shape in forms:
        size = np.dtype(dtype).itemsize * math.prod(shape)
        arrays.append(data[begin : begin + size].copy().view(dtype).reshape(shape))  # aligned
        begin += size
    return arrays
