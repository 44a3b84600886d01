"""The batches of an InMemoryDataset, and the calls that made their order."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trireme.data.batch import Batch

if TYPE_CHECKING:
    from trireme.data.in_memory_dataset import InMemoryDataset


class InMemoryStream(Iterator[Batch]):
    """The batches of the examples [position[0], end); made by InMemoryDataset.stream.

    Attributes:
        position: after the latest batch returned: (example, number of the order).
        seconds: spent making batches.

    Threads: one at a time.
    """

    def __init__(
        self, dataset: InMemoryDataset, index: int, begin: int, end: int, position: tuple[int, int]
    ) -> None:
        self.position = position
        self.seconds = {"read": 0.0, "parse": 0.0}
        self.num_broken_lines = dataset.num_broken_lines
        self._dataset, self._index, self._begin, self._end = dataset, index, begin, end

    def __next__(self) -> Batch:
        begin, order = self.position
        end = min(begin + self._dataset.batch_size, self._end)
        is_short = end - begin < self._dataset.batch_size
        if begin == end or (is_short and self._dataset.drop_last):
            raise StopIteration
        started = time.monotonic()
        batch = self._dataset._batch(begin, end, order)
        self.seconds["read"] += time.monotonic() - started
        self.position = (end, order)
        batch.stream, batch.position = self._index, self.position
        return batch

    def fraction_read(self) -> float:
        """The fraction of the stream that has been returned, 0 to 1."""
        size = self._end - self._begin
        return (self.position[0] - self._begin) / size if size else 1.0

    def close(self) -> None:
        """Do nothing: batches are made on demand."""

    def __enter__(self) -> InMemoryStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ShuffleHistory:
    """The calls since a load, in order.

    Attributes:
        order: a number for the order of the examples: equal after the same calls.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.order = self._num_shuffles = 0

    def begin(self, worker: int, num_workers: int, num_examples: int) -> None:
        """Examples have been loaded."""
        self.order = zlib.crc32(
            repr(("load", self._seed, worker, num_workers, num_examples)).encode()
        )
        self._num_shuffles = 0

    def add(self, call: str, num_examples: int) -> None:
        """Another shuffle begins."""
        self._num_shuffles += 1
        text = repr((call, self._num_shuffles, num_examples))
        self.order = zlib.crc32(text.encode(), self.order)

    def seed(self, call: str, worker: int) -> int:
        """64 bits for the current shuffle."""
        text = repr((self._seed, call, self._num_shuffles, worker))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
