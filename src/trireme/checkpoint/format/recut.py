"""Blocks made of what was saved, however that was cut.

A parameter's elements are one sequence. Blocks that were saved with another size are sliced and put
together; pieces that had seen unlike pushes stay apart (`BlockStore.restore`), so that each push is
applied to each element once whatever the cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from trireme.errors import SchemaMismatch
from trireme.protocol.block_spec import BlockSpec
from trireme.server.block_slice import BlockSlice


class Recut:
    """wanted: the blocks to be made. saved: those that there are.

    Attributes:
        sources: ids of saved blocks that are needed.

    Raises:
        SchemaMismatch: elements of a wanted block were not saved, or an optimizer that looks at
            whole parameters wants one that was cut or has another shape.
    """

    def __init__(self, wanted: Iterable[BlockSpec], saved: Iterable[BlockSpec], where: str) -> None:
        of_param: dict[str, list[BlockSpec]] = defaultdict(list)
        for spec in saved:
            of_param[spec.param].append(spec)
        for specs in of_param.values():
            specs.sort(key=lambda spec: spec.start)
        self._targets: dict[str, list[BlockSpec]] = defaultdict(list)
        self._missing: dict[str, int] = {}
        self._found: dict[str, list[BlockSlice]] = defaultdict(list)
        for spec in wanted:
            sources = _sources(spec, of_param[spec.param], where)
            self._missing[spec.id] = len(sources)
            for source in sources:
                self._targets[source.id].append(spec)
        self.sources = frozenset(self._targets)

    def add(
        self, saved: BlockSpec, tensors: Mapping[str, Tensor], marks: Mapping[int, int]
    ) -> Iterator[tuple[BlockSpec, list[BlockSlice]]]:
        """Take what was saved of a block; returns the blocks that are complete with it, their parts
        in order.
        """
        part = BlockSlice(saved.start, tensors, marks)
        for spec in self._targets[saved.id]:
            start, end = max(spec.start, saved.start), min(spec.end, saved.end)
            self._found[spec.id].append(part.sliced(start, end))
            self._missing[spec.id] -= 1
            if self._missing[spec.id] == 0:
                yield spec, sorted(self._found.pop(spec.id), key=lambda part: part.start)


def _sources(spec: BlockSpec, saved: Sequence[BlockSpec], where: str) -> list[BlockSpec]:
    """The saved blocks that have elements of one."""
    at = max(bisect_right(saved, spec.start, key=lambda other: other.start) - 1, 0)
    sources = []
    reached = spec.start
    for other in saved[at:]:
        if reached >= spec.end:
            break
        if other.start > reached or other.end <= reached:
            break
        sources.append(other)
        reached = other.end
    if reached < spec.end:
        raise SchemaMismatch(
            f"{where}: expected elements {spec.start} to {spec.end} of parameter {spec.param},"
            f" found {f'none from {reached} on' if saved else 'none of it'}"
        )
    if spec.shape != sources[0].shape or (spec.shape and sources[0].size != spec.size):
        raise SchemaMismatch(
            f"{where}: expected parameter {spec.param} whole, of shape {list(spec.shape)}, found"
            f" {sources[0].size} elements of shape {list(sources[0].shape)}"
        )
    return sources
