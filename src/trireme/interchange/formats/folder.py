"""Folders of exported files: they appear whole or not at all.

A local folder is written under another name beside its place, and renamed. In a location such as
s3://bucket/key, which cannot be renamed at once, an empty file _SUCCESS comes last.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec

from trireme.errors import BadRequest, writing

log = logging.getLogger("trireme.interchange")

SUCCESS = "_SUCCESS"


@contextmanager
def published_folder(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Where to write the files, a path or location; they are seen at `path` when the block has
    ended well.

    Raises:
        BadRequest: there is something already, or one cannot write there. ResourceExhausted: the
            disk is full.
    """
    path = os.fspath(path)
    with writing(f"export: cannot write {path}"):
        if "://" in path:
            yield from _remote(path.rstrip("/"), storage_options or {})
        elif storage_options:
            raise BadRequest(
                "export: expected storage_options only with a location such as s3://bucket/key,"
                f" found {sorted(storage_options)} with the path {path!r}"
            )
        else:
            yield from _local(Path(path).absolute())


def _local(path: Path) -> Iterator[str]:
    if path.exists():
        raise BadRequest(f"export: expected a new folder, found {path} existing; name another")
    partial = path.parent / f".{path.name}.{uuid.uuid4().hex}.partial"
    try:
        partial.mkdir(parents=True)
        yield str(partial)
        for file in partial.rglob("*"):
            _sync(file)
        _sync(partial)
        partial.rename(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remote(location: str, options: Mapping[str, Any]) -> Iterator[str]:
    try:
        filesystem, root = fsspec.core.url_to_fs(location, **options)
    except (ImportError, ValueError) as error:
        raise BadRequest(f"export: cannot write {location}: {error}") from error
    if filesystem.exists(root):
        raise BadRequest(f"export: expected a new folder, found {location} existing; name another")
    try:
        yield location
        filesystem.pipe_file(f"{root}/{SUCCESS}", b"")
    except BaseException:
        try:
            filesystem.rm(root, recursive=True)
        except FileNotFoundError:
            log.debug("export: nothing to remove at %s", location)
        raise


def create(folder: str, name: str, storage_options: Mapping[str, Any] | None = None) -> IO[bytes]:
    """A new file in the folder, which is made if need be."""
    if "://" not in folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return (Path(folder) / name).open("xb")
    file: IO[bytes] = fsspec.open(f"{folder}/{name}", "wb", **(storage_options or {})).open()
    return file
