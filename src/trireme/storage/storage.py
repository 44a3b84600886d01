"""Where a checkpoint's files are: a local folder, or a location of fsspec such as s3://bucket/key.

Paths are relative to it, with `/` between their parts. What is written gets its checksum on the
way, in the words of the manifest: {"bytes": n, "xxh3_128": 32 hexadecimal digits}.
"""

from __future__ import annotations

import io
import os
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

import fsspec
import pyarrow as pa
import xxhash
from fsspec.implementations.local import LocalFileSystem

from trireme.errors import BadRequest, Corruption, TriremeError

READ_BYTES = 4 << 20
_REMOTE_BLOCK_BYTES = 16 << 20
_REASON_CHARACTERS = 400

Checksum = dict[str, Any]


class Storage(Protocol):
    """Threads: any, on different files."""

    @property
    def name(self) -> str:
        """The folder or location, for messages."""

    def create(self, path: str) -> Sink:
        """A new file, with the folders it needs."""

    def open(self, path: str) -> BinaryIO:
        """A file from its beginning; FileNotFoundError where there is none."""

    def open_arrow(self, path: str) -> pa.NativeFile:
        """The same for Arrow, which reads local ones without a copy."""

    def size(self, path: str) -> int | None:
        """Its bytes; None: there is no such file."""

    def below(self, path: str) -> Storage:
        """The folder of that path."""

    def parent(self) -> tuple[Storage, str]:
        """The folder that it is in, and its name there."""

    def folders(self) -> list[str]:
        """Names of the folders in it."""

    def remove(self, path: str) -> None:
        """Remove a file, durably, or a folder with all that is in it, if it is there."""


class Sink(Protocol):
    """A file being written by one thread."""

    def write(self, data: Any) -> int: ...

    def sync(self) -> None:
        """Make it durable and close it; without this call, nothing of it may last."""

    def abandon(self) -> None:
        """Close it, whatever becomes of it. Twice, or after sync(), does nothing."""


class CheckedFile(io.RawIOBase):
    """A file being written, with its checksum."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        while written < view.nbytes:  # a raw file may take less than it is given
            written += self._sink.write(view[written:])
        self._hash.update(view)
        self.num_bytes += view.nbytes
        return view.nbytes

    def checksum(self) -> Checksum:
        return {"bytes": self.num_bytes, "xxh3_128": self._hash.hexdigest()}


@contextmanager
def written(storage: Storage, path: str) -> Iterator[tuple[CheckedFile, Checksum]]:
    """Write a file; the map holds path, bytes and checksum once the block has ended well."""
    entry: Checksum = {}
    sink = storage.create(path)
    try:
        file = CheckedFile(sink)
        yield file, entry
        sink.sync()
        entry.update(path=path, **file.checksum())
    finally:
        sink.abandon()


def read_chunks(storage: Storage, entry: Mapping[str, Any]) -> Iterator[int]:
    """Read a file of a manifest and compare it with its entry; yields the bytes read, piece by
    piece.

    Raises:
        Corruption: it is missing, or its length or checksum differ; names the file.
    """
    path = entry["path"]
    where = f"{storage.name}/{path}"
    size = storage.size(path)
    if size is None:
        raise Corruption(f"checkpoint {storage.name}: expected file {path}, found none")
    if size != entry["bytes"]:
        raise Corruption(f"{where}: expected {entry['bytes']} bytes, found {size}")
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(READ_BYTES, max(size, 1))))
    with storage.open(path) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]  # of binary files
            digest.update(buffer[:count])
            yield count
    if digest.hexdigest() != entry["xxh3_128"]:
        raise Corruption(f"{where}: expected XXH3 {entry['xxh3_128']}, found {digest.hexdigest()}")


def open_storage(location: str | os.PathLike[str], options: Mapping[str, Any] | None) -> Storage:
    """The storage of a path or location. Raises BadRequest for a protocol that cannot be used."""
    text = os.fspath(location)
    for prefix in ("local://", "file://"):
        text = text.removeprefix(prefix)
    if "://" not in text:
        if options:
            raise BadRequest(
                "checkpoint: expected storage_options only with a location such as"
                f" 's3://bucket/key', found {sorted(options)} with the path {text!r}"
            )
        return LocalStorage(Path(os.path.abspath(text)))
    return RemoteStorage(text.rstrip("/"), options or {})


def checked_path(path: Any) -> str:
    """A relative path that stays in its folder. Raises BadRequest for any other value."""
    if not isinstance(path, str) or not path or len(path) > 1024 or "\0" in path or "\\" in path:
        raise BadRequest(f"checkpoint: expected a relative path, found {path!r}")
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or str(PurePosixPath(path)) != path or ":" in path:
        raise BadRequest(f"checkpoint: expected a path inside the folder, found {path!r}")
    return path


# ---- local folders ----


class LocalStorage:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        return str(self.folder)

    def create(self, path: str) -> Sink:
        full = self.folder / path
        full.parent.mkdir(parents=True, exist_ok=True)
        return _LocalSink(full)

    def open(self, path: str) -> BinaryIO:
        return (self.folder / path).open("rb", buffering=0)

    def open_arrow(self, path: str) -> pa.NativeFile:
        return pa.memory_map(str(self.folder / path))

    def size(self, path: str) -> int | None:
        full = self.folder / path
        return full.stat().st_size if full.is_file() else None

    def below(self, path: str) -> LocalStorage:
        return LocalStorage(self.folder / path)

    def parent(self) -> tuple[LocalStorage, str]:
        return LocalStorage(self.folder.parent), self.folder.name

    def folders(self) -> list[str]:
        if not self.folder.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())

    def remove(self, path: str) -> None:
        full = self.folder / path
        if full.is_dir() and not full.is_symlink():
            shutil.rmtree(full)
        elif full.exists() or full.is_symlink():
            full.unlink()
        else:
            return
        sync_folder(full.parent)


class _LocalSink:
    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def sync(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        self._file.close()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- fsspec ----


class RemoteStorage:
    """A location of fsspec. The file system is asked for anew where it is needed: one that talks to
    a server does not survive a fork, and fsspec keeps those of this process.
    """

    def __init__(self, location: str, options: Mapping[str, Any]) -> None:
        self.location, self.options = location, dict(options)

    @property
    def name(self) -> str:
        return self.location

    def create(self, path: str) -> Sink:
        filesystem, root = self._filesystem()
        full = f"{root}/{path}"
        with self._reported("write", path):
            filesystem.makedirs(full.rpartition("/")[0], exist_ok=True)
            file = filesystem.open(full, "wb", block_size=_REMOTE_BLOCK_BYTES)
        return _RemoteSink(self, path, file)

    def open(self, path: str) -> BinaryIO:
        filesystem, root = self._filesystem()
        with self._reported("read", path):
            file: BinaryIO = filesystem.open(
                f"{root}/{path}", "rb", block_size=_REMOTE_BLOCK_BYTES, cache_type="readahead"
            )
            return file

    def open_arrow(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self.open(path), mode="r")

    def size(self, path: str) -> int | None:
        filesystem, root = self._filesystem()
        with self._reported("read", path):
            filesystem.invalidate_cache()  # other processes write here
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
        with self._reported("list", ""):
            filesystem.invalidate_cache()
            try:
                found = filesystem.ls(root, detail=True)
            except FileNotFoundError:
                return []
        names = [str(info["name"]).rstrip("/") for info in found if info["type"] == "directory"]
        return sorted(name.rpartition("/")[2] for name in names if name != root)

    def remove(self, path: str) -> None:
        filesystem, root = self._filesystem()
        with self._reported("remove", path):
            filesystem.invalidate_cache()
            try:
                filesystem.rm(f"{root}/{path}", recursive=True)
            except FileNotFoundError:
                return

    def _filesystem(self) -> tuple[Any, str]:
        protocol = self.location.partition("://")[0]
        try:
            filesystem, root = fsspec.core.url_to_fs(self.location, **self.options)
        except ImportError as error:
            extra = "pip install trireme-ps[s3]" if protocol in ("s3", "s3a") else str(error)
            raise BadRequest(
                f"checkpoint: expected a package for {protocol}://, found none; {extra}"
            ) from error
        except Exception as error:
            raise BadRequest(
                f"checkpoint: cannot use {self.location!r}: {reason(error)}"
            ) from error
        if _is_local(filesystem):
            raise BadRequest(
                "checkpoint: expected a plain path for local files, or a location of an object"
                f" store, found {self.location!r}"
            )
        return filesystem, str(root).rstrip("/")

    @contextmanager
    def _reported(self, verb: str, path: str) -> Iterator[None]:
        """Errors of the file system's package, whatever their classes, name the location."""
        try:
            yield
        except (TriremeError, FileNotFoundError):
            raise
        except Exception as error:
            where = f"{self.location}/{path}".rstrip("/")
            raise BadRequest(f"checkpoint: cannot {verb} {where}: {reason(error)}") from error


def _is_local(filesystem: Any) -> bool:
    """Whether files of this machine are behind it: servers keep those below their root folder."""
    while filesystem is not None:
        if isinstance(filesystem, LocalFileSystem):
            return True
        filesystem = getattr(filesystem, "fs", None)  # of one that wraps another
    return False


class _RemoteSink:
    """Uploads as it is written; what is not complete becomes no object."""

    def __init__(self, storage: RemoteStorage, path: str, file: Any) -> None:
        self._storage, self._path, self._file = storage, path, file

    def write(self, data: Any) -> int:
        with self._storage._reported("write", self._path):
            return int(self._file.write(data))

    def sync(self) -> None:
        with self._storage._reported("write", self._path):
            self._file.close()

    def abandon(self) -> None:
        if self._file.closed:
            return
        with self._storage._reported("write", self._path):
            self._file.discard() if hasattr(self._file, "discard") else None
            self._file.closed = True  # or its finalizer would complete it


def reason(error: BaseException) -> str:
    """What an error says, in one line of bounded length."""
    text = str(getattr(error, "strerror", None) or error)
    return textwrap.shorten(text, _REASON_CHARACTERS) or type(error).__name__
