"""Where a server reads and writes files at the word of a peer: below its root folder, and in object
stores. A path or location from the wire leads nowhere else.

fsspec's locations can name much more than a store: files of this machine (`file://`, `local://`),
copies kept on its disk (`simplecache::`), descriptions of other places (`reference://`), web pages.
So protocols are listed, chains are refused, and so are options that choose another protocol.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trireme.errors import BadRequest, TriremeError
from trireme.storage.local import inside

STORES = (
    *("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss"),
    *("hdfs", "webhdfs", "memory"),
)
PATH_CHARS_MAX = 1024
HINT = "--root or TRIREME_ROOT of the servers says where files may be"
# Options by which fsspec would use another file system than the location names, or a local file.
_CHOOSING = ("protocol", "target_protocol", "target_options", "fo", "fs", "cache_storage", "path")


def place_of(root: Path, path: str, options: Mapping[str, Any]) -> str:
    """A path below `root`, absolute; or a location of an object store, as it is.

    Raises:
        BadRequest: it leads elsewhere, or the options do.
    """
    if "://" in path:
        return store_location(path, options)
    if options:
        raise BadRequest(
            "path: expected storage_options only with a location such as s3://bucket/key, found"
            f" {sorted(map(str, options))[:8]} with the path {path[:200]!r}"
        )
    return str(local_place(root, path))


def local_place(root: Path, path: str) -> Path:
    """A path below `root`, absolute. Raises BadRequest for anything else."""
    if "://" in path:
        raise BadRequest(f"path: expected a path of the servers, found {path[:200]!r}")
    return inside(root, plain_path(path), HINT)


def store_location(location: str, options: Mapping[str, Any]) -> str:
    """Raises BadRequest for a location that is none of an object store."""
    protocol = plain_path(location).partition("://")[0]
    if protocol not in STORES:
        raise BadRequest(
            f"path: expected a path, or a location of {', '.join(STORES)}, found {location[:200]!r}"
        )
    found = [name for name in options if name in _CHOOSING or name in STORES]
    if found:
        raise BadRequest(
            f"path: expected storage_options of {protocol} alone, found {found} for"
            f" {location[:200]!r}"
        )
    return location


@contextmanager
def reached(place: str) -> Iterator[None]:
    """What the package of an object store raises, of whatever class, is told with the location."""
    try:
        yield
    except (TriremeError, OSError, MemoryError):
        raise
    except Exception as error:
        if "://" not in place:
            raise
        words = textwrap.shorten(str(error), 400) or type(error).__name__
        raise BadRequest(f"path: cannot use {place}: {words}") from error


def plain_path(path: str) -> str:
    """Raises BadRequest for what the system or fsspec would take for something else than a path."""
    if not path or len(path) > PATH_CHARS_MAX or "\0" in path or "::" in path:
        raise BadRequest(
            f"path: expected 1 to {PATH_CHARS_MAX} characters without NUL and '::', found"
            f" {len(path)}: {path[:200]!r}"
        )
    return path
