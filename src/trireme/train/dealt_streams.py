"""The streams of an epoch that other workers have begun, dealt to the workers of this run.

The streams stay as they were cut; each worker trains on the rest of some, one after the other. What
a worker pushes names the stream that its batch is of, so a checkpoint taken meanwhile can be dealt
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.train.leased_streams import StreamBatches
from trireme.train.loop.worker_batches import EpochPosition, worker_batches
from trireme.worker.client import StreamPosition

Start = EpochPosition | None
"""Where a stream goes on; None: it has been trained on."""


@dataclass(frozen=True)
class DealtStreams:
    """Streams as they were dealt: to each worker every n-th.

    starts: where each stream went on then. sequences: of each worker's last push before.
    """

    starts: tuple[Start, ...]
    sequences: tuple[int, ...]

    @classmethod
    def deal(cls, starts: Sequence[Start], pushed: Sequence[StreamPosition]) -> DealtStreams:
        """Deal streams to the workers whose last pushes these are."""
        return cls(tuple(starts), tuple(push.sequence for push in pushed))

    @property
    def num_workers(self) -> int:
        return len(self.sequences)

    def of_worker(self, worker: int) -> range:
        """The streams of a worker, in the order in which it trains on them."""
        return range(worker, len(self.starts), self.num_workers)

    def streams(
        self, dataset: Iterable[Any], cluster: Cluster, epoch: int
    ) -> Iterator[StreamBatches]:
        """What is left of this worker's streams."""
        for stream in self.of_worker(cluster.worker):
            if (start := self.starts[stream]) is not None:
                part = stream, len(self.starts)
                batches = worker_batches(dataset, cluster, epoch, start, part=part)
                yield StreamBatches(batches, start, (stream,))

    def now(self, pushed: Sequence[StreamPosition]) -> list[Start]:
        """Where each stream goes on after the last pushes of the workers."""
        starts = list(self.starts)
        for worker, (push, before) in enumerate(zip(pushed, self.sequences, strict=True)):
            if push.sequence == before:
                continue
            _, batches, current, *position = push.position
            for stream in self.of_worker(worker):
                if stream == current:
                    starts[stream] = EpochPosition(batches, tuple(position))
                    break
                starts[stream] = None
        return starts

    def to_json(self) -> dict[str, Any]:
        starts = [None if s is None else [s.batches, *s.position] for s in self.starts]
        return {"starts": starts, "sequences": list(self.sequences)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DealtStreams:
        starts = (
            None if s is None else EpochPosition(s[0], tuple(s[1:])) for s in values["starts"]
        )
        return cls(tuple(starts), tuple(values["sequences"]))


def check_streams(dataset: Iterable[Any]) -> None:
    """Raises BadRequest: only the workers that began the epoch know the order of its batches."""
    if not hasattr(dataset, "stream"):
        raise BadRequest(
            "Trainer.fit: expected a dataset with streams to go on within an epoch that another"
            f" number of workers has begun, found {type(dataset).__name__}; use a dataset of"
            " trireme.data, or load() the checkpoint, which begins the epoch again"
        )
