"""Record batches of Arrow files that need not be trusted.

A compressed buffer of a few bytes may claim gigabytes, which Arrow takes before anything can be
checked. Our files have none, so they are refused. pyarrow does not show the field that tells: it is
read from Arrow's metadata (format/File.fbs and Message.fbs of Arrow, as flatbuffers lay them out).
"""

import struct
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from trireme.errors import Corruption

_TAIL = struct.Struct("<i6s")  # length of the footer, "ARROW1"
_BLOCK = struct.Struct("<qi4xq")  # offset, bytes of the metadata, bytes of the body
_FOOTER_BATCHES, _MESSAGE_HEADER, _BATCH_COMPRESSION = 3, 2, 3  # fields by number


def batches_of(source: pa.NativeFile, reader: Any, where: str) -> Iterator[pa.RecordBatch]:
    """The batches of an open file. Raises Corruption before one with compressed buffers is read."""
    try:
        blocks = _blocks(source) if reader.num_record_batches else []
        for number in range(reader.num_record_batches):
            offset, num_bytes, _ = blocks[number]
            if _is_compressed(source.read_at(num_bytes, offset)):
                raise Corruption(
                    f"{where}: expected buffers as they are, found compressed ones in batch"
                    f" {number}"
                )
            yield reader.get_batch(number)
    except (struct.error, IndexError) as error:
        raise Corruption(f"{where}: expected an Arrow file, found {error}") from error


def _blocks(source: pa.NativeFile) -> list[tuple[int, int, int]]:
    """Where each batch is."""
    end = source.size() - _TAIL.size
    num_bytes, _ = _TAIL.unpack(source.read_at(_TAIL.size, end))
    footer = source.read_at(num_bytes, end - num_bytes)
    at = _pointed(footer, _field(footer, _pointed(footer, 0), _FOOTER_BATCHES))
    first, count = at + 4, _number("<I", footer, at)
    return list(_BLOCK.iter_unpack(footer[first : first + count * _BLOCK.size]))


def _is_compressed(metadata: bytes) -> bool:
    start = 8 if metadata[:4] == b"\xff\xff\xff\xff" else 4  # behind the length
    message = metadata[start:]
    batch = _pointed(message, _field(message, _pointed(message, 0), _MESSAGE_HEADER))
    return _field(message, batch, _BATCH_COMPRESSION) > 0


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a table is; 0: the table lacks it."""
    fields = table - _number("<i", data, table)
    at = 4 + 2 * number
    if at >= _number("<H", data, fields):
        return 0
    offset = _number("<H", data, fields + at)
    return table + offset if offset else 0


def _pointed(data: bytes, at: int) -> int:
    return at + _number("<I", data, at)


def _number(form: str, data: bytes, at: int) -> int:
    if at < 0:  # it would count from the end
        raise IndexError(f"a position of {at}")
    return int(struct.unpack_from(form, data, at)[0])
