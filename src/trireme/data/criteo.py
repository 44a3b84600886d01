"""Criteo's text format: label, 13 integers and 26 hexadecimal categories, separated by tabs.

The label is 0 or 1. An integer may be empty (0) or negative and fits 64 bits. A category is up to 8
hexadecimal digits or empty (an empty bag); its key is (category number 0..25) << 32 | its value.
A line ends with LF or CR LF. Anything else is broken. The parser is in C++: core/feed/criteo.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from trireme import _core
from trireme.data.batch import Bags, Batch
from trireme.data.schema import Dense, Field, Label, Schema, Sparse
from trireme.errors import BadRequest

NUM_DENSE = 13
NUM_SPARSE = 26
_FIELDS = (
    "label",
    *(f"I{i}" for i in range(1, NUM_DENSE + 1)),
    *(f"C{i}" for i in range(1, NUM_SPARSE + 1)),
)
_SCHEMA_FIELDS: tuple[Field, ...] = (
    Label("label"),
    Dense("dense", NUM_DENSE),
    *(Sparse(f"C{i}") for i in range(1, NUM_SPARSE + 1)),
)


@dataclass(frozen=True, kw_only=True)
class CriteoText:
    """How Criteo's text becomes columns.

    transform: "log1p": dense value = scale * log(1 + max(x, 0)); "none": scale * x.
    scale: finite. Both are computed in double precision and rounded once.
    """

    transform: Literal["log1p", "none"] = "log1p"
    scale: float = 1 / 8

    def __post_init__(self) -> None:
        if self.transform not in ("log1p", "none"):
            raise BadRequest(
                f"criteo: expected transform 'log1p' or 'none', found {self.transform!r}"
            )

    def check(self, schema: Schema) -> None:
        """Only the fields that `criteo()` lists."""
        if schema.fields != _SCHEMA_FIELDS:
            raise BadRequest(
                f"criteo: expected the fields of tr.data.criteo(), found {list(schema.fields)}"
            )

    def open(
        self, schema: Schema, *, batch_size: int, threads: int, skip_broken: bool
    ) -> CriteoParser:
        return CriteoParser(schema, self, batch_size, threads, skip_broken)


def criteo(*, transform: Literal["log1p", "none"] = "log1p", scale: float = 1 / 8) -> Schema:
    """The schema of Criteo's TSV: "label" (B,), "dense" (B, 13), sparse "C1" to "C26".

    Args:
        transform: "log1p": dense value = scale * log(1 + max(x, 0)); "none": scale * x.
        scale: see transform.
    """
    return Schema(_SCHEMA_FIELDS, format=CriteoText(transform=transform, scale=scale))


class CriteoParser:
    """Fills batches from pieces of text; one thread at a time. See _core.CriteoParser."""

    def __init__(
        self, schema: Schema, text: CriteoText, batch_size: int, threads: int, skip_broken: bool
    ) -> None:
        self.skips_broken = skip_broken
        self._schema = schema
        self._pool = _core.Pool(threads)
        self._core = _core.CriteoParser(
            batch_size, text.transform == "log1p", text.scale, skip_broken
        )

    def start_file(self, head: NDArray[np.uint8]) -> int:
        """Criteo's files have no header."""
        return 0

    def parse(self, text: NDArray[np.uint8], limit: int, is_end: bool) -> int:
        """Parse whole lines that begin before `limit`; returns the bytes done with."""
        return self._core.parse(text, limit, is_end, self._pool)

    @property
    def num_examples(self) -> int:
        """Examples in the batch so far."""
        return self._core.num_examples

    @property
    def is_full(self) -> bool:
        return self._core.is_full

    @property
    def broken_line(self) -> tuple[int, str] | None:
        """The first broken line of the latest parse(): where it begins, and what is wrong."""
        broken = self._core.broken_line
        if broken is None:
            return None
        offset, field, expected, found = broken
        where = "" if field < 0 else f"field {field + 1} ({_FIELDS[field]}): "
        return offset, f"{where}expected {expected}, found {found}"

    @property
    def num_broken_lines(self) -> int:
        return self._core.num_broken_lines

    def take(self) -> Batch:
        """The examples parsed since the last take(), as a batch."""
        labels, dense, values, offsets = map(torch.from_numpy, self._core.take())
        return Batch(
            columns={"label": labels, "dense": dense},
            bags=Bags(self._schema.sparse, values, offsets),
        )
