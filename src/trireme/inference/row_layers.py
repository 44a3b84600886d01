"""The rows of an export: mapped files that the core searches and processes share."""

import errno
import hashlib
import mmap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from trireme import _core
from trireme.errors import Corruption
from trireme.inference.export_manifest import (
    MANIFEST,
    ExportedTable,
    ExportFile,
    expect_digest,
    located,
)
from trireme.storage.checked_file import MAPPED_BLOCK_BYTES

_MADV_POPULATE_READ = 22  # loads pages; of a bad disk it is an error, where a touch is SIGBUS

Layers: TypeAlias = tuple[_core.FrozenRows, ...]
"""The layers of one table, newest first: deltas, then the base."""


def map_rows(
    folder: Path, table: ExportedTable, *, has_flags: bool, verify: bool
) -> _core.FrozenRows:
    """Map the rows of one table of an export, without reading them. Raises Corruption: a file is
    missing or damaged, or the files lack something; names the file.
    """
    paths = [str(folder / file.path) for file in table.files]
    rows = _core.FrozenRows(paths, [_checked(folder, file, verify) for file in table.files])
    expected = {
        "dim": table.dim,
        "statistics": table.statistics,
        "encoding": table.dtype,
        "has_flags": has_flags,
        "rows": table.rows + table.removed,
        "num_buckets": _core.NUM_BUCKETS,
    }
    actual = {name: getattr(rows, name) for name in expected}
    if actual != expected:
        raise Corruption(
            f"{folder / MANIFEST}: expected files of table {table.name!r} with {expected},"
            f" found {actual}"
        )
    return rows


def _checked(folder: Path, file: ExportFile, verify: bool) -> np.ndarray[Any, np.dtype[np.uint8]]:
    path = located(folder, file, verify=False)
    if not file.bytes:
        raise Corruption(f"{path}: expected rows, found an empty file")
    memory = mapped(path)
    content, digest = np.frombuffer(memory, np.uint8), hashlib.sha256()
    for begin in range(0, len(content) if verify else 0, MAPPED_BLOCK_BYTES):
        part = content[begin : begin + MAPPED_BLOCK_BYTES]
        try:  # through the mapping, so that the pages it loads are huge ones
            memory.madvise(_MADV_POPULATE_READ, begin, len(part))
        except OSError as error:
            if error.errno != errno.EINVAL:  # of Linux before 5.14
                raise Corruption(
                    f"{path}: expected to read it, found a disk that cannot, or another length"
                ) from error
        digest.update(part.data)
    if verify:
        expect_digest(path, file, digest.hexdigest())
    return content


def mapped(path: Path) -> mmap.mmap:
    """The bytes of a file in pages of the system: loaded when touched, shared by all processes, and
    huge where the file system has huge pages.
    """
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with suppress(OSError):  # advice: a system without huge pages has small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def merge_deltas(deltas: Sequence[_core.FrozenRows]) -> _core.FrozenRows:
    """One layer that answers as several deltas, newest first; in the memory of this process."""
    first = deltas[0]
    writer = _core.FrozenWriter(
        encoding=first.encoding, dim=first.dim, statistics=first.statistics, has_flags=True
    )
    pieces = []
    for bucket in range(_core.NUM_BUCKETS):
        contents = [layer.content(bucket) for layer in deltas]
        keys, newest = np.unique(np.concatenate([keys for keys, _ in contents]), return_index=True)
        values = np.concatenate([values for _, values in contents])[newest]
        pieces.append(writer.add(keys, values))
    merged = np.concatenate([*pieces, writer.finish()])
    return _core.FrozenRows(["merged deltas"], [merged])
