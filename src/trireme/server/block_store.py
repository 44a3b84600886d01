"""Dense parameters: cut into blocks on the worker, updated by torch.optim on the servers.

A block is a slice of one flattened parameter. The cut depends on the parameter alone, never on the
number of servers, so every number of servers computes the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.errors import BadRequest, SchemaMismatch, UnknownTable
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.dense_optimizers import (
    FUSED,
    KNOWN,
    WHOLE,
    GroupValues,
    arguments_of,
    as_group,
    check_change,
    check_group,
    group_values,
    make,
    shapes_made,
)
from trireme.protocol.routing import Floats
from trireme.torch_compiler import step

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Part:
    """What is kept of some elements of a parameter, which have seen the same pushes.

    tensors: "weights" and the optimizer's state, which is one number or has one for each element.
    """

    start: int
    tensors: Tensors
    marks: Mapping[int, int]

    @property
    def size(self) -> int:
        return self.tensors["weights"].numel()

    def sliced(self, start: int, end: int) -> Part:
        """Elements [start, end) of the parameter, which this part has."""
        low, high = start - self.start, end - self.start
        if (low, high) == (0, self.size):
            return self
        tensors = {
            name: tensor if tensor.ndim == 0 else tensor.reshape(-1)[low:high]
            for name, tensor in self.tensors.items()
        }
        return Part(start, tensors, self.marks)


@dataclass(eq=False)
class _Piece:
    """Some elements of a block, from `start` in it. A block is one piece, but after it was made of
    what had seen unlike pushes; element by element that makes no difference.
    """

    start: int
    weights: Tensor
    marks: dict[int, int]


class BlockStore:
    """The blocks that one server owns, with their optimizer. Not thread-safe: the server locks
    around it.
    """

    def __init__(self) -> None:
        self._class_name: str | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._specs: dict[str, BlockSpec] = {}
        self._weights: dict[str, Tensor] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        self._is_stale = False  # whether the optimizer lacks some of the pieces

    def __contains__(self, block_id: str) -> bool:
        return block_id in self._weights

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def num_bytes(self) -> int:
        return sum(4 * weights.numel() for weights in self._weights.values())

    @property
    def class_name(self) -> str | None:
        return self._class_name

    def specs(self) -> list[BlockSpec]:
        return list(self._specs.values())

    def create(
        self,
        class_name: str,
        groups: Sequence[GroupValues],
        specs: Sequence[BlockSpec],
        values: Floats,
        marks: Mapping[int, int],
    ) -> None:
        """Make the blocks that do not exist yet, with these first values.

        values: (sum of sizes,) float32, in the order of specs. marks: what has been applied before
            they existed.

        Raises: as `check`.
        """
        self.check(class_name, groups, specs, values)
        start = 0
        for spec in specs:
            if spec.id not in self._specs:
                self._specs[spec.id] = spec
                weights = torch.tensor(values[start : start + spec.size])
                self._weights[spec.id] = weights.reshape(spec.shape or -1)
                self._pieces[spec.id] = [_Piece(0, self._weights[spec.id], dict(marks))]
            start += spec.size
        self._rebuild(class_name, groups)

    def check(
        self,
        class_name: str,
        groups: Sequence[GroupValues],
        specs: Sequence[BlockSpec],
        values: Floats,
    ) -> None:
        """Whether `create` would be refused.

        Raises:
            SchemaMismatch: a block exists with another size or group, or the optimizer class
                differs.
            BadRequest: an unknown optimizer, group or value.
        """
        num_expected = sum(spec.size for spec in specs)
        if num_expected != len(values):
            raise BadRequest(
                f"BlockStore.create: expected {num_expected} values, found {len(values)}"
            )
        for spec in specs:
            if spec.group >= len(groups):
                raise BadRequest(f"blocks: expected a group below {len(groups)}, found {spec}")
            existing = self._specs.get(spec.id)
            if existing not in (None, spec):
                raise SchemaMismatch(f"block {spec.id}: it exists as {existing}, found {spec}")
            if class_name in WHOLE and not spec.shape:
                raise BadRequest(f"blocks: {class_name} needs whole parameters, found {spec}")
            if class_name == "Muon" and len(spec.shape) != 2:
                raise BadRequest(f"blocks: Muon needs matrices, found {spec}")
        self._check_optimizer(class_name, groups)

    def declaration(self) -> list[Any] | None:
        """[optimizer's class, values of its groups, specs], as `create` and the wire have them;
        None without blocks.
        """
        if self._optimizer is None:
            return None
        names = self._optimizer.defaults
        groups = [group_values(group, names) for group in self._optimizer.param_groups]
        return [self._class_name, groups, [spec.to_wire() for spec in self._specs.values()]]

    def _check_optimizer(self, class_name: str, groups: Sequence[GroupValues]) -> None:
        if self._optimizer is not None:
            known = (self._class_name, len(self._optimizer.param_groups))
            if known != (class_name, len(groups)):
                raise SchemaMismatch(
                    f"blocks: they exist with {known[0]} and {known[1]} groups,"
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
        """An optimizer over all blocks, with the state of those that had one: some classes make
        state at birth.
        """
        kernel = {"fused": True} if class_name in FUSED else {}
        of_group: list[list[Tensor]] = [[] for _ in groups]
        for block_id, spec in self._specs.items():
            of_group[spec.group] += [piece.weights for piece in self._pieces[block_id]]
        cls = KNOWN[class_name]
        optimizer = make(
            cls,
            [
                {"params": params, **as_group(group)}
                for params, group in zip(of_group, groups, strict=True)
            ],
            # Adagrad starts its state from the argument, not from the group.
            **arguments_of(cls, as_group(groups[0])),
            **kernel,
        )
        if self._optimizer is not None:
            optimizer.state.update(self._optimizer.state)
        self._class_name, self._optimizer, self._is_stale = class_name, optimizer, False

    def read(self, block_ids: Sequence[str]) -> Floats:
        """The weights of these blocks, one after the other. A copy: later updates do not show in
        it.
        """
        try:
            return np.concatenate(
                [self._weights[block_id].numpy().reshape(-1) for block_id in block_ids]
                or [np.empty(0, dtype=np.float32)]
            )
        except KeyError as error:
            raise UnknownTable(f"blocks: no block {error.args[0]!r} on this server") from error

    def size_of(self, block_ids: Sequence[str]) -> int:
        try:
            return sum(self._specs[block_id].size for block_id in block_ids)
        except KeyError as error:
            raise UnknownTable(f"blocks: no block {error.args[0]!r} on this server") from error

    def apply(
        self,
        groups: Sequence[GroupValues],
        block_ids: Sequence[str],
        gradients: Floats,
        ids: Sequence[tuple[int, int]],
        absent: Collection[str] = (),
    ) -> int:
        """One optimizer step on the blocks that have not seen these pushes yet; returns how many,
        in pieces.

        Blocks in `absent` have no gradient: the optimizer passes over them, as torch does.

        gradients: (sum of sizes,) float32 in the order of block_ids. ids: (stream, sequence) pairs,
            applied together.
        The caller has checked sizes with `size_of`.
        """
        fresh = 0
        start = 0
        for block_id in block_ids:
            for piece in self._pieces[block_id] if block_id not in absent else ():
                if _is_new(piece.marks, ids):
                    begin, size = start + piece.start, piece.weights.numel()
                    gradient = torch.from_numpy(gradients[begin : begin + size])
                    piece.weights.grad = gradient.view_as(piece.weights)
                    fresh += 1
            start += self._specs[block_id].size
        if fresh:
            self._step(groups)
        self.advance(ids)
        return fresh

    def add(
        self, block_ids: Sequence[str], differences: Floats, ids: Sequence[tuple[int, int]]
    ) -> None:
        """Add to the blocks that have not seen these pushes yet; their optimizer is not asked.

        differences: (sum of sizes,) float32 in the order of block_ids.
        """
        start = 0
        for block_id in block_ids:
            for piece in self._pieces[block_id]:
                if _is_new(piece.marks, ids):
                    begin, size = start + piece.start, piece.weights.numel()
                    added = torch.from_numpy(differences[begin : begin + size])
                    piece.weights += added.view_as(piece.weights)
            start += self._specs[block_id].size
        self.advance(ids)

    def check_groups(self, groups: Sequence[GroupValues]) -> None:
        """Raises BadRequest where `apply` could not use these values: another number of groups, a
        name that the optimizer does not know, or a value of another form than it has now.
        """
        known = [] if self._optimizer is None else self._optimizer.param_groups
        if len(groups) != len(known):
            raise BadRequest(f"blocks: expected values of {len(known)} groups, found {len(groups)}")
        for group, values in zip(known, groups, strict=True):
            for key, value in as_group(values).items():
                if key not in group:
                    raise BadRequest(f"blocks: {self._class_name} knows no {key}, found {value!r}")
                check_change(key, group[key], value)

    def _step(self, groups: Sequence[GroupValues]) -> None:
        """Requires: `check_groups`."""
        if self._is_stale:
            assert self._class_name is not None
            self._rebuild(self._class_name, groups)
        optimizer = self._optimizer
        assert optimizer is not None
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(as_group(values))
        step(optimizer)
        optimizer.zero_grad(set_to_none=True)

    def advance(self, ids: Sequence[tuple[int, int]]) -> None:
        """Raise the marks of all blocks."""
        for pieces in self._pieces.values():
            for piece in pieces:
                for stream, sequence in ids:
                    piece.marks[stream] = max(piece.marks.get(stream, 0), sequence)

    def marks_of(self, block_id: str) -> dict[int, int]:
        """The last sequence of each stream that all of the block has seen."""
        first, *others = [piece.marks for piece in self._pieces[block_id]]
        if not others:
            return dict(first)
        streams = first.keys() & set.intersection(*(set(marks) for marks in others))
        return {s: min(marks[s] for marks in (first, *others)) for s in streams}

    def forget_marks(self) -> None:
        """Streams begin anew."""
        for pieces in self._pieces.values():
            for piece in pieces:
                piece.marks = {}

    def parts_of(self, block_id: str) -> list[Part]:
        """Weights, optimizer state and marks of a block, copies; of a block in one piece one."""
        start = self._specs[block_id].start
        return [
            Part(start + piece.start, self._tensors_of(piece), dict(piece.marks))
            for piece in self._pieces[block_id]
        ]

    def _tensors_of(self, piece: _Piece) -> dict[str, Tensor]:
        assert self._optimizer is not None
        state = self._optimizer.state.get(piece.weights, {})
        tensors = {"weights": piece.weights.clone()}
        for name, value in state.items():
            tensors[name] = value.clone() if isinstance(value, Tensor) else torch.tensor(value)
        return tensors

    def state_of(self, block_id: str) -> dict[str, Tensor]:
        """Weights and optimizer state of a block as named tensors, copies; of pieces that differ in
        a number of the whole, the first one's.
        """
        return dict(_joined(self.parts_of(block_id)).tensors)

    def state_with(self, block_id: str, given: Tensors) -> dict[str, Tensor]:
        """Its state with these tensors, flat, in the place of those of the same name.

        Raises:
            SchemaMismatch: the optimizer could not go on with them: they are not all that it has
                now or makes in a step, or have other sizes.
        """
        kept, spec, optimizer = self.state_of(block_id), self._specs[block_id], self._optimizer
        assert optimizer is not None
        made = shapes_made(optimizer, spec.group, kept["weights"].shape)
        shapes = made | {name: tensor.shape for name, tensor in kept.items()}
        found = {name: tensor.numel() for name, tensor in given.items()}
        names = kept.keys() | given.keys()
        fits = all(name in shapes and shapes[name].numel() == found[name] for name in found)
        if not fits or (names != kept.keys() and names != made.keys()):
            expected = {name: shape.numel() for name, shape in made.items()}
            raise SchemaMismatch(
                f"block {block_id}: expected numbers of {expected}, found {found}"[:500]
            )
        return kept | {name: tensor.reshape(shapes[name]) for name, tensor in given.items()}

    def restore(self, block_id: str, parts: Sequence[Part]) -> None:
        """Replace weights, optimizer state and marks of a block; the inverse of `parts_of`.

        parts: of its elements in order, cut as they may be.

        Raises:
            SchemaMismatch: parts of other elements, or of an optimizer that needs whole parameters.
        """
        spec, optimizer = self._specs[block_id], self._optimizer
        assert optimizer is not None
        merged = _merged(parts)
        sizes = [part.size for part in merged]
        if sum(sizes) != spec.size or (spec.shape and len(merged) > 1):
            raise SchemaMismatch(
                f"block {block_id}: expected {spec.size} elements"
                f"{' in one piece' if spec.shape else ''}, found {sizes}"
            )
        for piece in self._pieces[block_id]:
            optimizer.state.pop(piece.weights, None)
        whole = self._weights[block_id]
        if len(merged) == len(self._pieces[block_id]) == 1:
            pieces = [_Piece(0, whole, {})]
        else:
            self._is_stale = True
            flat = whole.view(-1)
            starts = [part.start - merged[0].start for part in merged]
            pieces = [
                _Piece(start, whole if len(merged) == 1 else flat[start : start + size], {})
                for start, size in zip(starts, sizes, strict=True)
            ]
        for piece, part in zip(pieces, merged, strict=True):
            piece.marks = dict(part.marks)
            piece.weights.copy_(part.tensors["weights"].view_as(piece.weights))
            optimizer.state[piece.weights] = {
                name: tensor.clone() for name, tensor in part.tensors.items() if name != "weights"
            }
        self._pieces[block_id] = pieces


def _is_new(marks: Mapping[int, int], ids: Iterable[tuple[int, int]]) -> bool:
    return any(marks.get(stream, 0) < sequence for stream, sequence in ids)


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Parts that have seen the same pushes, and have the same numbers, as one."""
    groups: list[list[Part]] = []
    for part in parts:
        if groups and _are_alike(groups[-1][-1], part):
            groups[-1].append(part)
        else:
            groups.append([part])
    return [_joined(group) for group in groups]


def _are_alike(one: Part, other: Part) -> bool:
    if one.marks != other.marks or one.tensors.keys() != other.tensors.keys():
        return False
    pairs = [(tensor, other.tensors[name]) for name, tensor in one.tensors.items()]
    return all(a.ndim == b.ndim and (a.ndim > 0 or torch.equal(a, b)) for a, b in pairs)


def _joined(parts: Sequence[Part]) -> Part:
    """Neighbours as one, with what all of them have."""
    first = parts[0]
    if len(parts) == 1:
        return first
    tensors = {
        name: tensor
        if tensor.ndim == 0
        else torch.cat([part.tensors[name].reshape(-1) for part in parts])
        for name, tensor in first.tensors.items()
        if all(name in part.tensors for part in parts)
    }
    return Part(first.start, tensors, first.marks)
