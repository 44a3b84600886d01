"""Dense parameters in Fleet's formats: text of its servers, and Paddle's files of one variable.

Text: `part-000`, `part-001`, ... are consecutive parts of all parameters laid end to end, in the
alphabetical order of Paddle's names. A line is one element: its weight, then the optimizer's state
(`COLUMNS`).

File of a variable: version (4 bytes, 0), levels of detail (8 bytes, 0), version (4 bytes, 0),
length of a description (4 bytes), the description (protobuf: 1 is the type, 5 for float32; 2 a
dimension), the elements. Source: files that paddlepaddle 2.6.2 writes.
"""

import gzip
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import fsspec
import numpy as np
import numpy.typing as npt

from trireme.errors import Corruption, DataError

Floats = npt.NDArray[np.float32]

FLOAT32 = 5


class Column(NamedTuple):
    """A number of a line: its name in our optimizer, "" for none; Fleet's value is ours times
    `sign`.
    """

    name: str
    sign: float = 1.0


# By class of our optimizer. Fleet's Adam does not store its number of steps.
COLUMNS: Mapping[str, tuple[Column, ...]] = {
    "SGD": (),
    "Adam": (Column("exp_avg"), Column("exp_avg_sq")),
    "AdamD2Sum": (Column(""), Column("n"), Column("s"), Column("m", -1.0)),
}


def read_text(files: Sequence[str], storage_options: Mapping[str, Any] | None = None) -> Floats:
    """All lines of the files, in this order: (elements, columns of the first line). Raises
    DataError: a line has another number of columns, or a value that is not a finite number; names
    file and line.
    """
    rows, num_columns = list[list[float]](), 0
    for path in files:
        for number, line in enumerate(_lines(path, storage_options), 1):
            try:
                row = [float(word) for word in line.split()]
            except ValueError as error:
                raise DataError(f"{path}:{number}: expected numbers, found {line!r}") from error
            num_columns = num_columns or len(row)
            if len(row) != num_columns or not all(map(np.isfinite, row)):
                raise DataError(
                    f"{path}:{number}: expected {num_columns} finite numbers, found {line!r}"
                )
            rows.append(row)
    return np.array(rows, np.float32).reshape(len(rows), num_columns or 1)


def _lines(path: str, storage_options: Mapping[str, Any] | None) -> Iterable[str]:
    stored = read_bytes(path, storage_options)
    try:
        text = gzip.decompress(stored) if path.endswith(".gz") else stored
        return text.decode("ascii").splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected text of numbers: {error}") from error


def read_bytes(path: str, storage_options: Mapping[str, Any] | None = None) -> bytes:
    """The content of a file. Raises DataError if it cannot be read."""
    try:
        with fsspec.open(path, "rb", **(storage_options or {})) as file:
            content: bytes = file.read()
            return content
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{path}: cannot read it: {error}") from error


def write_text(values: Floats) -> bytes:
    """(elements, columns) as lines, with the fewest digits that read back as the same float32."""
    return "".join(" ".join(map(str, row)) + "\n" for row in values).encode()


def read_variable(path: str, storage_options: Mapping[str, Any] | None = None) -> Floats:
    """The tensor in Paddle's file of one variable. Raises DataError: no such file. Corruption: it
    is not a float32 tensor as Paddle writes it.
    """
    content = read_bytes(path, storage_options)
    try:
        version, levels, tensor_version, size = struct.unpack_from("<IQIi", content)
        kind, shape = _description(content[20 : 20 + size])
    except (struct.error, IndexError) as error:
        raise Corruption(f"{path}: expected a variable of Paddle, found {error}") from error
    actual = (version, levels, tensor_version, kind)
    if actual != (0, 0, 0, FLOAT32):
        raise Corruption(
            f"{path}: expected versions 0, no levels of detail and type {FLOAT32} (float32),"
            f" found {actual}"
        )
    values = content[20 + size :]
    if len(values) != 4 * np.prod(shape, dtype=np.int64):
        raise Corruption(f"{path}: expected float32 of shape {shape}, found {len(values)} bytes")
    return np.frombuffer(values, "<f4").reshape(shape)


def _description(content: bytes) -> tuple[int, tuple[int, ...]]:
    """The type and the shape."""
    kind, shape, at = -1, list[int](), 0
    while at < len(content):
        tag = content[at]
        value, at = _read_varint(content, at + 1)
        if tag == 0x08:
            kind = value
        elif tag == 0x10:
            shape.append(value)
        else:
            return -1, ()
    return kind, tuple(shape)


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
