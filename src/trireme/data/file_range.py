"""Which part of the files each stream reads.

All files are laid end to end. Where a file can be read from any byte, the whole is cut into S
ranges of equal size, and a line belongs to the range in which it begins: ranges are balanced
whatever the number of files. Where files must be read from their beginning (compressed, or through
a command), each belongs to one stream: contiguous blocks of files, one more for the first
`files % S` streams.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from trireme.data.sources import DataFile, file_starts
from trireme.errors import BadRequest


@dataclass(frozen=True)
class FileRange:
    """The bytes [begin, end) of all files laid end to end, in file numbers `first` to `last`.

    index: of the stream. can_seek: the files can be read from any byte on.
    """

    index: int
    begin: int
    end: int
    first: int
    last: int
    can_seek: bool

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def range_of_stream(
    files: Sequence[DataFile],
    index: int,
    num_streams: int,
    *,
    can_seek: bool,
    own_files: bool = False,
) -> FileRange:
    """What stream `index` of `num_streams` reads: its part, or everything with `own_files`.

    Raises:
        BadRequest: fewer files than streams, where files cannot be cut.
    """
    starts = file_starts(files)
    if own_files:
        return FileRange(index, 0, starts[-1], 0, len(files) - 1, can_seek)
    if can_seek:
        begin, end = (starts[-1] * i // num_streams for i in (index, index + 1))
        first = min(bisect_right(starts, begin), len(files)) - 1
        last = max(bisect_left(starts, end) - 1, first)
        return FileRange(index, begin, end, first, last, can_seek)
    if len(files) < num_streams:
        raise BadRequest(
            f"QueueDataset.stream: expected at least {num_streams} files for {num_streams} streams,"
            f" because files that are compressed or go through a pipe_command cannot be cut; found"
            f" {len(files)}: {', '.join(file.path for file in files)}; split them into more files,"
            " or use fewer workers"
        )
    size, more = divmod(len(files), num_streams)
    first, behind = (i * size + min(i, more) for i in (index, index + 1))
    return FileRange(index, starts[first], starts[behind], first, behind - 1, can_seek)
