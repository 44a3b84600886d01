"""From paths and patterns to files with sizes, in a fixed order."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from trireme.errors import DataError

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True)
class File:
    """A local file as it was when the dataset was made; what is appended later is not read."""

    path: str
    num_bytes: int


def find_files(paths: Paths) -> tuple[File, ...]:
    """The files of a path, a glob pattern or a list of them.

    The order of a list is kept; the matches of one pattern come in natural order (part-2 before
    part-10). A path that exists is never taken for a pattern.

    Raises:
        DataError: no path given, nothing there, or not a regular file that can be read; names the
            path or pattern.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    files = [_file(path) for pattern in paths for path in _expand(os.fspath(pattern))]
    if not files:
        raise DataError("QueueDataset: expected at least one path or pattern, found none")
    return tuple(files)


def file_starts(files: Iterable[File]) -> list[int]:
    """Where each file begins when all are laid end to end, and where the last one ends."""
    return list(accumulate((file.num_bytes for file in files), initial=0))


def natural_key(path: str) -> list[tuple[int, str]]:
    """Sorts runs of digits as numbers; ties (a1, a01) go by the text itself."""
    parts = re.split("([0-9]+)", path)  # text and digits by turns
    key = [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)]
    return [*key, (0, path)]


def _expand(pattern: str) -> list[str]:
    if os.path.lexists(pattern):
        return [pattern]
    if not glob.has_magic(pattern):
        raise DataError(f"QueueDataset: expected a file, found nothing at {pattern!r}")
    matches = glob.glob(pattern, recursive=True)
    if not matches:
        raise DataError(f"QueueDataset: expected files, found none that match {pattern!r}")
    return sorted(matches, key=natural_key)


def _file(path: str) -> File:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"QueueDataset: cannot read {path!r}: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode):
        raise DataError(
            f"QueueDataset: expected a file, found the directory {path!r}; "
            f"give a pattern such as {os.path.join(path, '*')!r}"
        )
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"QueueDataset: expected a regular file, found another kind at {path!r}")
    if path.endswith((".gz", ".zst")):
        raise DataError(f"QueueDataset: compressed files are not supported yet: {path!r}")
    if status.st_size == 0:
        raise DataError(f"QueueDataset: expected data, found the empty file {path!r}")
    return File(path, status.st_size)
