"""Checks paths that peers send: a server reads and writes files below its root folder and in object
stores, nowhere else.

fsspec's locations can name much more than a store: files of this machine (`file://`, `local://`),
copies kept on its disk (`simplecache::`), references to other files (`reference://`), web pages.
So protocols are listed; chains, and options that choose another protocol, are refused.
"""

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trireme.errors import BadRequest, TriremeError
from trireme.server.store_hosts import StoreHosts, check_hosts

STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "hdfs", "webhdfs")
PATH_CHARS_MAX = 1024
HINT = "--root or TRIREME_ROOT of the servers says where files may be"
# Options by which fsspec would use another file system than the location names, or a local file.
_CHOOSING = ("protocol", "target_protocol", "target_options", "fo", "fs", "cache_storage", "path")


def resolve_path(root: Path, path: str, options: Mapping[str, Any], hosts: StoreHosts) -> str:
    """The absolute path of a path below `root`; a location of an object store is returned as it is.
    Raises BadRequest: the path or the options lead elsewhere, or to a host not among `hosts`.
    """
    if "://" in path:
        check_store_location(path, options)
        check_hosts(path, options, hosts)
        return path
    if options:
        raise BadRequest(
            "path: expected storage_options only with a location such as s3://bucket/key, found"
            f" {sorted(map(str, options))[:8]} with the path {path[:200]!r}"
        )
    return str(resolve_local_path(root, path))


def resolve_local_path(root: Path, path: str) -> Path:
    """The absolute path of a path below `root`. Raises BadRequest for anything else."""
    if "://" in path:
        raise BadRequest(f"path: expected a path of the servers, found {path[:200]!r}")
    try:
        joined = (root / check_path(path)).resolve()  # Python 3.12 and older notice a loop here
        with suppress(FileNotFoundError, NotADirectoryError):
            joined.stat()
    except (OSError, RuntimeError) as error:
        raise BadRequest(
            f"path: expected a path of files, found {path[:200]!r}: {error}"
        ) from error
    if not joined.is_relative_to(root.resolve()):
        raise BadRequest(f"checkpoint: expected a path under {root}, found {path}; {HINT}")
    return joined


def check_store_location(location: str, options: Mapping[str, Any]) -> str:
    """Return a location in an object store. Raises BadRequest for anything else."""
    protocol = check_path(location).partition("://")[0]
    if protocol not in STORES:
        raise BadRequest(
            f"path: expected a path, or a location of {', '.join(STORES)}, found {location[:200]!r}"
        )
    refused = [name for name in options if name in _CHOOSING or name in STORES]
    if refused:
        raise BadRequest(
            f"path: expected storage_options of {protocol} alone, found {refused} for"
            f" {location[:200]!r}"
        )
    return location


@contextmanager
def storage_errors(location: str) -> Iterator[None]:
    """Raise any error of an object store's package as BadRequest with the location."""
    try:
        yield
    except (TriremeError, OSError, MemoryError):
        raise
    except Exception as error:
        if "://" not in location:
            raise
        reason = textwrap.shorten(str(error), 400) or type(error).__name__
        raise BadRequest(f"path: cannot use {location}: {reason}") from error


def check_path(path: str) -> str:
    """Return a path that the system and fsspec read as nothing but a path. Raises BadRequest."""
    if not path or len(path) > PATH_CHARS_MAX or "\0" in path or "::" in path:
        raise BadRequest(
            f"path: expected 1 to {PATH_CHARS_MAX} characters without NUL and '::', found"
            f" {len(path)}: {path[:200]!r}"
        )
    return path
