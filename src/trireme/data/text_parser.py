"""Text formats, and the parser that they open: one of the core, whose columns become batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trireme import _core
from trireme.data.batch import Batch
from trireme.data.column_layout import to_batch
from trireme.data.schema import (
    Content,
    Dense,
    Field,
    Format,
    InsId,
    Label,
    Schema,
    Show,
    Sparse,
    Weight,
)

HEAD_BYTES = 1 << 16


@runtime_checkable
class TextFormat(Format, Protocol):
    """Converts text to columns."""

    def open(
        self, schema: Schema, *, batch_size: int, threads: int, skip_broken: bool
    ) -> TextParser: ...


class TextParser:
    """Fills batches from parts of text; one thread at a time.

    A reader calls start_file with the head of every file, also if it reads the file from the
    middle; then parse for the lines; take whenever the batch is full. A batch may hold lines of
    several files.

    Args:
        core: a parser whose columns are the fields of the schema.
        field_names: names of the core's fields in messages.
    """

    def __init__(
        self,
        schema: Schema,
        core: _core.TextParser,
        *,
        threads: int,
        skip_broken: bool,
        field_names: Sequence[str] | None = None,
    ) -> None:
        self.skips_broken = skip_broken
        self._schema = schema
        self._core = core
        self._pool = _core.Pool(threads)
        self._field_names = tuple(field_names or schema.names)

    def start_file(self, head: NDArray[np.uint8]) -> int:
        """Number of bytes at the beginning of a file that are not lines of data: here 0.

        Args:
            head: the first HEAD_BYTES of the file, or all of it.

        Raises:
            DataError: a header that does not fit the schema; the caller adds the file's name.
        """
        del head
        return 0

    def parse(self, text: NDArray[np.uint8], limit: int, is_end: bool) -> int:
        """Parse whole lines that begin before `limit`, until the batch is full; returns the number
        of bytes parsed. `is_end`: the text ends the file, so that its rest is a line.
        """
        return self._core.parse(text, limit, is_end, self._pool)

    @property
    def max_line_bytes(self) -> int:
        """A longer line is broken. parse() makes progress with more bytes, or with the end."""
        return self._core.max_line_bytes

    @property
    def num_examples(self) -> int:
        """Examples in the batch so far."""
        return self._core.num_examples

    @property
    def is_full(self) -> bool:
        return self._core.is_full

    @property
    def broken_line(self) -> tuple[int, str] | None:
        """The first broken line of the latest parse(): its offset, and the error."""
        broken = self._core.broken_line
        if broken is None:
            return None
        offset, field, expected, text = broken
        where = "" if field < 0 else f"field {field + 1} ({self._field_names[field]}): "
        return offset, f"{where}expected {expected}, found {text}"

    @property
    def num_broken_lines(self) -> int:
        return self._core.num_broken_lines

    def take(self) -> Batch:
        """The examples parsed since the last take(), as a batch."""
        return to_batch(self._schema, self._core.take(self._pool))


def core_fields(schema: Schema) -> list[tuple[str, str, int]]:
    """The fields as the parsers of the core take them: kind, name and dim."""
    return [_core_field(field) for field in schema.fields]


def _core_field(field: Field) -> tuple[str, str, int]:
    match field:
        case Label():
            return "number", field.name, 1
        case Weight() | Show():
            return "amount", field.name, 1
        case Dense():
            return "dense", field.name, field.dim
        case Sparse():
            return "hashes" if field.hashed else "keys", field.name, 1
        case InsId() | Content():
            return "string", field.name, 1
