"""The limits of a server: what it keeps (`CapacityLimits`) and its messages (`rpc.Limits`).

Both are written as one text, `--limits` or TRIREME_LIMITS: "tables_max=8,table_bytes_max=64GiB".
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trireme.byte_size import parse_number
from trireme.errors import BadRequest, ResourceExhausted
from trireme.protocol.block_spec import BlockSpec
from trireme.rpc import Limits

if TYPE_CHECKING:
    from trireme.server.block_store import BlockStore  # which loads torch

MARKS_BYTES = 1 << 10
"""Of the marks of one stream in one table, where buckets have the same ones."""


class HasBytes(Protocol):
    """A table, or rows of an import."""

    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityLimits:
    """Limits of what a server keeps. None: the memory of the machine."""

    tables_max: int = 4096
    """Tables."""
    table_bytes_max: int | None = None
    """Bytes of the rows of all tables, with their index and marks. A push or import is refused when
    there are more already, so each connection can exceed the limit by one message."""
    sketch_bytes_max: int = 1 << 30
    """Bytes of the sketch by which a table counts keys that have no row yet (CountFilter)."""
    blocks_max: int = 1 << 20
    """Dense blocks."""
    block_bytes_max: int | None = None
    """Bytes of the weights of all dense blocks, without the optimizers' state."""
    held_bytes_max: int | None = None
    """Bytes that peers make the server hold beyond rows, blocks and requests (`rpc.HeldBytes`)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise BadRequest(f"limits: {field.name} must be positive, found {value}")

    def check_new_table(self, num_tables: int, admission: Mapping[str, Any] | None) -> None:
        """Raises ResourceExhausted if one more table, with this admission, exceeds a limit."""
        _check("tables_max", num_tables + 1, self.tables_max)
        sketch_bytes = (admission or {}).get("sketch_bytes") or 0
        _check("sketch_bytes_max", sketch_bytes, self.sketch_bytes_max)

    def check_rows(self, rows: Iterable[HasBytes], num_marks: int = 0) -> None:
        """Raises ResourceExhausted if all rows together exceed the limit. num_marks: streams that
        tables have no marks of yet, summed over tables.
        """
        if self.table_bytes_max is not None:
            num_bytes = sum(table.bytes for table in rows) + num_marks * MARKS_BYTES
            _check("table_bytes_max", num_bytes, self.table_bytes_max)

    def check_blocks(self, blocks: BlockStore, specs: Iterable[BlockSpec]) -> None:
        """Raises ResourceExhausted if the new ones among these blocks exceed a limit."""
        new = [spec.size for spec in specs if spec.id not in blocks]
        _check("blocks_max", len(blocks) + len(new), self.blocks_max)
        if self.block_bytes_max is not None:
            num_bytes = blocks.num_bytes + 4 * sum(new)
            _check("block_bytes_max", num_bytes, self.block_bytes_max)


class ServerLimits(NamedTuple):
    """All limits of a server."""

    capacity: CapacityLimits = CapacityLimits()
    messages: Limits = Limits()


def parse_limits(text: str) -> ServerLimits:
    """Parse "NAME=VALUE,NAME=VALUE"; other limits have their defaults. Values are whole numbers,
    with KiB, MiB, GiB or TiB for bytes, or seconds.

    Raises:
        BadRequest: an unknown name, a name that occurs twice, or an invalid value.
    """
    known = {field.name: kind for kind in (CapacityLimits, Limits) for field in fields(kind)}
    values: dict[type, dict[str, Any]] = {CapacityLimits: {}, Limits: {}}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, _, value = (part.strip() for part in entry.partition("="))
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise BadRequest(f"limits: expected NAME=VALUE,..., found {entry!r}{hint}")
        group = values[known[name]]
        if name in group:
            raise BadRequest(f"limits: expected {name} once, found it twice in {text!r}")
        group[name] = _number(name, value)
    return ServerLimits(CapacityLimits(**values[CapacityLimits]), Limits(**values[Limits]))


def _number(name: str, text: str) -> float:
    number = parse_number(text)
    is_whole = not math.isnan(number) and number == math.floor(number)
    if math.isnan(number) or not (is_whole or name.endswith("_s")):
        raise BadRequest(f"limits: expected {name} as a number, such as 64 or 2GiB, found {text!r}")
    return int(number) if is_whole else number


def _check(name: str, number: int, limit: int) -> None:
    if number > limit:
        raise ResourceExhausted(
            f"server: {name} is {limit}, found {number}; --limits or TRIREME_LIMITS of the server"
            " says how much it holds"
        )
