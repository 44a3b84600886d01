"""Sizes in bytes as people write them: "2GiB"."""

from __future__ import annotations

import math
import re

from trireme.errors import BadRequest

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_number(text: str) -> float:
    """A number of at least 0, with KiB, MiB, GiB or TiB behind it or not; NaN for another text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?((?:[KMGT]iB)?)", text)
    return float(match[1]) * _UNITS[match[2]] if match else math.nan


def parse_bytes(what: str, size: str | int) -> int:
    """Bytes > 0 of a text such as "2GiB", or of a number. Raises BadRequest, naming `what`."""
    number = parse_number(str(size).strip())
    if not (number >= 1 and number == math.floor(number)):
        raise BadRequest(f"{what}: expected a number of bytes such as 2GiB, found {size!r}")
    return int(number)
