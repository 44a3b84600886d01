"""How people name a row: a key, or a feature and a value of it."""

from __future__ import annotations

import re

import numpy as np

from trireme.errors import BadRequest
from trireme.nn.ids import keys_of_column

Wanted = int | tuple[str, int | str]

_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,19}")


def wanted_row(text: str) -> Wanted:
    """A key, or FEATURE=VALUE: 50 is a number, '50' a string, and so are 007 and 1_000, which no
    number is written as. Raises BadRequest: neither.
    """
    feature, is_value, value = text.partition("=")
    if feature and is_value:
        if value[:1] == value[-1:] == "'" and len(value) > 2:
            return feature, value[1:-1]
        number = int(value) if _NUMBER.fullmatch(value) else None
        if number is None and value:
            return feature, value
        if number is not None and -(2**63) <= number < 2**64:
            return feature, number
    try:
        key = int(text, 0)
    except ValueError:
        key = 1 << 64
    if not -(2**63) <= key < 2**64:
        raise BadRequest(f"expected a 64-bit number or FEATURE=VALUE, found {text!r}")
    return key % 2**64


def shown_wanted(wanted: Wanted) -> str:
    return f"key {wanted}" if isinstance(wanted, int) else f"{wanted[0]}={wanted[1]}"


def key_of(table: str, wanted: Wanted, salt: bool | None) -> int:
    """The key of a row. salt: of the table. Raises BadRequest: of a value, where nobody knows
    whether features have keys of their own.
    """
    if isinstance(wanted, int):
        return wanted
    if salt is None:
        raise BadRequest(
            f"inspect: expected a key of table {table!r}, found {shown_wanted(wanted)}: nothing"
            " says whether each feature has keys of its own there"
        )
    feature, value = wanted
    values = [value] if isinstance(value, str) else np.array([value % 2**64], np.uint64)
    return int(keys_of_column(feature, values, salted=salt)[0])
