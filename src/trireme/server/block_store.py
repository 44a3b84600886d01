"""The dense blocks of one server, updated by torch.optim.

Their cut depends on the parameter alone (`trireme.protocol.block_spec`), never on the number of
servers, so every number of servers computes the same bits.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme import _core
from trireme.dense.optimizers import (
    FUSED,
    KNOWN,
    WHOLE,
    GroupValues,
    arguments_of,
    as_group,
    begin_state,
    check_change,
    check_group,
    check_step,
    group_values,
    make,
    shapes_made,
    step_fused,
)
from trireme.errors import BadRequest, NotFinite, SchemaMismatch, UnknownTable
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.routing import Floats
from trireme.server.block_slice import BlockSlice, Tensors, join, merge_alike
from trireme.table import differing_fields

Marks = Mapping[int, int]
"""Stream -> last sequence applied. Never changed: slices that have seen the same pushes share it.
Thousands of slices with the marks of a thousand streams each would take more than the weights.
"""


@dataclass(eq=False)
class _MarkGroup:
    """Slices that share marks: to raise those of all costs as little as to raise those of one.
    newer: marks that were raised since `marks` was made, instead of those there. A push, even an
    empty one, raises one mark of a thousand.
    """

    marks: Marks
    num_slices: int = 0
    newer: dict[int, int] = field(default_factory=dict)

    def last(self, stream: int) -> int:
        """The last sequence of a stream that the slices have seen."""
        return self.newer.get(stream) or self.marks.get(stream, 0)

    def advance(self, ids: Sequence[tuple[int, int]]) -> None:
        for stream, sequence in ids:
            self.newer[stream] = max(self.last(stream), sequence)


@dataclass(eq=False)
class _LiveSlice:
    """Elements of a block from `start` in it, which have seen the same pushes: usually all."""

    start: int
    weights: Tensor
    group: _MarkGroup


@dataclass(frozen=True, eq=False)
class _Order:
    """Blocks in the order of a pull or push: no request should pay for each of them again."""

    block_ids: Sequence[str]
    sizes: list[int]
    size: int
    weights: list[Floats]  # of each block, flat; the memory of its tensor


class BlockStore:
    """The blocks that one server owns, and their optimizer. Not thread-safe."""

    def __init__(self) -> None:
        self.class_name: str | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._specs: dict[str, BlockSpec] = {}
        self._weights: dict[str, Tensor] = {}
        self._slices: dict[str, list[_LiveSlice]] = {}
        self._groups: dict[int, _MarkGroup] = {}  # by the identity of their marks
        self._is_stale = False  # whether the optimizer lacks some of the slices
        self._tried: list[GroupValues] | None = None  # the last values that were tried on the state
        self._last_values = ("", list[GroupValues]())  # of a push: as text, and as groups
        self._checked: list[GroupValues] | None = None  # the last groups that were checked
        self._order = _Order((), [], 0, [])  # of the last request

    def __contains__(self, block_id: str) -> bool:
        return block_id in self._weights

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def num_bytes(self) -> int:
        return sum(4 * weights.numel() for weights in self._weights.values())

    def specs(self) -> list[BlockSpec]:
        return list(self._specs.values())

    # ---- creation ----

    def create(
        self,
        class_name: str,
        groups: Sequence[GroupValues],
        specs: Sequence[BlockSpec],
        values: Floats,
        marks: Mapping[int, int],
    ) -> None:
        """Make the blocks that do not exist yet. Raises what `check` raises.

        values: (sum of sizes,) float32, the initial weights in the order of `specs`.
        marks: the pushes applied before these blocks existed.
        """
        self.check(class_name, groups, specs, values)
        start, shared = 0, dict(marks)
        for spec in specs:
            if spec.id not in self._specs:
                self._specs[spec.id] = spec
                # No call here lets go of the interpreter: with thousands of blocks each would wait
                # for its turn again, on a busy machine for long.
                weights = values[start : start + spec.size].reshape(spec.shape or -1).copy()
                self._weights[spec.id] = torch.from_numpy(weights)
                live = _LiveSlice(0, self._weights[spec.id], self._joined_group(shared))
                self._slices[spec.id] = [live]
            start += spec.size
        self._rebuild(class_name, groups)

    def check(
        self,
        class_name: str,
        groups: Sequence[GroupValues],
        specs: Sequence[BlockSpec],
        values: Floats,
    ) -> None:
        """Raise SchemaMismatch if a block exists with another size or group, or the optimizer class
        differs; BadRequest for an unknown optimizer, group or value.
        """
        expected = sum(spec.size for spec in specs)
        if expected != len(values):
            raise BadRequest(f"BlockStore.create: expected {expected} values, found {len(values)}")
        for spec in specs:
            if spec.group >= len(groups):
                raise BadRequest(f"blocks: expected a group below {len(groups)}, found {spec}")
            existing = self._specs.get(spec.id)
            if existing not in (None, spec):
                assert existing is not None
                raise SchemaMismatch(
                    f"block {spec.id} exists with another size or group:"
                    f" {differing_fields(asdict(existing), asdict(spec))}"
                )
            if class_name in WHOLE and not spec.shape:
                raise BadRequest(f"blocks: {class_name} needs whole parameters, found {spec}")
            if class_name == "Muon" and len(spec.shape) != 2:
                raise BadRequest(f"blocks: Muon needs matrices, found {spec}")
        self._check_optimizer(class_name, groups)

    def declaration(self) -> list[Any] | None:
        """[optimizer's class, values of its groups, specs] for `create`; None without blocks."""
        if self._optimizer is None:
            return None
        names = self._optimizer.defaults
        groups = [group_values(group, names) for group in self._optimizer.param_groups]
        return [self.class_name, groups, [spec.to_wire() for spec in self._specs.values()]]

    def _check_optimizer(self, class_name: str, groups: Sequence[GroupValues]) -> None:
        if self._optimizer is not None:
            num_groups = len(self._optimizer.param_groups)
            if (self.class_name, num_groups) != (class_name, len(groups)):
                raise SchemaMismatch(
                    f"blocks: they exist with {self.class_name} and {num_groups} groups,"
                    f" found {class_name} and {len(groups)}"
                )
        if not groups:
            raise BadRequest("blocks: expected at least one param group, found none")
        if class_name not in KNOWN:
            raise BadRequest(
                f"blocks: expected an optimizer of {', '.join(KNOWN)}, found {class_name!r}"
            )
        for group in groups:
            check_group(KNOWN[class_name], as_group(group))

    def _rebuild(self, class_name: str, groups: Sequence[GroupValues]) -> None:
        """Make an optimizer over all blocks with the state of the old one."""
        kernel = {"fused": True} if class_name in FUSED else {}
        values: list[dict[str, Any]] = [{"params": [], **as_group(group)} for group in groups]
        for block_id, spec in self._specs.items():
            values[spec.group]["params"] += [live.weights for live in self._slices[block_id]]
        cls = KNOWN[class_name]
        # Adagrad starts its state from the argument, not from the group.
        optimizer = make(cls, values, **arguments_of(cls, as_group(groups[0])), **kernel)
        if self._optimizer is not None:
            optimizer.state.update(self._optimizer.state)
        self.class_name, self._optimizer, self._is_stale = class_name, optimizer, False
        self._tried = self._checked = None

    # ---- pull and push ----

    def read(self, block_ids: Sequence[str]) -> Floats:
        """A copy of the weights of these blocks, one after the other."""
        return np.concatenate(self._order_of(block_ids).weights or [np.empty(0, np.float32)])

    def size_of(self, block_ids: Sequence[str]) -> int:
        return self._order_of(block_ids).size

    def _order_of(self, block_ids: Sequence[str]) -> _Order:
        """Raises UnknownTable: there is no such block."""
        order = self._order
        if order.block_ids is not block_ids:  # a map has one list of blocks per server
            if unknown := [block_id for block_id in block_ids if block_id not in self]:
                raise UnknownTable(f"blocks: no block {unknown[0]!r} on this server")
            sizes = [self._specs[block_id].size for block_id in block_ids]
            weights = [self._weights[block_id].numpy().reshape(-1) for block_id in block_ids]
            self._order = order = _Order(block_ids, sizes, sum(sizes), weights)
        return order

    def apply(
        self,
        groups: Sequence[GroupValues],
        block_ids: Sequence[str],
        gradients: Floats,
        ids: Sequence[tuple[int, int]],
        absent: Collection[str] = (),
    ) -> int:
        """Take one optimizer step on the blocks that have seen none of these pushes; returns the
        number of slices updated. The caller has checked sizes with `size_of`.

        gradients: (sum of sizes,) float32 in the order of `block_ids`; they are only read.
        ids: (stream, sequence) of the pushes, which are applied together.
        absent: parameters without a gradient: the optimizer skips them, as torch does.
        """
        updated = []
        unseen = list(self._unseen(block_ids, gradients, ids))
        for block_id, live, gradient in unseen:
            if self._specs[block_id].param not in absent:
                live.weights.grad = gradient
                updated.append(live.weights)
        try:
            if updated:
                self._step(groups)
        finally:  # a gradient that stayed would be applied with the next push
            for weights in updated:
                weights.grad = None
        self._raise_marks([live for _, live, _ in unseen], ids)
        return len(updated)

    def add(
        self, block_ids: Sequence[str], differences: Floats, ids: Sequence[tuple[int, int]]
    ) -> None:
        """Add (sum of sizes,) float32 to the blocks that have seen none of these pushes, without
        the optimizer.
        """
        unseen = list(self._unseen(block_ids, differences, ids))
        for _, live, difference in unseen:
            live.weights += difference
        self._raise_marks([live for _, live, _ in unseen], ids)

    def _unseen(
        self, block_ids: Sequence[str], values: Floats, ids: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[str, _LiveSlice, Tensor]]:
        """(block, slice, its part of `values`) of slices that have seen none of these pushes."""
        unseen = {
            group
            for group in self._groups.values()
            if all(group.last(stream) < sequence for stream, sequence in ids)
        }
        flat = torch.from_numpy(_core.borrow(values))
        parts: Sequence[Tensor] = torch.split_with_sizes(flat, self._order_of(block_ids).sizes)
        for block_id, part in zip(block_ids, parts, strict=True):
            slices = self._slices[block_id]
            for live in slices:
                if live.group not in unseen:
                    continue
                if len(slices) > 1:
                    end = live.start + live.weights.numel()
                    yield block_id, live, part[live.start : end]
                else:
                    is_flat = live.weights.dim() == 1
                    yield block_id, live, part if is_flat else part.view_as(live.weights)

    def check_finite(self, block_ids: Sequence[str], gradients: Floats) -> None:
        """Raises NotFinite: a gradient of these blocks has NaN or infinity; names the parameter."""
        if (first := _core.first_not_finite(gradients)) is None:
            return
        end = 0
        for spec in map(self._specs.__getitem__, block_ids):
            begin, end = end, end + spec.size
            if first < end:
                raise NotFinite(
                    f"push: expected finite gradients, found {gradients[first]} for element"
                    f" {spec.start + first - begin} of parameter {spec.param}; nothing of the push"
                    " is applied here"
                )

    def check_groups(self, groups: Sequence[GroupValues]) -> None:
        """Raises BadRequest if `apply` could not use these values: another number of groups, a name
        that the optimizer does not know, a value of another form than the current one, or one that
        needs state that the blocks do not have.
        """
        wanted = self._groups_of(groups)
        if wanted is self._checked:
            return
        known = [] if self._optimizer is None else self._optimizer.param_groups
        if len(wanted) != len(known):
            raise BadRequest(f"blocks: expected values of {len(known)} groups, found {len(wanted)}")
        for group, values in zip(known, wanted, strict=True):
            for key, value in values.items():
                if key not in group:
                    raise BadRequest(f"blocks: {self.class_name} knows no {key}, found {value!r}")
                check_change(key, group[key], value)
        self._try_groups([_tried_as(values) for values in wanted])
        self._checked = wanted

    def _groups_of(self, groups: Sequence[GroupValues]) -> list[GroupValues]:
        """The values of a push as param groups: the same list while they stay the same, as in most
        pushes. As text, because 1, 1.0 and True are equal.
        """
        if (text := repr(groups)) != self._last_values[0]:
            self._last_values = text, [as_group(values) for values in groups]
        return self._last_values[1]

    def _try_groups(self, groups: list[GroupValues]) -> None:
        """Try these values on each kind of state that slices have, unless they were tried last."""
        if self._optimizer is None or groups == self._tried:
            return
        kinds: dict[Any, tuple[int, dict[str, Any]]] = {}
        for block_id, slices in self._slices.items():
            group = self._specs[block_id].group
            for live in slices:
                state = {"weights": live.weights, **self._optimizer.state.get(live.weights, {})}
                kinds.setdefault((group, *state), (group, state))
        for group, state in kinds.values():
            check_step(self._optimizer, group, groups[group], state)
        self._tried = groups

    def _step(self, groups: Sequence[GroupValues]) -> None:
        """Requires: `check_groups`."""
        if self._is_stale:
            assert self.class_name is not None
            self._rebuild(self.class_name, groups)
        optimizer = self._optimizer
        assert optimizer is not None
        for group, values in zip(optimizer.param_groups, self._groups_of(groups), strict=True):
            group.update(values)
        step_fused(optimizer)

    # ---- marks ----

    def advance(self, ids: Sequence[tuple[int, int]]) -> None:
        """Raise the marks of all blocks."""
        for group in self._groups.values():
            group.advance(ids)

    def newest_mark(self, stream: int) -> int:
        """The last sequence of a stream that any slice has seen."""
        return max((group.last(stream) for group in self._groups.values()), default=0)

    def marks_of(self, block_id: str) -> Marks:
        """The last sequence of each stream that the whole block has seen."""
        marks = [self._whole_marks(live.group) for live in self._slices[block_id]]
        if len(marks) == 1:
            return marks[0]
        return {s: min(m[s] for m in marks) for s in marks[0] if all(s in m for m in marks)}

    def forget_marks(self) -> None:
        """Remove all marks: streams start again at sequence 1."""
        for group in list(self._groups.values()):
            self._set_marks(group, {})

    def _raise_marks(self, slices: Sequence[_LiveSlice], ids: Sequence[tuple[int, int]]) -> None:
        """Raise the marks of these slices; those that shared them share the new ones."""
        members: dict[_MarkGroup, list[_LiveSlice]] = {}
        for live in slices:
            members.setdefault(live.group, []).append(live)
        for group, raised_ones in members.items():
            if len(raised_ones) == group.num_slices:
                group.advance(ids)
                continue
            marks = dict(self._whole_marks(group))
            for live in raised_ones:
                self._leave_group(live)
                live.group = self._joined_group(marks)
            raised_ones[0].group.advance(ids)

    def _whole_marks(self, group: _MarkGroup) -> Marks:
        """All its marks, which others may keep."""
        if group.newer:
            self._set_marks(group, {**group.marks, **group.newer})
        return group.marks

    def _set_marks(self, group: _MarkGroup, marks: Marks) -> None:
        del self._groups[id(group.marks)]
        group.marks, group.newer = marks, {}
        self._groups[id(marks)] = group

    def _joined_group(self, marks: Marks) -> _MarkGroup:
        """The group of these very marks, with one slice more."""
        if id(marks) in self._groups:
            self._whole_marks(self._groups[id(marks)])  # which may have been raised
        group = self._groups.setdefault(id(marks), _MarkGroup(marks))
        group.num_slices += 1
        return group

    def _leave_group(self, live: _LiveSlice) -> None:
        live.group.num_slices -= 1
        if not live.group.num_slices:
            del self._groups[id(live.group.marks)]

    # ---- saves and loads ----

    def slices_of(self, block_id: str) -> list[BlockSlice]:
        """Copies of weights, optimizer state and marks of a block's slices."""
        assert self._optimizer is not None
        start, slices = self._specs[block_id].start, []
        for live in self._slices[block_id]:
            state = {"weights": live.weights, **self._optimizer.state.get(live.weights, {})}
            tensors = {
                name: value.clone() if isinstance(value, Tensor) else torch.tensor(value)
                for name, value in state.items()
            }
            marks = self._whole_marks(live.group)
            slices.append(BlockSlice(start + live.start, tensors, marks))
        return slices

    def state_of(self, block_id: str) -> dict[str, Tensor]:
        """Copies of weights and optimizer state of a block as named tensors. If slices differ in a
        single number, it is the first one's.
        """
        return dict(join(self.slices_of(block_id)).tensors)

    def state_with(self, block_id: str, replaced: Tensors) -> dict[str, Tensor]:
        """The state of a block with some tensors replaced by flat ones of the same name. Raises
        SchemaMismatch: the optimizer could not continue, because the tensors are not all that it
        has now or makes in a step, or have other sizes.
        """
        kept, spec, optimizer = self.state_of(block_id), self._specs[block_id], self._optimizer
        assert optimizer is not None
        made = shapes_made(optimizer, spec.group, kept["weights"].shape)
        shapes = made | {name: tensor.shape for name, tensor in kept.items()}
        sizes = {name: tensor.numel() for name, tensor in replaced.items()}
        names = kept.keys() | replaced.keys()
        fits = all(name in shapes and shapes[name].numel() == sizes[name] for name in sizes)
        if not fits or (names != kept.keys() and names != made.keys()):
            expected = {name: shape.numel() for name, shape in made.items()}
            raise SchemaMismatch(
                f"block {block_id}: expected numbers of {expected}, found {sizes}"[:500]
            )
        return kept | {name: tensor.reshape(shapes[name]) for name, tensor in replaced.items()}

    def restore(self, block_id: str, slices: Sequence[BlockSlice]) -> None:
        """Replace weights, optimizer state and marks of a block; the inverse of `slices_of`.

        slices: of its elements in order, cut anywhere. Raises SchemaMismatch: they are of other
        elements, or of an optimizer that needs whole parameters.
        """
        spec, optimizer = self._specs[block_id], self._optimizer
        assert optimizer is not None
        merged = merge_alike(slices)
        sizes = [block_slice.size for block_slice in merged]
        if sum(sizes) != spec.size or (spec.shape and len(merged) > 1):
            raise SchemaMismatch(
                f"block {block_id}: expected {spec.size} elements"
                f"{' in one piece' if spec.shape else ''}, found {sizes}"
            )
        for live in self._slices[block_id]:
            optimizer.state.pop(live.weights, None)
            self._leave_group(live)
        self._tried = self._checked = None
        self._is_stale |= not len(merged) == len(self._slices[block_id]) == 1
        whole, flat = self._weights[block_id], self._weights[block_id].view(-1)
        self._slices[block_id] = []
        for block_slice in merged:
            start = block_slice.start - merged[0].start
            weights = whole if len(merged) == 1 else flat[start : start + block_slice.size]
            weights.copy_(block_slice.tensors["weights"].view_as(weights))
            state = {name: tensor.clone() for name, tensor in block_slice.tensors.items()}
            del state["weights"]
            if state:
                optimizer.state[weights] = state
            else:
                begin_state(optimizer, spec.group, weights)
            group = self._joined_group(block_slice.marks)
            self._slices[block_id].append(_LiveSlice(start, weights, group))


def _tried_as(group: GroupValues) -> GroupValues:
    """The values that are tried for these: a rate up to 1 as 1, for schedules change it in every
    step and a lower one cannot fail where a higher one does not.
    """
    return {**group, "lr": 1.0} if 0 <= group.get("lr", 2.0) <= 1 else group
