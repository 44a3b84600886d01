"""A tree.pb as PaddleRec's tree_index_builder.py writes it."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path


def _varint(value: int) -> bytes:
    digits = b""
    while value > 127:
        digits, value = digits + bytes([value & 127 | 128]), value >> 7
    return digits + bytes([value])


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def write_tree(path: Path, leaves: Iterable[tuple[int, int]], *, branch: int = 2) -> Path:
    """leaves: (code, id) of each, of one level."""
    nodes = {code: (number, 1) for code, number in leaves}
    height, above = 1, set(nodes)
    while above != {0}:
        above = {(code - 1) // branch for code in above if code}
        nodes |= {code: (code, 0) for code in above}
        height += 1
    messages = [
        (str(code), _field(1, number) + _field(2, is_leaf) + b"\x1d" + struct.pack("<f", 1))
        for code, (number, is_leaf) in nodes.items()
    ]
    messages.append((".tree_meta", _field(1, height) + _field(2, branch)))
    pairs = [_field(1, key.encode()) + _field(2, value) for key, value in messages]
    path.write_bytes(b"".join(struct.pack("<i", len(pair)) + pair for pair in pairs))
    return path
