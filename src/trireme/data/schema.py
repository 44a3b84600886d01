"""The columns of the data: names, kinds and widths, and how files are converted to them.

A schema lists fields in the order of the data; a field's name is the column's name in a batch, and
its `kind` is what the core's parsers call such fields.
`format` converts files to these columns; None for columns in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, Protocol, TypeAlias

from trireme.errors import BadRequest, check_counts, check_flags, check_kind


@dataclass(frozen=True)
class Label:
    """A target: (B,) float32."""

    kind: ClassVar[str] = "number"
    name: str = "label"


@dataclass(frozen=True)
class Weight:
    """The weight of each example: (B,) float32, finite, not negative."""

    kind: ClassVar[str] = "amount"
    name: str = "weight"


@dataclass(frozen=True)
class Show:
    """How often each example was shown: (B,) float32, finite, not negative."""

    kind: ClassVar[str] = "amount"
    name: str = "show"


@dataclass(frozen=True)
class InsId:
    """The name of each example, for dumps and messages: B strings."""

    kind: ClassVar[str] = "string"
    name: str = "ins_id"


@dataclass(frozen=True)
class Content:
    """Free text beside each example, for dumps: B strings."""

    kind: ClassVar[str] = "string"
    name: str = "content"


@dataclass(frozen=True)
class Dense:
    """Numbers: (B, dim) float32."""

    kind: ClassVar[str] = "dense"
    name: str
    dim: int = 1


@dataclass(frozen=True)
class Number:
    """Numbers as they are: (B, ...) int64, float32 or bool, which a model reads or looks up as ids.
    Of columns in memory alone.
    """

    kind: ClassVar[str] = "any number"
    name: str


@dataclass(frozen=True)
class Sparse:
    """A feature of 64-bit keys: a bag of any size in each example.

    hashed: the values are strings; a key is the hash of trireme.data.strings.
    """

    name: str
    hashed: bool = False

    @property
    def kind(self) -> str:
        return "hashes" if self.hashed else "keys"


Field: TypeAlias = Label | Weight | Show | InsId | Content | Dense | Number | Sparse
_FIELD_TYPES = (Label, Weight, Show, InsId, Content, Dense, Number, Sparse)


class Format(Protocol):
    """The kind of the files: a frozen value, compared and shown with its schema.

    holds_types: whether files say by themselves which features are strings.
    """

    holds_types: ClassVar[bool]

    def check(self, schema: Schema) -> None:
        """Raises BadRequest: fields that this format cannot hold."""


class Schema:
    """Fields in order, names distinct; immutable.

    Raises:
        BadRequest: no field, something that is not a field, a name given twice or empty, a dim
            below 1, or a field that the format cannot hold.
    """

    def __init__(self, fields: Iterable[Field], *, format: Format | None = None) -> None:
        check_kind("Schema", "fields", fields, Iterable, "a list of fields")
        if format is not None and not hasattr(format, "check"):
            raise BadRequest(f"Schema: expected a format of files, or None, found {format!r}")
        self.fields = tuple(fields)
        self.format = format
        if not self.fields:
            raise BadRequest("Schema: expected at least one field, found none")
        for field in self.fields:
            _check(field)
            if format is not None and isinstance(field, Number):
                raise BadRequest(f"Schema: expected Label or Dense in files, found {field!r}")
        if len(set(self.names)) < len(self.names):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise BadRequest(f"Schema: expected distinct names, found twice: {', '.join(twice)}")
        if format is not None:
            format.check(self)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @cached_property
    def sparse(self) -> tuple[str, ...]:
        """Names of the sparse features, in order."""
        return tuple(field.name for field in self.fields if isinstance(field, Sparse))

    @cached_property
    def not_sparse(self) -> tuple[Field, ...]:
        """The other fields, in order."""
        return tuple(field for field in self.fields if not isinstance(field, Sparse))

    @cached_property
    def hashed(self) -> dict[str, bool]:
        """Sparse feature -> whether its values are strings; absent: the schema does not say."""
        knows = self.format is not None and not self.format.holds_types
        sparse = (field for field in self.fields if isinstance(field, Sparse))
        return {field.name: field.hashed for field in sparse if field.hashed or knows}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schema):
            return NotImplemented
        return (self.fields, self.format) == (other.fields, other.format)

    def __hash__(self) -> int:
        return hash((self.fields, self.format))

    def __str__(self) -> str:
        """On one line, for messages: neighbours that differ in the name alone are counted."""
        groups = itertools.groupby(self.fields, lambda field: repr(replace(field, name="")))
        return f"schema: {', '.join(_group(list(group)) for _, group in groups)}"

    def __repr__(self) -> str:
        return f"Schema([{', '.join(map(repr, self.fields))}], format={self.format})"


def _group(group: list[Field]) -> str:
    if len(group) < 3:
        return ", ".join(map(_short, group))
    return f"{_short(group[0])} to {_short(group[-1])} ({len(group)})"


def _short(field: Field) -> str:
    """The field as code, without default values."""
    options = [
        f"{f.name}={getattr(field, f.name)!r}"
        for f in fields(field)
        if f.name != "name" and getattr(field, f.name) != f.default
    ]
    return f"{type(field).__name__}({', '.join([repr(field.name), *options])})"


def _check(field: object) -> None:
    if not isinstance(field, _FIELD_TYPES):
        names = ", ".join(cls.__name__ for cls in _FIELD_TYPES)
        raise BadRequest(f"Schema: expected fields of the kinds {names}, found {field!r}")
    if not isinstance(field.name, str) or not field.name:
        raise BadRequest(f"Schema: expected a name that is not empty, found {field!r}")
    if isinstance(field, Sparse):
        check_flags(f"Schema: Sparse({field.name!r})", hashed=field.hashed)
    if isinstance(field, Dense):
        check_counts(f"Schema: Dense({field.name!r})", dim=field.dim)
