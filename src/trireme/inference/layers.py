"""The rows of an export as the core searches them: mapped files, which processes share."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from trireme import _core
from trireme.errors import Corruption
from trireme.inference.manifest import MANIFEST, File, TablePart, expect_digest, located

Layers: TypeAlias = tuple[_core.FrozenRows, ...]
"""Of one table, newest first: deltas, and at last a base."""


def map_rows(folder: Path, part: TablePart, *, has_flags: bool, verify: bool) -> _core.FrozenRows:
    """The rows of one table of an export, without reading them.

    Raises:
        Corruption: a file is missing or damaged, or the files lack something; names the file.
    """
    paths = [str(folder / file.path) for file in part.files]
    rows = _core.FrozenRows(paths, [_checked(folder, file, verify) for file in part.files])
    found = {
        "dim": rows.dim,
        "statistics": rows.statistics,
        "dtype": rows.encoding,
        "flags": rows.has_flags,
        "rows": rows.rows,
        "buckets": rows.num_buckets,
    }
    expected = {
        "dim": part.dim,
        "statistics": part.statistics,
        "dtype": part.dtype,
        "flags": has_flags,
        "rows": part.rows + part.removed,
        "buckets": _core.NUM_BUCKETS,
    }
    if found != expected:
        raise Corruption(
            f"{folder / MANIFEST}: expected files of table {part.name!r} with {expected},"
            f" found {found}"
        )
    return rows


def _checked(folder: Path, file: File, verify: bool) -> np.ndarray[Any, np.dtype[np.uint8]]:
    path = located(folder, file, verify=False)
    content = mapped(path)
    if verify:  # as it is mapped: what is loaded now comes in pages as `mapped` asks for them
        expect_digest(path, file, hashlib.sha256(content.data).hexdigest())
    return content


def mapped(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a file. The pages are the system's: loaded when touched, once for all
    processes, and huge ones where the file system has them.
    """
    if path.stat().st_size == 0:
        return np.empty(0, np.uint8)  # mmap refuses it
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with suppress(OSError):  # advice: a system without huge pages has small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def merge_deltas(deltas: Sequence[_core.FrozenRows]) -> _core.FrozenRows:
    """One layer that answers as several deltas do, newest first; in this process' own memory."""
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
