"""What the coordinator knows of one worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Worker:
    """`tokens`: of its last incarnations, by which a repeated join is known. `call`: the number of
    its last call: it makes one after the other, so one with a lower number comes late by the
    network. `first`: its first incarnation in this run of the script. `passes`, `note`: the number
    of the last pass that it has begun, and what it has noted there for a successor. `has_ended`: it
    has come to the end of the script.
    """

    incarnation: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    call: int = 0
    first: int = 1
    passes: int = 0
    note: list[int] = field(default_factory=list)
    has_ended: bool = False

    def way(self, token: str) -> dict[str, Any]:
        """How far predecessors of a process have come in the script, see Script."""
        return {
            "entered": self.passes,
            "is_successor": self.tokens[token] > self.first,
            "has_ended": self.has_ended,
        }
