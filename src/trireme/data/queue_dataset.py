"""Files as streams of batches, read and parsed ahead of the consumer in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import xxhash

from trireme.bounded_queue import ReadAhead
from trireme.data.arrow_reader import ArrowReader, ArrowTable
from trireme.data.batch import Batch, check_stream
from trireme.data.pipe import Pipe
from trireme.data.pipe_process import checked_command
from trireme.data.schema import Schema
from trireme.data.sources import FileRange, Paths, find_files, range_of_stream
from trireme.data.text_parser import TextFormat, TextParser
from trireme.data.text_reader import TextReader
from trireme.errors import BadRequest, check_choice, check_counts, check_flags
from trireme.threads import THREADS_MAX


class QueueDataset:
    """Batches of the lines of text files (or rows of tables), in the order of the files.

    Iterating reads everything once; `stream` reads one of several parts, or continues from a
    position. The order within a stream depends on the files and the number of streams alone.

    Args:
        paths: a file, a glob pattern, or a list of them: local, or locations of fsspec such as
            s3://bucket/part-*. A list keeps its order, the matches of a pattern come in natural
            order (part-2 before part-10). Text whose name ends in .gz or .zst is decompressed.
        schema: what the files hold; from tr.data.criteo(), for instance.
        batch_size: examples per batch; the last one of a stream may have fewer.
        threads: threads that parse one batch; one parses millions of lines per second. As many
            compressed or remote files are read at once.
        drop_last: leave out the last batch of a stream if it is short.
        on_error: "raise": a broken line is a DataError naming file, line and value. "count": it is
            skipped and counted, and the log shows their number and the first one.
        batches_ahead: batches that each stream keeps ready; bounds its memory.
        pipe_command: a shell command. It gets each file, decompressed, on stdin, and its stdout is
            read in place of the file; `threads` of them run at once. A script built on
            trireme.fleet's generators serves one file after the other. A command that fails is a
            DataError, with its exit code and the last lines of its stderr.
        own_files: the paths belong to this worker: a stream reads all of them. An empty list is an
            empty share, with a warning.
        storage_options: of fsspec, for remote locations.

    Raises:
        DataError: a path or pattern without a readable, non-empty file; named in the message.
        BadRequest: an argument out of range, or a protocol without its package.

    Threads: any; it holds no state of its streams.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        schema: Schema,
        batch_size: int,
        threads: int = 1,
        drop_last: bool = False,
        on_error: Literal["raise", "count"] = "raise",
        batches_ahead: int = 4,
        pipe_command: str | None = None,
        own_files: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(schema.format, (ArrowTable, TextFormat)):
            example = "a schema with a format, as tr.data.criteo() returns it"
            raise BadRequest(f"QueueDataset: expected {example}, found {schema!r}")
        check_flags("QueueDataset", drop_last=drop_last, own_files=own_files)
        check_choice("QueueDataset", ("raise", "count"), on_error=on_error)
        for name, value, high in (
            ("batch_size", batch_size, 2**31 - 1),
            ("threads", threads, THREADS_MAX),
            ("batches_ahead", batches_ahead, 2**31 - 1),
        ):
            check_counts("QueueDataset", **{name: value})
            if value > high:
                raise BadRequest(f"QueueDataset: expected {name} <= {high}, found {value}")
        self.schema = schema
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.files = find_files(paths, storage_options, own_files=own_files)
        self.own_files = own_files
        self._format = schema.format
        if isinstance(self._format, ArrowTable):
            if pipe_command is not None:
                raise BadRequest(
                    f"QueueDataset: expected a schema with a text format with pipe_command, found "
                    f"{self._format}"
                )
            self._format.check_names(self.files)
        self._threads = threads
        self._skip_broken = on_error == "count"
        self._batches_ahead = batches_ahead
        self._pipe_command = None if pipe_command is None else checked_command(pipe_command)

    def __repr__(self) -> str:
        return (
            f"QueueDataset({len(self.files)} file{'s' if len(self.files) != 1 else ''},"
            f" batch_size={self.batch_size}, columns {', '.join(self.schema.names)})"
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def cut(self) -> str:
        """What positions depend on: streams divide the bytes of all files, in their order."""
        files = [file.identity for file in self.files]
        if len(files) <= NAMED_FILES_MAX:
            return ", ".join(files) or "no files"
        digest = xxhash.xxh64_hexdigest(", ".join(files).encode())
        return (
            f"{len(files)} files of {self.num_bytes} bytes, XXH64 {digest} of what identifies them"
        )

    def __iter__(self) -> Stream:
        return self.stream(0, 1)

    def stream(
        self, index: int, num_streams: int, *, start: tuple[int, ...] | None = None, epoch: int = 0
    ) -> Stream:
        """Stream `index` of `num_streams`: every line is in exactly one, but for `own_files`.

        Streams get about equal numbers of bytes. Files that are compressed or go through a command
        cannot be cut: streams get contiguous blocks of them, one more for the first
        len(files) % num_streams streams; the last ones get none if there are fewer files than
        streams, with a warning.

        Args:
            start: the `position` of a batch of this stream, over the same files: the stream
                continues after that batch. None or (): from its beginning.
            epoch: ignored: the order is that of the files in every epoch.

        Raises:
            BadRequest: index, num_streams or start out of range, or start is not at a line; where
                files cannot be cut, start is checked when the first batch is read.
        """
        check_stream("QueueDataset", index, num_streams)
        file_range = range_of_stream(
            self.files,
            index,
            num_streams,
            can_seek=self._pipe_command is None and all(f.codec is None for f in self.files),
            own_files=self.own_files,
        )
        reader = self._reader(file_range, tuple(start or ()))
        return Stream(reader, drop_last=self.drop_last, batches_ahead=self._batches_ahead)

    def _reader(self, file_range: FileRange, start: tuple[int, ...]) -> StreamReader:
        if not self.files:
            return NoFiles(start)
        if isinstance(self._format, ArrowTable):
            return ArrowReader(
                self.files,
                self.schema,
                file_range,
                batch_size=self.batch_size,
                threads=self._threads,
                skip_broken=self._skip_broken,
                start=start,
            )
        parser = TextParser(
            self.schema,
            self._format,
            batch_size=self.batch_size,
            threads=self._threads,
            skip_broken=self._skip_broken,
        )
        return TextReader(
            self.files,
            self.schema,
            parser,
            file_range,
            pipe=None if self._pipe_command is None else Pipe(self._pipe_command),
            files_ahead=self._threads,
            start=start,
        )


class NoFiles:
    """No batches, in the form of the readers of files: of a worker that has no files.

    Raises BadRequest: `start` is a position in files that were here before.
    """

    num_bytes: Final = 0
    num_bytes_read: Final = 0
    num_broken_lines: Final = 0
    position: tuple[int, ...] = ()

    def __init__(self, start: tuple[int, ...]) -> None:
        if start:
            raise BadRequest(f"expected the files of the position {start}, found no files")
        self.seconds = {"read": 0.0, "parse": 0.0}

    def stop(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def batches(self, *, drop_last: bool) -> Iterator[tuple[Batch, int]]:
        """None. drop_last: without effect."""
        return iter(())


NAMED_FILES_MAX = 16  # by `QueueDataset.cut`
StreamReader = TextReader | ArrowReader | NoFiles


class Stream(Iterator[Batch]):
    """The batches of one stream; made by QueueDataset.stream.

    A thread starts with the first batch. It ends with the last batch, with close() (also by
    `with`), or when the stream is dropped.

    Attributes:
        num_bytes: stored bytes of this stream, to within a line.
        num_bytes_read: stored bytes up to the latest batch returned; about, in compressed files.
        position: after the latest batch returned.

    Threads: one at a time.
    """

    def __init__(self, reader: StreamReader, *, drop_last: bool, batches_ahead: int) -> None:
        self.num_bytes = reader.num_bytes
        self.num_bytes_read = reader.num_bytes_read
        self.position: tuple[int, ...] = reader.position
        self._reader = reader
        self._drop_last = drop_last
        self._batches_ahead = batches_ahead
        self._ahead: ReadAhead[tuple[Batch, int]] | None = None

    def fraction_read(self) -> float:
        """The fraction of the stream that has been returned, 0 to 1."""
        return self.num_bytes_read / self.num_bytes if self.num_bytes else 1.0

    @property
    def num_broken_lines(self) -> int:
        """Broken lines skipped so far, also in batches that have not been returned yet."""
        return self._reader.num_broken_lines

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time of the thread that reads. "read": waiting for bytes, decompression included;
        "parse": making columns of them.
        """
        return dict(self._reader.seconds)

    def __next__(self) -> Batch:
        if self._ahead is None:
            self._ahead = ReadAhead(
                self._reader.batches(drop_last=self._drop_last),
                depth=self._batches_ahead,
                name="trireme-data",
                stop=self._reader.stop,
            )
        batch, self.num_bytes_read = next(self._ahead)
        self.position = batch.position
        return batch

    def close(self) -> None:
        """Stop reading; the thread has ended when this returns."""
        if self._ahead is not None:
            self._ahead.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
