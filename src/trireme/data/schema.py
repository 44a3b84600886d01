"""What the columns of the data are: names, kinds and widths.

A schema lists fields in the order of the data; a field's name is the column's name in a batch.
`format` says how text becomes these columns; None for data that is in columns already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from trireme.errors import BadRequest

if TYPE_CHECKING:
    from trireme.data.criteo import CriteoText


@dataclass(frozen=True)
class Label:
    """A target: (B,) float32."""

    name: str = "label"


@dataclass(frozen=True)
class Weight:
    """The weight of each example: (B,) float32, finite, not negative."""

    name: str = "weight"


@dataclass(frozen=True)
class Show:
    """How often each example was shown. Nothing uses it yet: a Schema refuses it."""

    name: str = "show"


@dataclass(frozen=True)
class InsId:
    """The name of each example, for dumps. Nothing uses it yet: a Schema refuses it."""

    name: str = "ins_id"


@dataclass(frozen=True)
class Dense:
    """Numbers: (B, dim) float32."""

    name: str
    dim: int = 1


@dataclass(frozen=True)
class Sparse:
    """A feature of 64-bit keys: a bag of any size in each example."""

    name: str


Field: TypeAlias = Label | Weight | Show | InsId | Dense | Sparse
_FIELD_TYPES = (Label, Weight, Show, InsId, Dense, Sparse)


class Schema:
    """Fields in order, names distinct; immutable.

    Raises:
        BadRequest: no field, something that is not a field, a name given twice or empty, a dim
            below 1, or a kind of field that nothing uses yet.
    """

    def __init__(self, fields: Iterable[Field], *, format: CriteoText | None = None) -> None:
        self.fields = tuple(fields)
        self.format = format
        if not self.fields:
            raise BadRequest("Schema: expected at least one field, found none")
        for field in self.fields:
            _check(field)
        if len(set(self.names)) < len(self.names):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise BadRequest(f"Schema: expected distinct names, found twice: {', '.join(twice)}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @property
    def sparse(self) -> tuple[str, ...]:
        """Names of the sparse features, in order."""
        return tuple(field.name for field in self.fields if isinstance(field, Sparse))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schema):
            return NotImplemented
        return (self.fields, self.format) == (other.fields, other.format)

    def __hash__(self) -> int:
        return hash((self.fields, self.format))

    def __repr__(self) -> str:
        return f"Schema([{', '.join(map(repr, self.fields))}], format={self.format})"


def _check(field: object) -> None:
    if not isinstance(field, _FIELD_TYPES):
        names = ", ".join(cls.__name__ for cls in _FIELD_TYPES)
        raise BadRequest(f"Schema: expected fields of the kinds {names}, found {field!r}")
    if isinstance(field, (Show, InsId)):
        raise BadRequest(
            f"Schema: {type(field).__name__}({field.name!r}) is not supported yet; "
            "expected Label, Weight, Dense and Sparse fields"
        )
    if not isinstance(field.name, str) or not field.name:
        raise BadRequest(f"Schema: expected a name that is not empty, found {field!r}")
    if isinstance(field, Dense) and field.dim < 1:
        raise BadRequest(f"Schema: Dense({field.name!r}): expected dim >= 1, found {field.dim}")
