"""Separated values: CSV with or without a header, TSV and the like.

A line is an example; a delimiter separates its cells. A cell that begins with the quote ends with
the closing quote; delimiters inside are text, two quotes are one. A line break ends the line also
within quotes: a cell cannot hold one. Elsewhere a quote is an ordinary character.

- Label, Weight, Show: a cell with a number; Weight and Show are not negative.
- Dense: dim cells, each a number, or empty for 0. With a list separator: one cell with dim numbers,
  or empty for zeros; empty numbers are 0.
- Sparse: one cell with a key, or empty for an empty bag: an integer up to 2^64 - 1, or from -2^63,
  which stands for its two's complement; with hashed=True a string, whose hash is the key (see
  trireme.data.strings). With a list separator: any number of them; empty ones do not count.
- InsId and Content: a cell as it is.

There are no blanks around a number. Numbers and line ends: see trireme.data.text_parser. The parser
is in C++: core/feed/csv.h.
"""

from __future__ import annotations

import csv as python_csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trireme import _core
from trireme.data.schema import Field, Schema
from trireme.data.text_parser import HEAD_BYTES, TextFormat, core_fields
from trireme.errors import BadRequest, DataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class CsvText(TextFormat):
    """Converts separated values to columns; see `csv`.

    columns: of some fields the names of their cells in the header.
    """

    delimiter: str = ","
    header: bool = True
    quote: str = '"'
    list_separator: str = ""
    columns: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def check(self, schema: Schema) -> None:
        """Check that the header names the cells of every field."""
        self.core_parser(schema, batch_size=1, skip_broken=False)
        named = dict(self.columns)
        if named and not self.header:
            raise BadRequest("csv: columns are names in a header, found header=False")
        unknown = [name for name in named if name not in schema.names]
        if unknown:
            raise BadRequest(f"csv: columns of no field: {', '.join(unknown)}")
        for field in schema.fields:
            num_cells = 1 if self.list_separator else getattr(field, "dim", 1)
            names = self.cells_of(field)
            if self.header and len(names) != num_cells:
                raise BadRequest(
                    f"csv: expected the names of {num_cells} columns for {field}, found "
                    f"{', '.join(names)}; say columns={{{field.name!r}: [...]}} or list_separator"
                )

    def cells_of(self, field: Field) -> tuple[str, ...]:
        """Names of a field's cells in the header."""
        return dict(self.columns).get(field.name, (field.name,))

    def core_parser(self, schema: Schema, batch_size: int, skip_broken: bool) -> _core.CsvParser:
        marks = (self.delimiter, self.quote, self.list_separator)
        return _core.CsvParser(core_fields(schema), batch_size, *marks, skip_broken)

    def start_file(self, schema: Schema, core: _core.CsvParser, head: NDArray[np.uint8]) -> int:
        """The bytes of the header."""
        if not self.header:
            return 0
        line, newline, _ = head.tobytes().partition(b"\n")
        if not newline and len(head) >= HEAD_BYTES:
            raise DataError(f"expected a header of fewer than {HEAD_BYTES} bytes, found more")
        names = self._names(line.removesuffix(b"\r").removeprefix(_BYTE_ORDER_MARK))
        wanted = [cell for field in schema.fields for cell in self.cells_of(field)]
        place = {name: i for i, name in enumerate(names)}
        missing = [name for name in wanted if name not in place]
        twice = sorted({name for i, name in enumerate(names) if place[name] != i} & set(wanted))
        if missing or twice:
            problem = f"missing: {', '.join(missing)}" if missing else f"twice: {', '.join(twice)}"
            raise DataError(
                f"expected a header with columns {', '.join(wanted)}, found "
                f"{', '.join(names)}; {problem}"
            )
        core.set_columns([place[name] for name in wanted], len(names))
        return len(line) + len(newline)

    def _names(self, line: bytes) -> list[str]:
        try:
            (names,) = python_csv.reader(
                [line.decode()],
                delimiter=self.delimiter,
                quotechar=self.quote or None,
                quoting=python_csv.QUOTE_MINIMAL if self.quote else python_csv.QUOTE_NONE,
                strict=True,
            )
        except (UnicodeDecodeError, ValueError, python_csv.Error) as error:
            raise DataError(f"expected a header, found {line[:80]!r}: {error}") from error
        return names


def csv(
    fields: Iterable[Field],
    *,
    delimiter: str = ",",
    header: bool = True,
    quote: str | None = '"',
    list_separator: str | None = None,
    columns: Mapping[str, str | Sequence[str]] | None = None,
) -> Schema:
    """The schema of separated values.

    Args:
        fields: the columns to read. With a header, in any order, and other columns are not read;
            without, all columns of a line, in order.
        delimiter: one ASCII character between cells.
        header: the first line of every file names the columns.
        quote: one ASCII character around cells that hold delimiters; None: there is none.
        list_separator: one ASCII character between the values of a cell; None: one value each.
        columns: name of a field -> name of its column in the header, or of its dim columns if it
            is dense. Default: the field's name.

    Raises:
        BadRequest: as Schema; marks that are equal or could be part of a number; columns without a
            header, of no field, or not one for each cell of a field.
    """
    named = {
        name: (cells,) if isinstance(cells, str) else tuple(cells)
        for name, cells in (columns or {}).items()
    }
    text = CsvText(
        delimiter=delimiter,
        header=header,
        quote=quote or "",
        list_separator=list_separator or "",
        columns=tuple(named.items()),
    )
    return Schema(fields, format=text)
