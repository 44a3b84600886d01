"""The reader of a worker that has no files."""

from collections.abc import Iterator
from typing import Final

from trireme.data.batch import Batch
from trireme.errors import BadRequest


class NoFiles:
    """No batches, in the form of the readers of files.

    Raises BadRequest: `start` is a position in files that were here before.
    """

    num_bytes: Final = 0
    num_bytes_read: Final = 0
    num_broken_lines: Final = 0
    position: tuple[int, ...] = ()

    def __init__(self, start: tuple[int, ...]) -> None:
        if start:
            raise BadRequest(
                f"QueueDataset: expected the files of the position {start}, found no files"
            )
        self.seconds = {"read": 0.0, "parse": 0.0}

    def stop(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def batches(self, *, drop_last: bool) -> Iterator[tuple[Batch, int]]:
        """None. drop_last: without effect."""
        return iter(())
