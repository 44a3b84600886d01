"""Files and their sizes, in a fixed order, from paths and patterns; and the part of each stream.

A path with a protocol (`s3://bucket/key`, `hdfs://host/path`) is read through fsspec with the
caller's storage options; `local://` and `file://` are local paths.

All files are laid end to end. Where a file can be read from any byte, the whole is cut into S
ranges of equal size, and a line belongs to the range in which it begins: ranges are balanced
whatever the number of files. Where files must be read from their beginning (compressed, or through
a command), each belongs to one stream: contiguous blocks of files, one more for the first
`files % S` streams.
"""

import glob
import logging
import os
import re
import stat
import textwrap
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import fsspec
import xxhash

from trireme.errors import BadRequest, DataError

log = logging.getLogger("trireme")

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_REASON_CHARACTERS = 400  # libhdfs lists every place where it did not find Java
_END_BYTES = 4096
# What stores call it: of the content, else when it was written.
_TAGS = ["ETag", "etag", "md5Hash", "crc32c", "Last-Modified", "LastModified", "mtime", "created"]
_TAG_CHARACTERS = 80
_CODECS = {".gz": "gzip", ".zst": "zstd"}


class FileChanged(DataError):
    """A file has changed since the dataset was made; a dataset that is made anew may read it."""

    retry = True


@dataclass(frozen=True)
class DataFile:
    """A file as it was when the dataset was made.

    path: a local path or a location of fsspec.
    num_bytes: as stored, compressed or not.
    storage_options: of fsspec; None: a local path. Not shown, because it may hold a password.
    inode, written_ns: of a local file, by which a change of it is seen. tag: of a remote one, what
        its store says of the content, or when it was written; empty: nothing.
    """

    path: str
    num_bytes: int
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    inode: int = 0
    written_ns: int = 0
    tag: str = ""

    @property
    def codec(self) -> str | None:
        """pyarrow's name of the compression, by the end of the path; None: not compressed."""
        return _CODECS.get(os.path.splitext(self.path)[1])

    @property
    def is_local(self) -> bool:
        return self.storage_options is None

    @property
    def identity(self) -> str:
        """What tells the file from others, in whichever process: its name, size and `tag`, or a
        hash of its first and last bytes. Raises DataError: it cannot be read.
        """
        tag = self.tag
        if self.is_local:
            try:
                with open(self.path, "rb") as file:
                    ends = file.read(_END_BYTES)
                    file.seek(max(self.num_bytes - _END_BYTES, 0))
                    ends += file.read(_END_BYTES)
            except OSError as error:
                raise _unreadable(self.path, error) from error
            tag = f"XXH32 {xxhash.xxh32_hexdigest(ends)} of both ends"
        name = f"{os.path.basename(self.path)} of {self.num_bytes} bytes"
        return f"{name} ({tag})" if tag else name

    def check_tag(self, info: Mapping[str, Any]) -> None:
        """Raises DataError: what a store says of a remote file has changed since the dataset was
        made. info: of fsspec.
        """
        tag = tag_of(info)
        if tag != self.tag and tag.partition(" ")[0] == self.tag.partition(" ")[0]:
            raise FileChanged(f"it was {self.tag}, and is {tag}: it has changed")

    def check_unchanged(self, opened: Any = None) -> None:
        """Raises DataError: a local file has changed since the dataset was made, so that streams
        that divide it would lose or repeat lines. opened: the file, which is closed then. None: it
        was read to its end; one that has taken its place meanwhile does not matter.
        """
        if not self.is_local:
            return
        try:
            status = os.stat(self.path)
            is_same = (status.st_size, status.st_mtime_ns) == (self.num_bytes, self.written_ns)
            if is_same or (opened is None and status.st_ino != self.inode):
                return
            what = f"found {status.st_size}, written since the dataset was made: it has changed"
        except OSError as error:
            if opened is None:
                return
            what = f"found none: {error.strerror}"
        if opened is not None:
            opened.close()
        raise FileChanged(
            f"expected {self.num_bytes} bytes in {self.path}, {what}; write a file"
            " under another name, rename it when it is whole, and make the dataset then"
        )


def find_files(
    paths: Paths, storage_options: Mapping[str, Any] | None = None, *, own_files: bool = False
) -> tuple[DataFile, ...]:
    """The files of a path, a glob pattern or a list of them.

    A list keeps its order; the matches of one pattern come in natural order (part-2 before
    part-10). A local path that exists is not treated as a pattern. An empty list is an error, but
    for `own_files`: there it is the share of a worker for which no file was left, with a warning.

    Raises DataError: no path, no file, or not a regular file that can be read; names the path or
    pattern. BadRequest: a protocol that is unknown or not installed, or storage options with local
    paths only.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    patterns = [re.sub("^(local|file)://", "", os.fspath(path)) for path in paths]
    files = [file for pattern in patterns for file in _find(pattern, storage_options or {})]
    if not files:
        if not own_files:
            raise DataError("expected at least one path or pattern, found none")
        log.warning(
            "this worker has no files, and no examples: the list is empty; give each"
            " worker at least one file, or use fewer workers"
        )
        return ()
    if storage_options and all(file.is_local for file in files):
        raise BadRequest(
            "expected storage_options only with locations such as 's3://bucket/key', "
            f"found {', '.join(storage_options)} with local paths"
        )
    return tuple(files)


def file_starts(files: Iterable[DataFile]) -> list[int]:
    """The start of each file when all are laid end to end, and the end of the last one."""
    return list(accumulate((file.num_bytes for file in files), initial=0))


def natural_key(path: str) -> list[tuple[int, str]]:
    """Sorts runs of digits as numbers; ties (a1, a01) go by the text itself."""
    parts = re.split("([0-9]+)", path)  # alternates between text and digits
    key = [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)]
    return [*key, (0, path)]


def filesystem(location: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """The fsspec file system of a location, and the path in it.

    It is not kept, because a connection to a server does not survive a fork; fsspec caches the file
    systems of each process.
    """
    protocol = location.partition("://")[0]
    try:
        filesystem_of, path = fsspec.core.url_to_fs(location, **storage_options)
        return filesystem_of, path
    except ImportError as error:
        extra = "pip install trireme-ps[s3]" if protocol in ("s3", "s3a") else str(error)
        raise BadRequest(
            f"{location!r}: expected a package that reads {protocol}://, found none; {extra}"
        ) from error
    except ValueError as error:
        raise BadRequest(f"cannot read {location!r}: {error}") from error
    except Exception as error:
        needs = ""
        if protocol in ("hdfs", "viewfs"):
            needs = "; HDFS needs JAVA_HOME, HADOOP_HOME and CLASSPATH, see docs/data.md"
        what = f"cannot read {location!r}: {reason(error)}{needs}"
        raise DataError(what) from error


def reason(error: Exception) -> str:
    """The message of a file system's error, in one line of bounded length."""
    strerror = getattr(error, "strerror", None)
    text = strerror if strerror and "Detail:" not in strerror else str(error)
    return textwrap.shorten(text, _REASON_CHARACTERS) or type(error).__name__


def _find(pattern: str, storage_options: Mapping[str, Any]) -> list[DataFile]:
    if "://" in pattern and not os.path.lexists(pattern):
        return _find_remote(pattern, storage_options)
    return [_local_file(path) for path in _expand(pattern)]


def _expand(pattern: str) -> list[str]:
    if os.path.lexists(pattern):
        return [pattern]
    if not glob.has_magic(pattern):
        raise DataError(f"expected a file, found nothing at {pattern!r}")
    matches = set(_matches(pattern))
    if not matches:
        raise DataError(f"expected files, found none that match {pattern!r}")
    return sorted(matches, key=natural_key)


def _matches(pattern: str) -> Iterable[str]:
    """As of glob.glob(recursive=True), except that `**` enters each folder once, whichever links
    lead to it.
    """
    parts = pattern.split("/")
    if "**" not in parts:
        return _glob(pattern)
    number = parts.index("**")
    below = parts[number + 1 :] or ["*"]
    tops = _glob("/".join([*parts[:number], ""])) if number else [""]
    return [
        path
        for folder, _ in folders_below(tops)
        for path in _matches("/".join([glob.escape(folder), *below]).removeprefix("./"))
    ]


def _glob(pattern: str) -> list[str]:
    """As glob.glob, which leaves out what is in folders that it cannot list. Raises DataError."""
    above = pattern
    while glob.has_magic(above):
        above, name = os.path.split(above)
        for folder in glob.glob(above) if above else ["."]:
            try:
                if glob.has_magic(name):
                    os.scandir(folder).close()
                else:
                    os.lstat(os.path.join(folder, name))
            except OSError as error:
                refuse_folder(error)
    return glob.glob(pattern)


def folders_below(
    tops: Iterable[str], hidden: str | tuple[str, ...] = "."
) -> Iterator[tuple[str, list[str]]]:
    """The folders at and below these, each once, with the names of what is no folder in them: real
    folders before links to them. hidden: folders whose names begin so are left out.
    """
    waiting, seen = [top.rstrip("/") or ("/" if top else ".") for top in tops], set[str]()
    for top in waiting:  # which grows by the links within
        for parent, folders, names in os.walk(top, onerror=refuse_folder):
            folders[:] = [name for name in folders if not name.startswith(hidden)]
            if (real := os.path.realpath(parent)) in seen:
                folders.clear()
                continue
            seen.add(real)
            yield parent, names
            paths = (os.path.join(parent, name) for name in folders)
            waiting += [path for path in paths if os.path.islink(path)]


def refuse_folder(error: OSError) -> None:
    """Of a folder that cannot be listed, for what would go on without its files."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise DataError(f"cannot list {error.filename!r}: {error.strerror}") from error


def _find_remote(pattern: str, storage_options: Mapping[str, Any]) -> list[DataFile]:
    filesystem_of, path = filesystem(pattern, storage_options)
    try:
        filesystem_of.invalidate_cache()  # files may have come since the folder was last listed
        if not glob.has_magic(path):
            return [_remote_file(pattern, filesystem_of.info(path), storage_options)]
        matches = filesystem_of.glob(path, detail=True)
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"expected a file, found nothing at {pattern!r}") from error
    except Exception as error:
        raise DataError(f"cannot read {pattern!r}: {reason(error)}") from error
    if not matches:
        raise DataError(f"expected files, found none that match {pattern!r}")
    return [
        _remote_file(filesystem_of.unstrip_protocol(name), matches[name], storage_options)
        for name in sorted(matches, key=natural_key)
    ]


def _remote_file(
    location: str, info: Mapping[str, Any], storage_options: Mapping[str, Any]
) -> DataFile:
    if info["type"] == "directory":
        raise _is_directory(location)
    if info.get("size") is None:
        raise DataError(f"expected a file of known size, found {location!r}")
    options, tag = dict(storage_options), tag_of(info)
    return _not_empty(DataFile(location, int(info["size"]), options, tag=tag))


def tag_of(info: Mapping[str, Any]) -> str:
    """See DataFile; begins with the store's name of it."""
    tag = next((name for name in _TAGS if info.get(name)), "")
    return f"{tag} {info[tag]}"[:_TAG_CHARACTERS] if tag else ""


def _local_file(path: str) -> DataFile:
    try:
        status = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if stat.S_ISDIR(status.st_mode):
        raise _is_directory(path)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"expected a regular file, found another kind at {path!r}")
    return _not_empty(DataFile(path, status.st_size, None, status.st_ino, status.st_mtime_ns))


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(f"cannot read {path!r}: {error.strerror}")


def _is_directory(path: str) -> DataError:
    return DataError(
        f"expected a file, found the directory {path!r}; "
        f"give a pattern such as {os.path.join(path, '*')!r}"
    )


def _not_empty(file: DataFile) -> DataFile:
    if file.num_bytes == 0:
        raise DataError(f"expected data, found the empty file {file.path!r}")
    return file


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
    """What stream `index` of `num_streams` reads: its part, or everything with `own_files`. Nothing
    if files cannot be cut and there are too few, of which stream 0 warns.
    """
    starts = file_starts(files)
    if own_files:
        return FileRange(index, 0, starts[-1], 0, len(files) - 1, can_seek)
    if can_seek:
        begin, end = (starts[-1] * i // num_streams for i in (index, index + 1))
        first = min(bisect_right(starts, begin), len(files)) - 1
        last = max(bisect_left(starts, end) - 1, first)
        return FileRange(index, begin, end, first, last, can_seek)
    if index == 0 and len(files) < num_streams:
        log.warning(
            "expected at least %d files for %d streams, because files that are"
            " compressed or go through a pipe_command cannot be cut, found %d: the last %d streams"
            " have no data; split the files, or use fewer workers",
            num_streams, num_streams, len(files), num_streams - len(files),
        )  # fmt: skip
    if index >= len(files):  # nothing, at the end of the last file
        last = len(files) - 1
        return FileRange(index, starts[last], starts[last], last, last - 1, can_seek)
    size, more = divmod(len(files), num_streams)
    first, behind = (i * size + min(i, more) for i in (index, index + 1))
    return FileRange(index, starts[first], starts[behind], first, behind - 1, can_seek)
