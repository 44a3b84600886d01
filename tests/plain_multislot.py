"""MultiSlot text read and printed in plain Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
from trireme.data import Content, Dense, InsId, Label, Schema, Show, Sparse, Weight, multislot
from trireme.data.schema import Field


def read_line(schema: Schema, line: bytes) -> Example:
    words = line.split(b" ")
    if words[-1] == b"" and len(words) > 1:
        words.pop()
    rest = iter(words)
    example = tuple(
        _read_slot(schema, field, rest, number) for number, field in enumerate(schema.fields, 1)
    )
    if next(rest, None) is not None:
        raise Wrong(None)
    return example


def _read_slot(schema: Schema, field: Field, words: Iterator[bytes], number: int) -> Any:
    count = next(words, b"")
    if not re.fullmatch(rb"[0-9]+", count) or int(count) >= 2**64:
        raise Wrong(number)
    if not isinstance(field, Sparse) and int(count) != getattr(field, "dim", 1):
        raise Wrong(number)
    values: list[Any] = []
    while len(values) < int(count):
        word = next(words, b"")
        if not word:
            raise Wrong(number)
        values.append(value_of(field, word, number))
    if not isinstance(field, (Dense, Sparse)):
        return values[0]
    if isinstance(field, Sparse):
        rules: Any = schema.format
        if rules.drop_zeros and not field.hashed:
            values = [key for key in values if key != 0]
        if rules.pad_empty and not values:
            values = [0]
    return tuple(values)


def random_schema(random: Random) -> Schema:
    rest: list[Field] = [
        Label(),
        *(Sparse(f"s{i}", i % 3 == 2) for i in range(random.randint(0, 9))),
    ]
    rest += random.choice([[], [Weight()], [Show(), Label("buy")]])
    rest += [Dense(f"d{i}", random.randint(1, 4)) for i in range(random.randint(0, 3))]
    random.shuffle(rest)
    texts = [field for field in (InsId(), Content()) if random.random() < 0.5]
    return multislot(
        [*texts, *rest],
        drop_zeros=random.random() < 0.5,
        pad_empty=random.random() < 0.5,
    )


def random_line(schema: Schema, random: Random) -> tuple[bytes, Example]:
    """A line, and the example that it prints."""
    slots, example = zip(
        *(_random_slot(schema, field, random) for field in schema.fields), strict=True
    )
    return b" ".join(slots) + random.choice([b"", b" "]), example


def _random_slot(schema: Schema, field: Field, random: Random) -> tuple[bytes, Any]:
    if isinstance(field, (InsId, Content)):
        word = _random_word(random)
        return b"1 " + word, word
    if isinstance(field, Sparse):
        return _random_bag(schema, field, random)
    negative = not isinstance(field, (Weight, Show))
    numbers = [random_float(random, negative=negative) for _ in range(getattr(field, "dim", 1))]
    words = [print_float(number, random) for number in numbers]
    text = " ".join([str(len(words)), *words]).encode()
    return text, tuple(numbers) if isinstance(field, Dense) else numbers[0]


def _random_bag(schema: Schema, field: Sparse, random: Random) -> tuple[bytes, Any]:
    size = random.choice([0, 1, 1, 1, 2, 5, 40])
    if field.hashed:
        words = [_random_word(random) for _ in range(size)]
        keys = [hash_of(field.name, word) for word in words]
    else:
        keys = [random_key(random) for _ in range(size)]
        words = [print_key(key, random).encode() for key in keys]
    rules: Any = schema.format
    if rules.drop_zeros and not field.hashed:
        keys = [key for key in keys if key != 0]
    if rules.pad_empty and not keys:
        keys = [0]
    return b" ".join([b"%d" % size, *words]), tuple(keys)


def _random_word(random: Random) -> bytes:
    return bytes(random.choice(b'abc09-,:|\t"\x80\xff') for _ in range(random.randint(1, 12)))
