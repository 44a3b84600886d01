"""Which files a path or location has."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import fsspec

from trireme.errors import DataError


def list_files(folder: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """The files of a folder, by name. Raises DataError if there is no folder, or nothing in it."""
    options = dict(storage_options or {})
    try:
        filesystem, path = fsspec.core.url_to_fs(folder, **options)
        names = sorted(
            entry["name"] for entry in filesystem.ls(path, detail=True) if entry["type"] == "file"
        )
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"import: cannot list {folder}: {error}") from error
    if not names:
        raise DataError(f"import: expected files in {folder}, found none")
    return [filesystem.unstrip_protocol(name) for name in names] if "://" in folder else names


def parquet_files(
    source: str | os.PathLike[str] | Sequence[str], storage_options: Mapping[str, Any] | None
) -> list[str]:
    """The Parquet files of a source: a file, a folder or a list of files."""
    if not isinstance(source, (str, os.PathLike)):
        return [_absolute(path) for path in source]
    path = _absolute(os.fspath(source))
    if path.endswith(".parquet") and not os.path.isdir(path):
        return [path]
    files = [file for file in list_files(path, storage_options) if file.endswith(".parquet")]
    if not files:
        raise DataError(f"import: expected files *.parquet in {path}, found none")
    return files


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)
