"""The tree over items of TDM, as PaddleRec's tree_index_builder.py writes it.

A node's code is its place in a whole tree, read row by row: the root is 0, the children of c are
b c + 1 to b c + b. All leaves have one level.

Shapes: V nodes, N leaves, L levels from the first one that is asked for.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.errors import DataError

_META = b".tree_meta"
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TreeIndex:
    """layers: of each level the codes of its nodes, ascending. leaf_ids: (N,) ids of the leaves, in
    the order of their codes. branch: b.
    """

    layers: tuple[Ints, ...]
    leaf_ids: Ints
    branch: int

    @classmethod
    def read(cls, path: Path) -> "TreeIndex":
        """The file is a row of 4-byte sizes with messages of that many bytes: (key, value). A value
        is a node (id, whether it is a leaf, ...) of the code that the key has in digits; one is
        (height, branch).

        Raises DataError: no such file, or another one.
        """
        try:
            content = path.read_bytes()
            nodes, branch = _nodes(content)
            leaves = sorted((code, number) for code, (number, is_leaf) in nodes.items() if is_leaf)
            layers = [np.array([code for code, _ in leaves], np.int64)]
            while layers[-1].max() > 0:
                layers.append(np.unique((layers[-1] - 1) // branch))
        except (OSError, ValueError, LookupError, ArithmeticError, struct.error) as error:
            raise DataError(f"TreeIndex: expected a tree in {path}, found none: {error}") from None
        if layers[-1].min() < 0:
            raise DataError(f"TreeIndex: expected leaves of one level in {path}, found others")
        return cls(tuple(layers[::-1]), np.array([n for _, n in leaves], np.int64), branch)

    def places(self, leaf_ids: Ints) -> Ints:
        """Their places among the leaves. Raises DataError: an id that no leaf has."""
        order = np.argsort(self.leaf_ids)
        nearest = np.searchsorted(self.leaf_ids, leaf_ids, sorter=order).clip(max=len(order) - 1)
        places: Ints = order[nearest]
        is_other = self.leaf_ids[places] != leaf_ids
        if is_other.any():
            raise DataError(f"TreeIndex: expected ids of leaves, found {leaf_ids[is_other][0]}")
        return places

    def paths(self, places: Ints, first: int) -> Ints:
        """(n, L): the codes from the level `first` to these leaves."""
        codes = [self.layers[-1][places]]
        while len(codes) < len(self.layers) - first:
            codes.append((codes[-1] - 1) // self.branch)
        return np.stack(codes[::-1], 1)


def _nodes(content: bytes) -> tuple[dict[int, tuple[int, bool]], int]:
    """(id, whether it is a leaf) by code, and the branch."""
    nodes, branch, at = {}, 2, 0
    while at < len(content):
        (size,) = struct.unpack_from("<i", content, at)
        if not 0 < size <= len(content) - at - 4:
            raise ValueError(f"a message of {size} bytes at byte {at} of {len(content)}")
        message = dict(_fields(content[at + 4 : at + 4 + size]))
        value = dict(_fields(message[2]))
        if message[1] == _META:
            branch = int(value[2])
        else:
            nodes[int(message[1])] = (int(value[1]), bool(value[2]))
        at += 4 + size
    if branch < 2:
        raise ValueError(f"nodes with {branch} children")
    return nodes, branch


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and the values of the fields of a protobuf message."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value: Any
            value, at = _varint(message, at)
        elif kind == 2:
            size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        elif kind == 5:
            value, at = message[at : at + 4], at + 4
        else:
            raise ValueError(f"a field of kind {kind}")
        yield tag >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
