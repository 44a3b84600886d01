"""Chunks of whole lines of a file, plain or gzip, local or of an fsspec location."""

import gzip
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any

import fsspec
import numpy as np
import numpy.typing as npt

from trireme.errors import DataError

CHUNK_BYTES = 8 << 20
LINE_BYTES_MAX = CHUNK_BYTES


def line_chunks(
    path: str, storage_options: Mapping[str, Any] | None = None
) -> Iterator[npt.NDArray[np.uint8]]:
    """The file, cut where lines end. A chunk is valid until the next one is read. Raises DataError:
    it cannot be read, or a line is longer than LINE_BYTES_MAX.
    """
    buffer = bytearray(CHUNK_BYTES + LINE_BYTES_MAX)
    view, filled = memoryview(buffer), 0
    with _opened(path, storage_options) as file:
        while size := _read(file, view[filled : filled + CHUNK_BYTES], path):
            filled += size
            end = buffer.rfind(b"\n", 0, filled) + 1
            if end == 0 and filled > LINE_BYTES_MAX:
                raise DataError(
                    f"{path}: expected lines of at most {LINE_BYTES_MAX} bytes, found a longer one"
                )
            if end:
                yield np.frombuffer(view[:end], np.uint8)
                view[: filled - end] = bytes(view[end:filled])
                filled -= end
    if filled:
        yield np.frombuffer(view[:filled], np.uint8)


def _opened(path: str, storage_options: Mapping[str, Any] | None) -> IO[bytes]:
    try:
        file: IO[bytes] = fsspec.open(path, "rb", **(storage_options or {})).open()
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{path}: cannot read it: {error}") from error
    return gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file  # type: ignore[return-value]


def _read(file: IO[bytes], into: memoryview, path: str) -> int:
    try:
        return file.readinto(into)  # type: ignore[attr-defined,no-any-return]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot read it: {error}") from error
