"""Dense parameters: cut into blocks on the worker, updated by torch.optim on the servers.

A block is a slice of one flattened parameter. The cut depends on the parameter alone, never on the
number of servers, so every number of servers computes the same bits.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.errors import BadRequest, SchemaMismatch, UnknownTable
from trireme.ps.adam_d2sum import AdamD2Sum
from trireme.ps.routing import Floats

BLOCK_ELEMENTS = 65536

# Element-wise optimizers: applied block by block they give the bits of the whole tensor.
ELEMENTWISE: Mapping[str, type[torch.optim.Optimizer]] = {
    cls.__name__: cls
    for cls in (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        AdamD2Sum,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
}
REFUSED = {
    "LBFGS": "it needs the loss as a closure",
    "SparseAdam": "it is for sparse gradients; use trireme.optim.Adam on a table",
    "Adafactor": "it needs whole parameters",
    "Muon": "it needs whole parameters",
}
# Classes with a fused CPU kernel: one pass over memory instead of one per operation.
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
# How the kernel is chosen is the server's business; these change speed, never the formula.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")

GroupValues = dict[str, Any]


def optimizer_spec(optimizer: torch.optim.Optimizer) -> str:
    """The class name that servers know, for an optimizer they can run. Raises BadRequest
    otherwise.
    """
    name = type(optimizer).__name__
    if name in REFUSED:
        raise BadRequest(f"DistributedOptimizer: {name} cannot run on blocks: {REFUSED[name]}")
    if ELEMENTWISE.get(name) is not type(optimizer):
        raise BadRequest(
            f"DistributedOptimizer: expected one of {', '.join(ELEMENTWISE)}, not a subclass,"
            f" found {type(optimizer).__module__}.{name}"
        )
    return name


def group_values(group: Mapping[str, Any], names: Collection[str]) -> GroupValues:
    """The numeric values of a param group, as they travel with each push.

    names: those that the optimizer knows; schedulers leave notes of their own in a group.
    """
    values: GroupValues = {}
    for key, value in group.items():
        if key not in names or key in IMPLEMENTATION:
            continue
        if isinstance(value, Tensor):
            value = value.item()
        if isinstance(value, tuple):
            value = list(value)
        values[key] = _checked_value(key, value)
    return values


def _checked_value(key: str, value: Any) -> Any:
    scalars = value if isinstance(value, list) else [value]
    if not all(scalar is None or isinstance(scalar, bool | int | float) for scalar in scalars):
        raise BadRequest(
            f"DistributedOptimizer: expected numbers in param groups, found {key}={value!r}"
        )
    return value


@dataclass(frozen=True)
class BlockSpec:
    """One block: elements [start, start + size) of the flattened parameter `param`, in group
    `group`.
    """

    param: str
    start: int
    size: int
    group: int

    @property
    def id(self) -> str:
        return f"{self.param}@{self.start}"

    def to_wire(self) -> list[Any]:
        return [self.param, self.start, self.size, self.group]

    @staticmethod
    def from_wire(values: Sequence[Any]) -> BlockSpec:
        try:
            param, start, size, group = values
            spec = BlockSpec(str(param), int(start), int(size), int(group))
        except (TypeError, ValueError, OverflowError) as error:
            raise BadRequest(
                f"BlockSpec: expected [param, start, size, group], found {values!r}"
            ) from error
        if spec.start < 0 or spec.size < 1 or spec.group < 0:
            raise BadRequest(f"BlockSpec: expected start >= 0, size >= 1, group >= 0, found {spec}")
        return spec


def cut(
    param: str, num_elements: int, group: int, block_elements: int = BLOCK_ELEMENTS
) -> list[BlockSpec]:
    """The blocks of one parameter, in order."""
    return [
        BlockSpec(param, start, min(block_elements, num_elements - start), group)
        for start in range(0, num_elements, block_elements)
    ]


class BlockStore:
    """The blocks that one server owns, with their optimizer. Not thread-safe: the shard locks
    around it.
    """

    def __init__(self) -> None:
        self._class_name: str | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._specs: dict[str, BlockSpec] = {}
        self._weights: dict[str, Tensor] = {}
        self.marks: dict[str, dict[int, int]] = {}

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
                self._weights[spec.id] = torch.tensor(values[start : start + spec.size])
                self.marks[spec.id] = dict(marks)
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
        if class_name not in ELEMENTWISE:
            raise BadRequest(
                f"blocks: expected an optimizer of {', '.join(ELEMENTWISE)}, found {class_name!r}"
            )
        for group in groups:
            _check_group(ELEMENTWISE[class_name], _as_group(group))

    def _rebuild(self, class_name: str, groups: Sequence[GroupValues]) -> None:
        """An optimizer over all blocks, with the state of those that had one: some classes make
        state at birth.
        """
        kernel = {"fused": True} if class_name in FUSED else {}
        of_group: list[list[Tensor]] = [[] for _ in groups]
        for block_id, spec in self._specs.items():
            of_group[spec.group].append(self._weights[block_id])
        cls = ELEMENTWISE[class_name]
        optimizer = _make(
            cls,
            [
                {"params": params, **_as_group(group)}
                for params, group in zip(of_group, groups, strict=True)
            ],
            # Adagrad starts its state from the argument, not from the group.
            **_arguments(cls, _as_group(groups[0])),
            **kernel,
        )
        if self._optimizer is not None:
            optimizer.state.update(self._optimizer.state)
        self._class_name, self._optimizer = class_name, optimizer

    def read(self, block_ids: Sequence[str]) -> Floats:
        """The weights of these blocks, one after the other. A copy: later updates do not show in
        it.
        """
        try:
            return np.concatenate(
                [self._weights[block_id].numpy() for block_id in block_ids]
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
        """One optimizer step on the blocks that have not seen these pushes yet; returns how many.

        Blocks in `absent` have no gradient: the optimizer passes over them, as torch does.

        gradients: (sum of sizes,) float32 in the order of block_ids. ids: (stream, sequence) pairs,
            applied together.
        The caller has checked sizes with `size_of`.
        """
        fresh = 0
        start = 0
        for block_id in block_ids:
            weights, marks = self._weights[block_id], self.marks[block_id]
            is_new = any(marks.get(stream, 0) < sequence for stream, sequence in ids)
            if is_new and block_id not in absent:
                weights.grad = torch.from_numpy(gradients[start : start + len(weights)])
                fresh += 1
            start += len(weights)
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
            weights, marks = self._weights[block_id], self.marks[block_id]
            if any(marks.get(stream, 0) < sequence for stream, sequence in ids):
                weights += torch.from_numpy(differences[start : start + len(weights)])
            start += len(weights)
        self.advance(ids)

    def check_groups(self, groups: Sequence[GroupValues]) -> None:
        """Raises BadRequest where `apply` could not use these values: another number of groups, a
        name that the optimizer does not know, or a value of another form than it has now.
        """
        known = [] if self._optimizer is None else self._optimizer.param_groups
        if len(groups) != len(known):
            raise BadRequest(f"blocks: expected values of {len(known)} groups, found {len(groups)}")
        for group, values in zip(known, groups, strict=True):
            for key, value in _as_group(values).items():
                if key not in group or not _have_one_form(group[key], value):
                    raise BadRequest(
                        f"blocks: expected {key} like {group.get(key)!r}, found {value!r}"
                    )

    def _step(self, groups: Sequence[GroupValues]) -> None:
        """Requires: `check_groups`."""
        optimizer = self._optimizer
        assert optimizer is not None
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(_as_group(values))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def advance(self, ids: Sequence[tuple[int, int]]) -> None:
        """Raise the marks of all blocks."""
        for marks in self.marks.values():
            for stream, sequence in ids:
                marks[stream] = max(marks.get(stream, 0), sequence)

    def state_of(self, block_id: str) -> dict[str, Tensor]:
        """Weights and optimizer state of a block as named tensors, copies."""
        weights = self._weights[block_id]
        assert self._optimizer is not None
        state = self._optimizer.state.get(weights, {})
        tensors = {"weights": weights.clone()}
        for name, value in state.items():
            tensors[name] = value.clone() if isinstance(value, Tensor) else torch.tensor(value)
        return tensors

    def restore(
        self, block_id: str, tensors: Mapping[str, Tensor], marks: Mapping[int, int]
    ) -> None:
        """Replace weights, optimizer state and marks of a block; the inverse of `state_of`."""
        weights = self._weights[block_id]
        if tensors["weights"].shape != weights.shape:
            raise SchemaMismatch(
                f"block {block_id}: expected {len(weights)} elements,"
                f" found {tensors['weights'].numel()}"
            )
        weights.copy_(tensors["weights"])
        assert self._optimizer is not None
        state = {name: value.clone() for name, value in tensors.items() if name != "weights"}
        self._optimizer.state[weights] = state
        self.marks[block_id] = dict(marks)


def _check_group(cls: type[torch.optim.Optimizer], group: dict[str, Any]) -> None:
    """torch checks values where they are arguments, not where they come in groups."""
    defaults = _make(cls, [torch.zeros(1)]).defaults
    unknown = group.keys() - defaults.keys()
    if unknown:
        raise BadRequest(f"blocks: {cls.__name__} knows no {sorted(unknown)}")
    for key, value in group.items():
        if isinstance(defaults[key], tuple) and not _have_one_form(defaults[key], value):
            raise BadRequest(f"blocks: expected {key} like {defaults[key]!r}, found {value!r}")
    try:
        _make(cls, [torch.zeros(1)], **_arguments(cls, group))
    except (TypeError, ValueError) as error:
        raise BadRequest(f"blocks: {cls.__name__} does not take {group!r}: {error}") from error


def _have_one_form(known: Any, value: Any) -> bool:
    if isinstance(known, tuple):
        return isinstance(value, tuple) and len(value) == len(known)
    return not isinstance(value, tuple) and (known is None) == (value is None)


def _make(
    cls: type[torch.optim.Optimizer], params: list[Any], **arguments: Any
) -> torch.optim.Optimizer:
    """The constructors of torch's optimizers take more than their base class says."""
    make: Callable[..., torch.optim.Optimizer] = cls
    return make(params, **arguments)


def _arguments(cls: type[torch.optim.Optimizer], group: dict[str, Any]) -> dict[str, Any]:
    """The values of a group that the constructor takes."""
    known = inspect.signature(cls).parameters
    return {key: value for key, value in group.items() if key in known}


def _as_group(values: Mapping[str, Any]) -> dict[str, Any]:
    """Wire values as torch wants them: tuples for lists; only numbers."""
    group: dict[str, Any] = {}
    for key, value in values.items():
        if key in ("params", *IMPLEMENTATION):
            raise BadRequest(f"blocks: a push may not set {key!r}")
        checked = _checked_value(str(key), value)
        if isinstance(checked, float) and math.isnan(checked):
            raise BadRequest(f"blocks: expected numbers, found {key}={value!r}")
        group[str(key)] = tuple(checked) if isinstance(checked, list) else checked
    return group
