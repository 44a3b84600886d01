"""Checked access to the values of a manifest, which may hold anything."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from trireme.errors import BadRequest, Corruption
from trireme.storage.storage import checked_path

T = TypeVar("T")
_SHOWN_CHARACTERS = 120


class JsonObject:
    """A JSON object and where it is, as "PATH/manifest.json: tables.t", for errors. Every method
    raises Corruption for a value of another kind or range.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise self.wrong("an object", value)
        self.values: Mapping[str, Any] = value

    def wrong(self, expected: str, value: Any, field: str = "") -> Corruption:
        where = f"{self.where}.{field}" if field else self.where
        shown = textwrap.shorten(repr(value), _SHOWN_CHARACTERS)
        return Corruption(f"{where}: expected {expected}, found {shown}")

    def any(self, field: str) -> Any:
        if field not in self.values:
            raise Corruption(f"{self.where}: expected field {field!r}, found none")
        return self.values[field]

    def text(self, field: str, length_max: int = 1024) -> str:
        value = self.any(field)
        if not isinstance(value, str) or len(value) > length_max:
            raise self.wrong(f"a text of at most {length_max} characters", value, field)
        return value

    def hexadecimal(self, field: str) -> str:
        """128 bits."""
        value = self.any(field)
        is_hexadecimal = isinstance(value, str) and not set(value) - set("0123456789abcdef")
        if not is_hexadecimal or len(value) != 32:
            raise self.wrong("32 hexadecimal digits", value, field)
        return str(value)

    def whole(self, field: str, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return self._whole(self.any(field), low, high, field)

    def _whole(self, value: Any, low: int, high: int, field: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(f"a whole number in [{low}, {high}]", value, field)
        return value

    def number(self, field: str, low: float, high: float) -> float:
        """A number in [low, high]."""
        value = self.any(field)
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.wrong(f"a number in [{low:g}, {high:g}]", value, field)
        return float(value)

    def path(self, field: str) -> str:
        try:
            return checked_path(self.any(field))
        except BadRequest as error:
            raise Corruption(f"{self.where}.{field}: {error}") from error

    def optional(self, field: str, read: Callable[[str], T]) -> T | None:
        return None if self.any(field) is None else read(field)

    def object(self, field: str) -> JsonObject:
        return JsonObject(self.any(field), f"{self.where}.{field}")

    def items(self) -> Iterator[tuple[str, JsonObject]]:
        """All fields; each must be an object."""
        for name, value in self.values.items():
            yield name, JsonObject(value, f"{self.where}.{name}")

    def list(self, field: str) -> list[Any]:
        value = self.any(field)
        if not isinstance(value, list):
            raise self.wrong("a list", value, field)
        return value

    def objects(self, field: str) -> Iterator[JsonObject]:
        for number, value in enumerate(self.list(field)):
            yield JsonObject(value, f"{self.where}.{field}[{number}]")

    def wholes(self, field: str, low: int, high: int, length_max: int) -> tuple[int, ...]:
        values = self.list(field)
        if len(values) > length_max:
            raise self.wrong(f"at most {length_max} numbers", values, field)
        return tuple(self._whole(value, low, high, field) for value in values)

    def pairs(self, field: str, high: int) -> dict[int, int]:
        """[[number, number], ...], the first ones distinct."""
        pairs: dict[int, int] = {}
        for pair in self.list(field):
            if not isinstance(pair, list) or len(pair) != 2:
                raise self.wrong("pairs of numbers", pair, field)
            key = self._whole(pair[0], 0, high, field)
            if key in pairs:
                raise self.wrong("distinct first numbers", pair, field)
            pairs[key] = self._whole(pair[1], 0, high, field)
        return pairs
