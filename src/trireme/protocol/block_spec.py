"""Blocks of dense parameters: how a parameter is cut, and how a block is named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trireme.errors import BadRequest


@dataclass(frozen=True)
class BlockSpec:
    """Elements [start, start + size) of the flattened parameter `param`, in param group `group`."""

    param: str
    start: int
    size: int
    group: int
    shape: tuple[int, ...] = ()  # of a parameter that is needed whole; empty: flat

    @property
    def id(self) -> str:
        return f"{self.param}@{self.start}"

    @property
    def end(self) -> int:
        return self.start + self.size

    def to_wire(self) -> list[Any]:
        shape = [list(self.shape)] if self.shape else []
        return [self.param, self.start, self.size, self.group, *shape]

    @staticmethod
    def from_wire(values: Sequence[Any]) -> BlockSpec:
        try:
            param, start, size, group, *rest = values
            [shape] = rest or [()]
            spec = BlockSpec(
                str(param), int(start), int(size), int(group), tuple(int(n) for n in shape)
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise BadRequest(
                f"BlockSpec: expected [param, start, size, group] and perhaps a shape, found"
                f" {values!r}"
            ) from error
        if spec.start < 0 or spec.size < 1 or spec.group < 0:
            raise BadRequest(f"BlockSpec: expected start >= 0, size >= 1, group >= 0, found {spec}")
        if spec.shape and (
            spec.start != 0 or min(spec.shape) < 1 or math.prod(spec.shape) != spec.size
        ):
            raise BadRequest(f"BlockSpec: expected a shape of a whole parameter, found {spec}")
        return spec


def cut(param: str, num_elements: int, group: int, block_elements: int | None) -> list[BlockSpec]:
    """The blocks of one parameter, in order; block_elements None: one block."""
    size = max(num_elements, 1) if block_elements is None else block_elements
    return [
        BlockSpec(param, start, min(size, num_elements - start), group)
        for start in range(0, num_elements, size)
    ]
