"""What peers may make a server hold: tables, rows and blocks here, messages in `rpc.Limits`.

Both are written as one text, `--limits` or TRIREME_LIMITS: "tables_max=8,table_bytes_max=64GiB".
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

from trireme.errors import BadRequest, ResourceExhausted
from trireme.rpc import Limits

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Rows(Protocol):
    """Rows in memory, as the core has them."""

    @property
    def bytes(self) -> int: ...


class Sized(Protocol):
    """A dense block to be made."""

    @property
    def id(self) -> str: ...

    @property
    def size(self) -> int: ...


class Blocks(Protocol):
    """Dense blocks in memory."""

    def __contains__(self, block_id: str) -> bool: ...

    def __len__(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityLimits:
    """Bounds of what a server keeps. None: the machine's memory is the bound."""

    tables_max: int = 4096
    """Tables."""
    table_bytes_max: int | None = None
    """Bytes of the rows of all tables, with their index and marks. A push or import that finds as
    many is refused; so there can be more by one message of each connection."""
    sketch_bytes_max: int = 1 << 30
    """Bytes of the sketch by which a table counts keys that have no row yet (CountFilter)."""
    blocks_max: int = 1 << 20
    """Dense blocks."""
    block_bytes_max: int | None = None
    """Bytes of the weights of all dense blocks; optimizers keep up to four times as much beside."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise BadRequest(f"limits: {field.name} must be positive, found {value}")

    def check_new_table(self, num_tables: int, admission: Mapping[str, Any] | None) -> None:
        """Raises ResourceExhausted if one more table with this admission is too much."""
        _check("tables_max", num_tables + 1, self.tables_max)
        sketch_bytes = (admission or {}).get("sketch_bytes") or 0
        _check("sketch_bytes_max", sketch_bytes, self.sketch_bytes_max)

    def check_rows(self, rows: Iterable[Rows]) -> None:
        """Raises ResourceExhausted if these rows leave no room for others."""
        if self.table_bytes_max is not None:
            _check("table_bytes_max", sum(of.bytes for of in rows), self.table_bytes_max)

    def check_blocks(self, blocks: Blocks, specs: Iterable[Sized]) -> None:
        """Raises ResourceExhausted if these blocks, as far as they are new, are too much."""
        new = [spec.size for spec in specs if spec.id not in blocks]
        _check("blocks_max", len(blocks) + len(new), self.blocks_max)
        if self.block_bytes_max is not None:
            num_bytes = blocks.num_bytes + 4 * sum(new)
            _check("block_bytes_max", num_bytes, self.block_bytes_max)


class ServerLimits(NamedTuple):
    """All bounds of a server."""

    capacity: CapacityLimits = CapacityLimits()
    messages: Limits = Limits()


def parse_limits(text: str) -> ServerLimits:
    """The limits that "NAME=VALUE,NAME=VALUE" says, the others by default. Values are whole
    numbers, with KiB, MiB, GiB or TiB for bytes, or seconds.

    Raises:
        BadRequest: an unknown name, one that comes twice, or a value that cannot be.
    """
    known = {field.name: kind for kind in (CapacityLimits, Limits) for field in fields(kind)}
    values: dict[type, dict[str, Any]] = {CapacityLimits: {}, Limits: {}}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, _, value = (part.strip() for part in entry.partition("="))
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise BadRequest(f"limits: expected NAME=VALUE,..., found {entry!r}{hint}")
        of = values[known[name]]
        if name in of:
            raise BadRequest(f"limits: expected {name} once, found it twice in {text!r}")
        of[name] = _number(name, value)
    return ServerLimits(CapacityLimits(**values[CapacityLimits]), Limits(**values[Limits]))


def _number(name: str, text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?((?:[KMGT]iB)?)", text)
    number = float(match[1]) * _UNITS[match[2]] if match else math.nan
    is_whole = number == math.floor(number) if match else False
    if not match or not (is_whole or name.endswith("_s")):
        raise BadRequest(f"limits: expected {name} as a number, such as 64 or 2GiB, found {text!r}")
    return int(number) if is_whole else number


def _check(name: str, found: int, most: int) -> None:
    if found > most:
        raise ResourceExhausted(
            f"server: {name} is {most}, found {found}; --limits or TRIREME_LIMITS of the server"
            " says how much it holds"
        )
