"""A dataset of which each worker brings its own batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class OwnBatches:
    """These batches, whichever stream is asked for."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[Any]:
        del index, num_streams, epoch
        return iter(self.batches)
