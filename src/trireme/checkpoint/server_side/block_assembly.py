"""Blocks made from saved ones, whatever the cut of either.

A parameter's elements are one sequence. Saved blocks of another size are sliced and put together.
Parts that have seen different pushes stay apart (`BlockStore.restore`), so that each push is
applied to each element once.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from trireme.checkpoint.format.manifest import MATCH
from trireme.errors import SchemaMismatch
from trireme.protocol.block_spec import BlockSpec
from trireme.server.block_slice import BlockSlice


class BlockAssembly:
    """Assembles the wanted blocks from saved ones, in whatever order these come.

    sources: ids of the saved blocks that are needed.

    Raises SchemaMismatch: elements of a wanted block were not saved, or its optimizer needs a whole
    parameter that was saved in several blocks or with another shape.
    """

    def __init__(self, wanted: Iterable[BlockSpec], saved: Iterable[BlockSpec], where: str) -> None:
        of_parameter: dict[str, list[BlockSpec]] = defaultdict(list)
        for spec in saved:
            of_parameter[spec.param].append(spec)
        for specs in of_parameter.values():
            specs.sort(key=lambda spec: spec.start)
        self._targets: dict[str, list[BlockSpec]] = defaultdict(list)
        self._num_missing: dict[str, int] = {}
        self._parts: dict[str, list[BlockSlice]] = defaultdict(list)
        for spec in wanted:
            sources = _sources(spec, of_parameter[spec.param], where)
            self._num_missing[spec.id] = len(sources)
            for source in sources:
                self._targets[source.id].append(spec)
        self.sources = frozenset(self._targets)

    def add(
        self, saved: BlockSpec, tensors: Mapping[str, Tensor], marks: Mapping[int, int]
    ) -> Iterator[tuple[BlockSpec, list[BlockSlice]]]:
        """Take a saved block; returns the wanted blocks that it completes, their parts in order."""
        part = BlockSlice(saved.start, tensors, marks)
        for spec in self._targets[saved.id]:
            start, end = max(spec.start, saved.start), min(spec.end, saved.end)
            self._parts[spec.id].append(part.sliced(start, end))
            self._num_missing[spec.id] -= 1
            if self._num_missing[spec.id] == 0:
                yield spec, sorted(self._parts.pop(spec.id), key=lambda part: part.start)


def _sources(spec: BlockSpec, saved: Sequence[BlockSpec], where: str) -> list[BlockSpec]:
    """The saved blocks that have elements of a wanted one; `saved` is in the order of elements."""
    first = max(bisect_right(saved, spec.start, key=lambda other: other.start) - 1, 0)
    sources = []
    reached = spec.start
    for other in map(saved.__getitem__, range(first, len(saved))):
        if reached >= spec.end or not other.start <= reached < other.end:
            break
        sources.append(other)
        reached = other.end
    if reached < spec.end:
        raise SchemaMismatch(
            f"{where}: expected elements {spec.start} to {spec.end} of parameter {spec.param},"
            f" found {f'none from {reached} on' if saved else 'none of it'};"
            f" {MATCH}"
        )
    if spec.shape != sources[0].shape or (spec.shape and sources[0].size != spec.size):
        raise SchemaMismatch(
            f"{where}: expected parameter {spec.param} whole, of shape {list(spec.shape)}, found"
            f" {sources[0].size} elements of shape {list(sources[0].shape)}"
        )
    return sources
