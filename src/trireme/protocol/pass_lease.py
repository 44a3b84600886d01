"""The lease of a pass on a device: until it ends, no other call changes rows or dense blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trireme.protocol.wire import need


class PassLease(NamedTuple):
    """Names a pass. incarnation: of the worker's process. number: of the worker's pass."""

    worker: int
    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"pass {self.number} on a device of worker {self.worker}"

    def to_wire(self) -> dict[str, int]:
        return {"worker": self.worker, "incarnation": self.incarnation, "pass": self.number}

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> PassLease:
        """Raises BadRequest."""
        return cls(*(need(body, name, int) for name in ("worker", "incarnation", "pass")))

    @classmethod
    def of_import(cls, body: Mapping[str, Any]) -> PassLease | None:
        """That of the pass which an import ends; None: it ends none."""
        if body.get("lease") is None:
            return None
        return cls.from_wire(need(body, "lease", dict))
