"""Where files are: a local folder, or a location of fsspec such as s3://bucket/key.

Paths are relative to it, with `/` between their parts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

from trireme.errors import BadRequest
from trireme.storage.local import LocalStorage
from trireme.storage.remote import RemoteStorage


class Storage(Protocol):
    """Threads: any, on different files."""

    @property
    def name(self) -> str:
        """The folder or location, for messages."""

    def create(self, path: str) -> Sink:
        """A new file; missing folders are made."""

    def open(self, path: str) -> BinaryIO:
        """A file from its beginning; FileNotFoundError where there is none."""

    def open_arrow(self, path: str) -> pa.NativeFile:
        """The same for Arrow, which maps local files into memory."""

    def size(self, path: str) -> int | None:
        """The file's bytes; None: there is no such file."""

    def below(self, path: str) -> Storage:
        """The folder at that path."""

    def parent(self) -> tuple[Storage, str]:
        """The parent folder, and the name of this one in it."""

    def folders(self) -> list[str]:
        """Names of the folders directly below."""

    def remove(self, path: str) -> None:
        """Remove a file, durably, or a folder with all its content; nothing if it is missing."""


class Sink(Protocol):
    """A file being written by one thread."""

    def write(self, data: Any) -> int: ...

    def sync(self) -> None:
        """Make it durable and close it. Without this call nothing of it may last."""

    def abandon(self) -> None:
        """Close it. Does nothing after sync(), or a second time."""


def open_storage(location: str | os.PathLike[str], options: Mapping[str, Any] | None) -> Storage:
    """The storage of a path or location. Raises BadRequest for a protocol that cannot be used."""
    text = os.fspath(location)
    for prefix in ("local://", "file://"):
        text = text.removeprefix(prefix)
    if "://" in text:
        return RemoteStorage(text.rstrip("/"), options or {})
    if options:
        raise BadRequest(
            "checkpoint: expected storage_options only with a location such as"
            f" 's3://bucket/key', found {sorted(options)} with the path {text!r}"
        )
    return LocalStorage(Path(os.path.abspath(text)))


def checked_path(path: Any) -> str:
    """A relative path that stays in its folder. Raises BadRequest for any other value."""
    if not isinstance(path, str) or not path or len(path) > 1024 or "\0" in path or "\\" in path:
        raise BadRequest(f"checkpoint: expected a relative path, found {path!r}")
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or str(PurePosixPath(path)) != path or ":" in path:
        raise BadRequest(f"checkpoint: expected a path inside the folder, found {path!r}")
    return path
