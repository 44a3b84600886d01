"""libsvm's text read and printed in plain Python."""

from __future__ import annotations

import re
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
from trireme.data import Schema, Sparse, libsvm


def read_line(schema: Schema, line: bytes) -> Example:
    label, feature = schema.fields
    words = [word for word in re.split(rb"[ \t]", line.partition(b"#")[0]) if word]
    if not words:
        raise Wrong(1)
    example = [value_of(label, words[0], 1)]
    pairs = []
    for word in words[1:]:
        index, _, value = word.rpartition(b":")
        if not index:
            raise Wrong(2)
        pairs.append((value_of(feature, index, 2), value_of(label, value, 2)))
    return (*example, tuple(pairs))


def random_schema(random: Random) -> Schema:
    return libsvm(hashed=random.random() < 0.5)


def random_line(schema: Schema, random: Random) -> tuple[bytes, Example]:
    """A line, and the example that it prints."""
    label = random_float(random)
    words = [print_float(label, random).encode()]
    pairs = []
    for _ in range(random.choice([0, 1, 5, 40])):
        word, key = _random_index(schema, random)
        weight = random_float(random)
        words.append(word + b":" + print_float(weight, random).encode())
        pairs.append((key, weight))
    line = random.choice([b" ", b"\t", b"  "]).join(words)
    line = random.choice([b"", b" "]) + line + random.choice([b"", b" ", b" # 1:1", b"#"])
    return line, (label, tuple(pairs))


def _random_index(schema: Schema, random: Random) -> tuple[bytes, Any]:
    feature = schema.fields[1]
    assert isinstance(feature, Sparse)
    if feature.hashed:
        word = bytes(random.choice(b"abc09-:|\x80\xff") for _ in range(random.randint(1, 12)))
        return word, hash_of(feature.name, word)
    key = random_key(random)
    return print_key(key, random).encode(), key
