"""Text formats, and the parser of a format: one of the core, whose columns become batches.

In all formats but Criteo's a number is decimal, with or without an exponent, and rounds to a finite
float32. A line ends with LF or CR LF and has at most 1 MiB. Lines of any other form are broken.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trireme import _core
from trireme.data.batch import Batch
from trireme.data.column_layout import to_batch
from trireme.data.schema import Schema

HEAD_BYTES = 1 << 16


class TextFormat(ABC):
    """Base of the formats of text; see `trireme.data.schema.Format`."""

    holds_types: ClassVar[bool] = False

    @abstractmethod
    def check(self, schema: Schema) -> None:
        """Raises BadRequest: fields that this format cannot hold."""

    @abstractmethod
    def core_parser(self, schema: Schema, batch_size: int, skip_broken: bool) -> Any:
        """A parser of the core, whose columns are the fields of the schema."""

    def field_names(self, schema: Schema) -> Sequence[str]:
        """Names of the core's fields in messages."""
        return schema.names

    def start_file(self, schema: Schema, core: Any, head: NDArray[np.uint8]) -> int:
        """See TextParser.start_file."""
        return 0


class TextParser:
    """Fills batches from parts of text; one thread at a time.

    A reader calls start_file with the head of every file, also if it reads the file from the
    middle; then parse for the lines; take whenever the batch is full. A batch may hold lines of
    several files.

    Attributes:
        core: the parser of the core; it counts examples and broken lines. A line of more than its
            max_line_bytes is broken.
    """

    def __init__(
        self,
        schema: Schema,
        format: TextFormat,
        *,
        batch_size: int,
        threads: int,
        skip_broken: bool,
    ) -> None:
        self.skips_broken = skip_broken
        self._schema, self._format = schema, format
        self.core = format.core_parser(schema, batch_size, skip_broken)
        self._pool = _core.Pool(threads)

    def start_file(self, head: NDArray[np.uint8]) -> int:
        """Number of bytes at the beginning of a file that are not lines of data.

        Args:
            head: the first HEAD_BYTES of the file, or all of it.

        Raises:
            DataError: a header that does not fit the schema; the caller adds the file's name.
        """
        return self._format.start_file(self._schema, self.core, head)

    def parse(self, text: NDArray[np.uint8], limit: int, is_end: bool) -> int:
        """Parse whole lines that begin before `limit`, until the batch is full; returns the number
        of bytes parsed. `is_end`: the text ends the file, so that its rest is a line.
        """
        num_bytes: int = self.core.parse(text, limit, is_end, self._pool)
        return num_bytes

    @property
    def broken_line(self) -> tuple[int, str] | None:
        """The first broken line of the latest parse(): its offset, and the error."""
        broken = self.core.broken_line
        if broken is None:
            return None
        offset, field, expected, text = broken
        name = "" if field < 0 else self._format.field_names(self._schema)[field]
        where = "" if field < 0 else f"field {field + 1} ({name}): "
        return offset, f"{where}expected {expected}, found {text}"

    def take(self) -> Batch:
        """The examples parsed since the last take(), as a batch."""
        return to_batch(self._schema, self.core.take(self._pool))


def core_fields(schema: Schema) -> list[tuple[str, str, int]]:
    """The fields as the parsers of the core take them: kind, name and dim."""
    return [(field.kind, field.name, getattr(field, "dim", 1)) for field in schema.fields]
