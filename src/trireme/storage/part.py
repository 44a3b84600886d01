"""A file that gets its name when it is complete."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS)


class Part:
    """A file being written. A local one has no name until publish(), where its file system has
    nameless files: however the process ends, nothing of it is left. Else it has a hidden one.

    Args:
        filesystem: of fsspec. folder: which exists there.

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
        """Nothing more comes: have all of it on the disk, or at the store."""
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
        """Leave nothing behind, published or not."""
        with contextlib.suppress(OSError):  # of a full disk, again
            self._file.close()
        if self._name is not None and self._filesystem.exists(self._name):
            self._filesystem.rm(self._name)


def _open_nameless(folder: str) -> BinaryIO | None:
    """None: not on this file system."""
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    except OSError as error:
        if error.errno in _NO_NAMELESS:
            return None
        raise


def _link(descriptor: int, path: str) -> None:
    """As open(2) says under O_TMPFILE; os.link follows links only if told where they are."""
    root = os.open("/", os.O_PATH)
    try:
        link = f"/proc/self/fd/{descriptor}"
        os.link(link, path, src_dir_fd=root, follow_symlinks=True)
    finally:
        os.close(root)
