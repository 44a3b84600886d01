"""Criteo text for tests: random lines, damage, and a plain reader as the oracle."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from random import Random
from typing import NamedTuple

import numpy as np

from trireme.data import Batch


class Example(NamedTuple):
    label: float
    dense: tuple[float, ...]  # float32 values
    keys: tuple[int | None, ...]


class Broken(NamedTuple):
    line: int
    field: int | None


def read_line(line: bytes, number: int) -> Example | Broken:
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(line) > 4096 or len(fields) != 40:
        return Broken(number, None)
    if fields[0] not in (b"0", b"1"):
        return Broken(number, 1)
    for i in range(1, 14):
        is_integer = re.fullmatch(rb"-?[0-9]{1,19}", fields[i])
        if fields[i] and not (is_integer and -(2**63) <= int(fields[i]) < 2**63):
            return Broken(number, i + 1)
    for i in range(14, 40):
        if not re.fullmatch(rb"[0-9a-fA-F]{0,8}", fields[i]):
            return Broken(number, i + 1)
    return Example(
        float(fields[0]),
        tuple(float(np.float32(math.log1p(max(int(f or b"0"), 0)) / 8)) for f in fields[1:14]),
        tuple((i << 32) | int(f, 16) if f else None for i, f in enumerate(fields[14:])),
    )


def read_text(text: bytes) -> list[Example | Broken]:
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [read_line(line, number) for number, line in enumerate(lines, 1)]


def examples_of(batch: Batch) -> list[Example]:
    """The examples of a batch of criteo(), one by one."""
    assert batch.bags is not None
    B = batch.num_examples
    values, offsets = batch.bags.values.tolist(), batch.bags.offsets.tolist()
    assert len(offsets) == 26 * B + 1
    assert (offsets[0], offsets[-1]) == (0, len(values))
    bags = [values[begin:end] for begin, end in pairwise(offsets)]
    assert all(len(bag) <= 1 for bag in bags)
    keys = [bag[0] if bag else None for bag in bags]
    return [
        Example(label, tuple(dense), tuple(keys[b::B]))
        for b, (label, dense) in enumerate(
            zip(batch["label"].tolist(), batch["dense"].tolist(), strict=True)
        )
    ]


def random_line(random: Random) -> bytes:
    def integer() -> str:
        if random.random() < 0.15:
            return ""
        return str(random.choice([-1, 1, 1, 1]) * (random.getrandbits(random.randrange(1, 40))))

    def category() -> str:
        if random.random() < 0.15:
            return ""
        return random.choice(["%08x", "%08x", "%x", "%X"]) % (random.getrandbits(32))

    fields = [str(random.randrange(2))]
    fields += [integer() for _ in range(13)]
    fields += [category() for _ in range(26)]
    return "\t".join(fields).encode()


def damage(line: bytes, random: Random) -> bytes:
    """Change, remove, double or insert a few bytes; the result may still be right."""
    at = random.randrange(len(line))
    byte = bytes(
        [random.choice([0, 9, 13, 32, 43, 45, 48, 65, 103, 120, 255, random.randrange(256)])]
    )
    return random.choice(
        [
            line[:at] + byte + line[at + 1 :],
            line[:at] + byte + line[at:],
            line[:at] + line[at + random.randrange(1, 4) :],
            line[:at],
            line[:at] + line[at:] + line[at : at + 20],
            line[:at] + b"9" * random.randrange(1, 30) + line[at:],
        ]
    ).replace(b"\n", b"")
