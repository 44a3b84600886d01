"""Text formats read and printed in plain Python: what the parsers in C++ are compared with.

An example is a tuple with a value for each field of the schema: a float, a tuple of floats, bytes,
or a tuple of keys, of (key, weight) where keys have weights. Floats are float32 values, keys are
signed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import numpy as np

from trireme import _core
from trireme.data import Batch, Content, Dense, InsId, Schema, Show, Sparse, Weight

Example = tuple[Any, ...]


class Broken(NamedTuple):
    """field: its place in the schema, from 1; None when the line itself is wrong."""

    line: int
    field: int | None


class Wrong(Exception):
    """A line is broken."""

    def __init__(self, field: int | None) -> None:
        self.field = field


def lines_of(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and lines, without their ends."""
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        yield number, line.removesuffix(b"\r")


def float32_of(word: bytes) -> float | None:
    """The nearest float32 of a decimal number; None if there is none."""
    if not re.fullmatch(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", word):
        return None
    double = float(word)
    with np.errstate(over="ignore"):
        nearest = np.float32(double)
    if not math.isfinite(nearest):
        return None
    if abs(double) < 1e-60:
        return float(nearest)
    exact = Fraction(word.decode())  # rounding twice may miss the nearest by one
    near = [np.nextafter(nearest, np.float32(to)) for to in (-math.inf, math.inf)]
    near = [nearest, *(number for number in near if np.isfinite(number))]
    return float(min(near, key=lambda number: abs(Fraction(float(number)) - exact)))


def key_of(word: bytes) -> int | None:
    if not re.fullmatch(rb"-?[0-9]+", word) or not -(2**63) <= int(word) < 2**64:
        return None
    return signed(int(word))


def signed(key: int) -> int:
    return (key + 2**63) % 2**64 - 2**63


def hash_of(feature: str, word: bytes) -> int:
    out = np.empty(1, np.uint64)
    _core.hash_strings(np.frombuffer(word, np.uint8), np.array([0, len(word)]), feature, out)
    return int(out.view(np.int64)[0])


def value_of(field: object, word: bytes, number: int) -> Any:
    """One value of field number `number`."""
    if isinstance(field, (InsId, Content)):
        return word
    if isinstance(field, Sparse) and field.hashed:
        return hash_of(field.name, word)
    value = key_of(word) if isinstance(field, Sparse) else float32_of(word)
    if value is None or (isinstance(field, (Weight, Show)) and value < 0):
        raise Wrong(number)
    return value


def examples_of(schema: Schema, batch: Batch) -> list[Example]:
    """The examples of a batch, one by one."""
    columns: list[list[Any]] = []
    B = batch.num_examples
    for field in schema.fields:
        column = batch[field.name]
        if isinstance(field, (InsId, Content)):
            data, ends = column.data.numpy().tobytes(), column.offsets.tolist()
            columns.append([data[begin:end] for begin, end in pairwise(ends)])
        elif isinstance(field, Dense):
            assert column.shape == (B, field.dim)
            columns.append(list(map(tuple, column.tolist())))
        elif isinstance(field, Sparse):
            values, ends = column.values.tolist(), column.offsets.tolist()
            if column.weights is not None:
                values = list(zip(values, column.weights.tolist(), strict=True))
            columns.append([tuple(values[begin:end]) for begin, end in pairwise(ends)])
        else:
            assert column.shape == (B,)
            columns.append(column.tolist())
    assert all(len(column) == B for column in columns)
    return list(zip(*columns, strict=True))


def read(schema: Schema, text: bytes, read_line: Any) -> list[Example | Broken]:
    """What read_line(schema, line) makes of each line."""
    actual: list[Example | Broken] = []
    for number, line in lines_of(text):
        try:
            actual.append(read_line(schema, line))
        except Wrong as wrong:
            actual.append(Broken(number, wrong.field))
    return actual


def damaged(line: bytes, random: Random) -> bytes:
    """Change, remove, double or insert a few bytes; the result may still be right."""
    at = random.randrange(len(line) + 1)
    byte = bytes([random.choice([*b'\0\t\r "+-,.|:#059Aex\xff', random.randrange(256)])])
    return random.choice(
        [
            line[:at] + byte + line[at + 1 :],
            line[:at] + byte + line[at:],
            line[:at] + line[at + random.randrange(1, 4) :],
            line[:at],
            line[:at] + line[at : at + 20] + line[at:],
            line[:at] + b"9" * random.randrange(1, 30) + line[at:],
        ]
    ).replace(b"\n", b"")


def random_float(random: Random, *, negative: bool = True) -> float:
    """A float32 of any size."""
    number = random.choice(
        [0.0, 1.0, random.random(), random.expovariate(1) * 10.0 ** random.randint(-44, 38)]
    )
    number = float(np.float32(min(number, 3e38)))
    return -number if negative and random.random() < 0.3 else number


def random_key(random: Random) -> int:
    return signed(
        random.choice([0, 1, 2**63, 2**64 - 1, random.getrandbits(random.randint(1, 64))])
    )


def print_float(number: float, random: Random) -> str:
    """One of the ways to write exactly this float32."""
    short = str(np.float32(number))
    return random.choice(
        [short, repr(number), f"{number:.9g}", f"{number:.17e}", f"{number:+.60E}"]
    )


def print_key(key: int, random: Random) -> str:
    return random.choice([str(key), str(key % 2**64), "0" * random.randrange(3) + str(key % 2**64)])
