"""Folders that appear complete or not at all.

A local folder is written under another name beside its place, synced and renamed. In a location
such as s3://bucket/key, which cannot be renamed at once, an empty file _SUCCESS comes last. There
an empty file _WRITING comes first, so that of two writers one fails before it writes anything.
"""

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

from trireme.errors import BadRequest, writing
from trireme.storage.local import sync_folder, sync_tree

SUCCESS, CLAIM = "_SUCCESS", "_WRITING"


@contextmanager
def new_folder(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """A path or location to write files into; they appear at `path` when the block ends without an
    error.

    Raises:
        BadRequest: `path` exists or cannot be written. ResourceExhausted: the disk is full.
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


def partial_path(path: Path, id: str) -> Path:
    """Where the folder `path` is while it is written."""
    return path.parent / f".{path.name}.{id}.partial"


def publish_folder(partial: Path, path: Path, *, syncs_files: bool) -> None:
    """Let a folder appear at `path`, durably. syncs_files: False: its files are durable already."""
    sync_tree(partial, files=syncs_files)
    partial.rename(path)
    sync_folder(path.parent)


def _local(path: Path) -> Iterator[str]:
    if path.exists():
        raise _occupied(path)
    partial = partial_path(path, uuid.uuid4().hex)
    try:
        partial.mkdir(parents=True)
        yield str(partial)
        publish_folder(partial, path, syncs_files=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _remote(location: str, options: Mapping[str, Any]) -> Iterator[str]:
    try:
        filesystem, root = fsspec.core.url_to_fs(location, **options)
    except (ImportError, ValueError) as error:
        raise BadRequest(f"export: cannot write {location}: {error}") from error
    if filesystem.exists(root):
        raise _occupied(location)
    filesystem.makedirs(root, exist_ok=True)
    filesystem.pipe_file(f"{root}/{CLAIM}", b"", mode="create")
    try:
        yield location
        filesystem.pipe_file(f"{root}/{SUCCESS}", b"")
    except BaseException:
        for path in (f"{root}/{SUCCESS}", root):  # never _SUCCESS beside a part of the files
            with suppress(FileNotFoundError):
                filesystem.rm(path, recursive=True)
        raise
    filesystem.rm(f"{root}/{CLAIM}")


def _occupied(path: str | Path) -> BadRequest:
    return BadRequest(f"export: expected a new folder, found {path} existing; name another")
