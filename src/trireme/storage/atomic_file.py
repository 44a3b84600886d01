"""Files that appear complete or not at all."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from trireme.storage.local import sync_folder

_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS)


def replace_file(path: Path, data: bytes, *, is_synced: bool = True) -> None:
    """Replace the content of a file: a reader finds the old content or the new one. is_synced:
    survive a crash of the machine, not of the process alone. Raises OSError.
    """
    aside = path.with_name(f".{path.name}")
    with aside.open("wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:  # a raw file may take less than it is given
            rest = rest[file.write(rest) :]
        if is_synced:
            os.fsync(file.fileno())
    aside.rename(path)
    if is_synced:
        sync_folder(path.parent)


class PendingFile:
    """A new file being written, which gets its name by publish().

    Until then a local one has no name, where its file system has nameless files: however the
    process ends, nothing of it is left. Elsewhere it has a hidden name.

    Args:
        filesystem: of fsspec.
        folder: an existing one there.

    Raises:
        OSError: by any method: it cannot be written.
    """

    def __init__(self, filesystem: Any, folder: str, name: str) -> None:
        self._filesystem = filesystem
        self._path = f"{folder.rstrip('/')}/{name}"
        hidden = f"{folder.rstrip('/')}/.{name}.partial"
        self._is_local = isinstance(filesystem, LocalFileSystem)
        nameless = _open_nameless(folder) if self._is_local else None
        self._name = None if nameless is not None else hidden
        self._file: BinaryIO = nameless or filesystem.open(hidden, "wb")

    def write(self, data: Any) -> None:
        self._file.write(data)

    def finish(self) -> None:
        """Make all that was written durable; no write follows."""
        if self._is_local:
            self._file.flush()
            os.fsync(self._file.fileno())
        if self._name is not None:
            self._file.close()

    def publish(self) -> None:
        """Give it its name."""
        if self._name is not None:
            self._filesystem.mv(self._name, self._path)
        else:
            _link(self._file.fileno(), self._path)
            self._file.close()
        self._name = self._path

    def discard(self) -> None:
        """Remove it, published or not."""
        with contextlib.suppress(OSError):  # of a full disk, again
            self._file.close()
        if self._name is not None and self._filesystem.exists(self._name):
            self._filesystem.rm(self._name)


def _open_nameless(folder: str) -> BinaryIO | None:
    """None: this file system has no nameless files."""
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    except OSError as error:
        if error.errno in _NO_NAMELESS_FILES:
            return None
        raise


def _link(descriptor: int, path: str) -> None:
    """As open(2) says under O_TMPFILE; os.link follows links only with a folder's descriptor."""
    root = os.open("/", os.O_PATH)
    try:
        link = f"/proc/self/fd/{descriptor}"
        os.link(link, path, src_dir_fd=root, follow_symlinks=True)
    finally:
        os.close(root)
