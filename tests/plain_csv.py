"""Separated values read and printed in plain Python."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.plain_text import (
    Example,
    Wrong,
    hash_of,
    print_float,
    print_key,
    random_float,
    random_key,
    value_of,
)
from trireme.data import Content, Dense, InsId, Label, Schema, Show, Sparse, Weight, csv
from trireme.data.csv import CsvText
from trireme.data.schema import Field

_CHARACTERS = b"abc09-_.:|,;\t\"'\x80\xff "


def text_of(schema: Schema) -> CsvText:
    assert isinstance(schema.format, CsvText)
    return schema.format


def read_line(schema: Schema, line: bytes) -> Example:
    """One line of a file without a header."""
    text = text_of(schema)
    cells = split(line, text.delimiter.encode(), text.quote.encode())
    if len(cells) != sum(num_cells(schema, field) for field in schema.fields):
        raise Wrong(None)
    example = []
    for number, field in enumerate(schema.fields, 1):
        own = [cells.pop(0) for _ in range(num_cells(schema, field))]
        example.append(_value(field, own, text.list_separator.encode(), number))
    return tuple(example)


def num_cells(schema: Schema, field: Field) -> int:
    is_list = bool(text_of(schema).list_separator)
    return field.dim if isinstance(field, Dense) and not is_list else 1


def split(line: bytes, delimiter: bytes, quote: bytes) -> list[bytes]:
    cells = []
    while True:
        if quote and line.startswith(quote):
            at = 1
            while line[at : at + 1] != quote or line[at : at + 2] == quote * 2:
                if at >= len(line):
                    raise Wrong(None)
                at += 2 if line[at : at + 2] == quote * 2 else 1
            cell, rest = line[1:at].replace(quote * 2, quote), line[at + 1 :]
            if rest and not rest.startswith(delimiter):
                raise Wrong(None)
        else:
            cell = line.partition(delimiter)[0]
            rest = line[len(cell) :]
        cells.append(cell)
        if not rest:
            return cells
        line = rest[1:]


def _value(field: Field, cells: list[bytes], separator: bytes, number: int) -> Any:
    if not isinstance(field, (Dense, Sparse)):
        return value_of(field, cells[0], number)
    words = cells
    if separator:
        words = cells[0].split(separator)
        if isinstance(field, Dense) and cells[0] == b"":
            words = [b""] * field.dim
    if isinstance(field, Sparse):
        return tuple(value_of(field, word, number) for word in words if word)
    if len(words) != field.dim:
        raise Wrong(number)
    return tuple(value_of(field, word or b"0", number) for word in words)


def random_schema(random: Random) -> Schema:
    fields: list[Field] = [Label(), *random.choice([[], [Weight()], [Show(), Label("buy")]])]
    fields += [Sparse(f"s{i}", i % 3 == 2) for i in range(random.randint(0, 9))]
    fields += [Dense(f"d{i}", random.randint(1, 4)) for i in range(random.randint(0, 3))]
    fields += random.choice([[], [InsId()], [Content(), InsId()]])
    random.shuffle(fields)
    delimiter, separator = random.choice([",|", "\t;", "; ", "|:", "\x01\x02"])
    return csv(
        fields,
        header=False,
        delimiter=delimiter,
        quote=random.choice(['"', "'", None]),
        list_separator=random.choice([separator, None]),
    )


def random_line(schema: Schema, random: Random) -> tuple[bytes, Example]:
    """A line, and the example that it prints."""
    text = text_of(schema)
    cells: list[bytes] = []
    example = []
    for field in schema.fields:
        words, value = _random_field(schema, field, random)
        cells += words
        example.append(value)
    quote = text.quote.encode()
    cells = [
        quote + cell.replace(quote, quote * 2) + quote
        if quote and (text.delimiter.encode() in cell or quote in cell or random.random() < 0.1)
        else cell
        for cell in cells
    ]
    return text.delimiter.encode().join(cells), tuple(example)


def _random_field(schema: Schema, field: Field, random: Random) -> tuple[list[bytes], Any]:
    """The cells of a field, not quoted yet, and its value."""
    text = text_of(schema)
    separator = text.list_separator.encode()
    if isinstance(field, (InsId, Content)):
        word = _random_word(text, random)
        return [word], word
    if isinstance(field, Sparse):
        sizes = [0, 1, 1, 2, 5, 40] if separator else [0, 1, 1]
        words, keys = _random_bag(text, field, random.choice(sizes), random)
        return [separator.join(words)], keys
    negative = not isinstance(field, (Weight, Show))
    numbers = [random_float(random, negative=negative) for _ in range(getattr(field, "dim", 1))]
    words = [print_float(number, random).encode() for number in numbers]
    if not isinstance(field, Dense):
        return words, numbers[0]
    words = [
        b"" if number == 0 and random.random() < 0.5 else word
        for number, word in zip(numbers, words, strict=True)
    ]
    return [separator.join(words)] if separator else words, tuple(numbers)


def _random_bag(
    text: CsvText, field: Sparse, size: int, random: Random
) -> tuple[list[bytes], tuple[int, ...]]:
    if field.hashed:
        words = [
            _random_word(text, random).replace(text.list_separator.encode() or b"\0", b"x") or b"x"
            for _ in range(size)
        ]
        return words, tuple(hash_of(field.name, word) for word in words)
    keys = [random_key(random) for _ in range(size)]
    return [print_key(key, random).encode() for key in keys], tuple(keys)


def _random_word(text: CsvText, random: Random) -> bytes:
    """Bytes that a cell can hold."""
    word = bytes(random.choice(_CHARACTERS) for _ in range(random.randint(0, 12)))
    return word if text.quote else word.replace(text.delimiter.encode(), b"x")
