"""Locations of fsspec: object stores and the like."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from trireme.errors import BadRequest, TriremeError

_BLOCK_BYTES = 16 << 20
_REASON_CHARACTERS = 400


class RemoteStorage:
    """A location of fsspec; see LocalStorage for its methods. Each looks the file system up: one
    with a connection does not survive a fork, and fsspec caches those of this process.
    """

    def __init__(self, location: str, options: Mapping[str, Any]) -> None:
        self.location, self.options = location, dict(options)

    @property
    def name(self) -> str:
        return self.location

    def create(self, path: str) -> RemoteSink:
        filesystem, root = self._filesystem()
        full = f"{root}/{path}"
        with self.errors("write", path):
            filesystem.makedirs(full.rpartition("/")[0], exist_ok=True)
            file = filesystem.open(full, "wb", block_size=_BLOCK_BYTES)
        return RemoteSink(self, path, file)

    def put_new(self, path: str, data: bytes) -> None:
        """A new object with this content, in one request. Raises BadRequest: there is one already,
        or it is not known to be written. Of two processes S3, GCS and Azure let one succeed; for
        other stores fsspec looks before it writes.
        """
        filesystem, root = self._filesystem()
        full = f"{root}/{path}"
        with self.errors("write", path):
            filesystem.makedirs(full.rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(full, data, mode="create")

    def open(self, path: str) -> BinaryIO:
        filesystem, root = self._filesystem()
        options = {"block_size": _BLOCK_BYTES, "cache_type": "readahead"}
        with self.errors("read", path):
            file: BinaryIO = filesystem.open(f"{root}/{path}", "rb", **options)
            return file

    def open_arrow(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self.open(path), mode="r")

    def size(self, path: str) -> int | None:
        filesystem, root = self._filesystem()
        with self.errors("read", path):
            filesystem.invalidate_cache()  # other processes write to the location
            try:
                info = filesystem.info(f"{root}/{path}")
            except FileNotFoundError:
                return None
        return int(info["size"]) if info["type"] == "file" else None

    def below(self, path: str) -> RemoteStorage:
        return RemoteStorage(f"{self.location}/{path}", self.options)

    def parent(self) -> tuple[RemoteStorage, str]:
        parent, _, name = self.location.rpartition("/")
        return RemoteStorage(parent, self.options), name

    def folders(self) -> list[str]:
        filesystem, root = self._filesystem()
        with self.errors("list", ""):
            filesystem.invalidate_cache()
            try:
                entries = filesystem.ls(root, detail=True)
            except FileNotFoundError:
                return []
        names = [str(info["name"]).rstrip("/") for info in entries if info["type"] == "directory"]
        return sorted(name.rpartition("/")[2] for name in names if name != root)

    def remove(self, path: str) -> None:
        filesystem, root = self._filesystem()
        with self.errors("remove", path):
            filesystem.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                filesystem.rm(f"{root}/{path}", recursive=True)

    def _filesystem(self) -> tuple[Any, str]:
        protocol = self.location.partition("://")[0]
        try:
            filesystem, root = fsspec.core.url_to_fs(self.location, **self.options)
        except ImportError as error:
            extra = "pip install trireme-ps[s3]" if protocol in ("s3", "s3a") else str(error)
            message = f"checkpoint: expected a package for {protocol}://, found none; {extra}"
            raise BadRequest(message) from error
        except Exception as error:
            message = f"checkpoint: cannot use {self.location!r}: {_reason(error)}"
            raise BadRequest(message) from error
        if _is_local(filesystem):
            raise BadRequest(
                "checkpoint: expected a plain path for local files, or a location of an object"
                f" store, found {self.location!r}"
            )
        return filesystem, str(root).rstrip("/")

    @contextmanager
    def errors(self, verb: str, path: str) -> Iterator[None]:
        """Turn errors of the file system, of whatever class, into BadRequest with the location."""
        try:
            yield
        except (TriremeError, FileNotFoundError):
            raise
        except Exception as error:
            where = f"{self.location}/{path}".rstrip("/")
            raise BadRequest(f"checkpoint: cannot {verb} {where}: {_reason(error)}") from error


class RemoteSink:
    """Uploads as it is written; an incomplete upload makes no object."""

    def __init__(self, storage: RemoteStorage, path: str, file: Any) -> None:
        self._storage, self._path, self._file = storage, path, file

    def write(self, data: Any) -> None:
        with self._storage.errors("write", self._path):
            self._file.write(data)

    def sync(self) -> None:
        with self._storage.errors("write", self._path):
            self._file.close()

    def abandon(self) -> None:
        if not self._file.closed:
            with self._storage.errors("write", self._path):
                if hasattr(self._file, "discard"):
                    self._file.discard()
                self._file.closed = True  # or its finalizer would complete it


def _is_local(filesystem: Any) -> bool:
    """Whether it reads files of this machine: servers keep those below their root folder."""
    while filesystem is not None:
        if isinstance(filesystem, LocalFileSystem):
            return True
        filesystem = getattr(filesystem, "fs", None)  # of one that wraps another
    return False


def _reason(error: BaseException) -> str:
    """The error's text in one line of bounded length."""
    text = str(getattr(error, "strerror", None) or error)
    return textwrap.shorten(text, _REASON_CHARACTERS) or type(error).__name__
