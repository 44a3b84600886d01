"""A dataset whose batches a function changes, before their lookups are planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from trireme.data.batch import Batch
from trireme.data.foreign import as_batch

Prepare = Callable[[Batch], Batch]


class PreparedDataset:
    """A dataset with streams, each of whose batches `prepare` makes into another one of the same
    examples: with sampled ids as one more column, say. What it draws should depend on the batch
    alone, such as its `epoch` and `position`, if a resumed run is to see the same.

    Everything else is that of the dataset.
    """

    def __init__(self, dataset: Any, prepare: Prepare) -> None:
        self._dataset, self._prepare = dataset, prepare

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as pickle asks for, before there is a dataset
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __iter__(self) -> Iterator[Batch]:
        return self.stream(0, 1)

    def stream(
        self, index: int, num_streams: int, *, start: tuple[int, ...] | None = None, epoch: int = 0
    ) -> PreparedStream:
        """A stream of the dataset, prepared."""
        batches = self._dataset.stream(index, num_streams, start=start, epoch=epoch)
        return PreparedStream(batches, self._prepare, epoch)


class PreparedStream(Iterator[Batch]):
    """Prepared batches of a stream, which has the other attributes."""

    def __init__(self, batches: Iterable[Any], prepare: Prepare, epoch: int = 0) -> None:
        self._batches, self._iterator, self._prepare = batches, iter(batches), prepare
        self._epoch = epoch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __next__(self) -> Batch:
        batch = as_batch(next(self._iterator))
        stream, position, batch.epoch = batch.stream, batch.position, self._epoch
        prepared = as_batch(self._prepare(batch))
        prepared.stream, prepared.position, prepared.epoch = stream, position, self._epoch
        return prepared
