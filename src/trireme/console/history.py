"""What the page draws over time: few numbers per moment, over the whole job, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from trireme.top.job_status import JobStatus

POINTS_MAX = 1024


@dataclass(frozen=True, kw_only=True)
class Point:
    """A job at one time. `_s` are seconds; None: unknown.

    Attributes:
        at: seconds since the console started.
        pull_s, push_s: mean time of a request at the slowest server.
        hit_share: of the keys of tables with rows on SSD, those whose row was in memory; the least.
        figures: loss and metrics as worker 0 shows them.
    """

    at: float
    examples_per_s: float
    num_rows: float
    pull_s: float | None
    push_s: float | None
    hit_share: float | None
    figures: Mapping[str, float]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def point_of(at: float, job: JobStatus) -> Point:
    tiers = [table.tier for table in job.tables if table.tier is not None]
    hits = [tier.hit_share for tier in tiers if tier.hit_share is not None]
    return Point(
        at=at,
        examples_per_s=job.examples_per_s,
        num_rows=sum(table.num_rows for table in job.tables),
        pull_s=max((s.pull_s for s in job.servers if s.pull_s is not None), default=None),
        push_s=max((s.push_s for s in job.servers if s.push_s is not None), default=None),
        hit_share=min(hits, default=None),
        figures=next((worker.figures for worker in job.workers if worker.figures), {}),
    )


class History:
    """The points of a job. When there are POINTS_MAX, every second one is dropped, and from then on
    half as many are kept, so the whole job is covered however long it is. Threads: one at a time.
    """

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._stride, self._num_seen = 1, 0

    def add(self, point: Point) -> None:
        self._num_seen += 1
        if (self._num_seen - 1) % self._stride:
            return
        self._points.append(point)
        if len(self._points) >= POINTS_MAX:
            del self._points[1::2]
            self._stride *= 2

    @property
    def points(self) -> Sequence[Point]:
        return tuple(self._points)
