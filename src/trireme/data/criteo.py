"""Criteo's text format: label, 13 integers and 26 hexadecimal categories, separated by tabs.

The label is 0 or 1. An integer may be empty (0) or negative and fits 64 bits. A category is up to 8
hexadecimal digits or empty (an empty bag); its key is (category number 0..25) << 32 | its value.
A line ends with LF or CR LF. Anything else is broken. The parser is in C++: core/feed/criteo.h.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trireme import _core
from trireme.data.schema import Dense, Field, Label, Schema, Sparse
from trireme.data.text_parser import TextFormat
from trireme.errors import BadRequest, check_choice

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
class CriteoText(TextFormat):
    """Converts Criteo's text to columns.

    transform: "log1p": dense value = scale * log(1 + max(x, 0)); "none": scale * x.
    scale: finite. Both are computed in double precision and rounded once.
    """

    transform: Literal["log1p", "none"] = "log1p"
    scale: float = 1 / 8

    def __post_init__(self) -> None:
        check_choice("criteo", ("log1p", "none"), transform=self.transform)

    def check(self, schema: Schema) -> None:
        """The fields are those of `criteo()`."""
        if schema.fields != _SCHEMA_FIELDS:
            raise BadRequest(
                f"criteo: expected the fields of tr.data.criteo(), found {list(schema.fields)}"
            )

    def core_parser(self, schema: Schema, batch_size: int, skip_broken: bool) -> _core.CriteoParser:
        return _core.CriteoParser(batch_size, self.transform == "log1p", self.scale, skip_broken)

    def field_names(self, schema: Schema) -> Sequence[str]:
        return _FIELDS


def criteo(*, transform: Literal["log1p", "none"] = "log1p", scale: float = 1 / 8) -> Schema:
    """The schema of Criteo's TSV: "label" (B,), "dense" (B, 13), sparse "C1" to "C26".

    Args:
        transform: "log1p": dense value = scale * log(1 + max(x, 0)); "none": scale * x.
        scale: see transform.
    """
    return Schema(_SCHEMA_FIELDS, format=CriteoText(transform=transform, scale=scale))
