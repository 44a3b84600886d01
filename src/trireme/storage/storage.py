"""Where files are: a local folder, or a location of fsspec such as s3://bucket/key.

Paths are relative to it, with `/` between their parts.
"""

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from trireme.errors import BadRequest
from trireme.storage.local import LocalStorage
from trireme.storage.remote import RemoteStorage

Storage = LocalStorage | RemoteStorage
"""Threads: any, on different files. LocalStorage describes the methods of both."""


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
