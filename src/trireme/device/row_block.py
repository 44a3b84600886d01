"""A block: rows of one table as tensors on a device, looked up by slot and updated there.

    block = RowBlock(layout, raw_rows, device)            # row i of raw_rows gets slot i
    bags = SlotBags(slots, offsets, num_features=F)       # slots as the CPU planned them
    loss(model(block.pool(bags))).backward()              # block.rows.grad: a gradient per slot
    block.step(values)
    raw_rows = block.raw_rows()                           # bit for bit what a table takes
    block.fill(slots, raw_rows)                           # other rows in the place of some

Shapes: U rows, D weights, S floats of state, K distinct slots of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme import _core, accelerator
from trireme.device.block_layout import NEVER, BlockLayout, RowTensors
from trireme.device.block_statistics import RowStep, UpdateFacts, as_int32
from trireme.device.kernels import Kernels, choose_kernels
from trireme.device.slot_bags import SlotBags
from trireme.device.step_values import StepValues
from trireme.errors import BadRequest
from trireme.rows.wide_rows import WideRows


class RowBlock:
    """Rows of one class of a table. One thread uses it at a time.

    Attributes:
        rows: (U, D) float32, the leaf that `pool` reads. Its gradient after backward is sparse: the
            distinct slots of each lookup and the (K, D) gradients of their rows.
        tensors: all parts of the rows; `rows` shares the memory of their weights.
        is_changed: (U,) bool, the rows that have been updated in this block.
        kernels: what computes.

    Args:
        layout: of the table.
        rows: (U, row_bytes) uint8, wide rows (trireme.rows.wide_rows); or their parts there.
        device: where the block is.
        kernels: "auto", "torch", "core" or "triton", see `choose_kernels`.
        is_fused: backward keeps the gradients of bags, and `step` sums them and updates the rows in
            one operation: less memory is read and written. `rows.grad` stays None, so gradients
            cannot be clipped or looked at. The rows get the same bits.
        threads: of the core, on the CPU; default as many as torch has.

    Raises:
        BadRequest: rows of another size, or `kernels` that cannot run here.
    """

    def __init__(
        self,
        layout: BlockLayout,
        rows: WideRows | RowTensors,
        device: torch.device | str = "cpu",
        *,
        kernels: str = "auto",
        is_fused: bool = False,
        threads: _core.Pool | None = None,
    ) -> None:
        self.layout, self.device = layout, torch.device(device)
        self.threads = threads or threads_of_torch()
        self._wanted_kernels = kernels
        self.kernels: Kernels = choose_kernels(layout, self.device, self.threads, kernels)
        self._link = accelerator.link_to(self.device)
        tensors = rows if isinstance(rows, RowTensors) else self._sent(rows)
        if kernels == "triton":  # which do not know strides
            tensors = RowTensors(*(part.contiguous() for part in tensors))
        self.tensors = tensors
        self.rows = tensors.weights.detach().requires_grad_()
        self.is_changed = torch.from_numpy(np.zeros(len(self), np.bool_)).to(self.device)
        self._is_fused = is_fused
        self._index_of_lookup: Tensor | None = None  # of the gradient of the last one
        self._unsummed: list[tuple[SlotBags, Tensor]] = []

    def __len__(self) -> int:
        """U."""
        return len(self.tensors.weights)

    @property
    def wide_rows(self) -> WideRows | None:
        """(U, row_bytes) uint8: the rows of the slots, in the memory of the block; None: they do
        not lie so there. The next step changes them.
        """
        return self.layout.wide_rows(self.tensors) if self._link.is_host else None

    def pool(self, bags: SlotBags) -> Tensor:
        """(B, F, D) float32: the sum of the rows of each bag, differentiable in `rows`. Slots are
        not checked: they must be below U. Raises BadRequest: bags on another device.
        """
        self._check_device(bags)
        out: Tensor = _Pool.apply(self.rows, self, bags)  # type: ignore[no-untyped-call]
        return out

    def step(self, values: Mapping[str, Any], facts: UpdateFacts | None = None) -> None:
        """Apply the rule to the rows that have a gradient, and leave no gradient.

        Args:
            values: of the rule, as a push has them (`trireme.optim.values_of_group`). As for a
                table of the core, gradients of rules with scale="fleet" are scaled before.
            facts: for statistics; its columns are of the step's distinct slots in ascending order.

        Raises BadRequest: a value is out of its range, or shows are missing; nothing has changed.
        """
        step = _row_step(values, facts)
        if len(self._unsummed) == 1 and self.rows.grad is None:
            bags, grad = self._unsummed[0]
            self._update_bags(bags, grad, step)
        else:
            slots, grads = self.gradient()
            self._update(slots, grads, step)
        self._unsummed, self.rows.grad = [], None

    def gradient(self) -> tuple[Tensor, Tensor]:
        """(K,) int32 distinct slots, ascending, and (K, D) float32: the sum of their gradients over
        the lookups since the last step.
        """
        summed = [(b.occurrences.slots, self.kernels.sum(g, b)) for b, g in self._unsummed]
        if (grad := self.rows.grad) is not None:
            summed.append((grad._indices()[0].to(torch.int32), grad._values()))
        if not summed:
            new = self.rows.new_empty
            return new(0, dtype=torch.int32), new(0, self.layout.dim)
        slots, grads = (torch.cat(parts) for parts in zip(*summed, strict=True))
        if len(summed) == 1 and (grad is None or self._is_of_one_lookup(grad)):
            return slots, grads
        bags = SlotBags(slots)
        return bags.occurrences.slots, self.kernels.sum(grads[:, None], bags)

    def update(
        self,
        slots: Tensor,
        grads: Tensor,
        values: Mapping[str, Any],
        facts: UpdateFacts | None = None,
    ) -> None:
        """Apply the rule to rows whose gradients come from elsewhere: (N,) int32 slots, of which
        some may be equal, and (N, D) float32, summed per slot in order. See `step`.
        """
        bags = SlotBags(slots)
        self._check_device(bags)
        if grads.shape != (len(slots), self.layout.dim) or grads.dtype != torch.float32:
            raise BadRequest(
                f"RowBlock.update: expected gradients as float32 of shape"
                f" {(len(slots), self.layout.dim)}, found {grads.dtype} of shape"
                f" {tuple(grads.shape)}"
            )
        self._update_bags(bags, grads[:, None], _row_step(values, facts))

    def update_distinct(
        self,
        slots: Tensor,
        grads: Tensor,
        values: Mapping[str, Any],
        facts: UpdateFacts | None = None,
    ) -> None:
        """As `update`, for (K,) distinct slots in any order, that of `grads` and `facts`."""
        self._update(slots, grads, _row_step(values, facts))

    def weights(self, slots: Tensor) -> Tensor:
        """(n, D) float32: those of (n,) int32 slots, of which some may be equal; zeros of new rows
        where lookups of the table hide them.
        """
        weights = self.kernels.weights(self.tensors, slots)
        if self.layout.hides_new:
            is_new = torch.index_select(self.tensors.stamps[:, 0], 0, slots) == as_int32(NEVER)
            weights.masked_fill_(is_new[:, None], 0.0)
        return weights

    def raw_rows(self, slots: Tensor | None = None) -> WideRows:
        """(n, row_bytes) uint8: the rows of (n,) int32 slots, or all U, as `rows` of the
        constructor.
        """
        if slots is None or self._link.is_host:
            return self.layout.join(self._on_host(self.tensors), self.threads, slots)
        return self.layout.join(self._on_host(self._rows_at(slots)), self.threads)

    def _on_host(self, parts: RowTensors) -> RowTensors:
        return RowTensors(*self._link.to_host(parts))

    def moved(self, slots: Tensor, to: Tensor, num_rows: int) -> RowBlock:
        """A block of `num_rows` rows on this device, of which those at `to`, (n,) int32 distinct
        slots, are the rows of `slots` here, and count as unchanged. The others are zeros: `fill`
        them.
        """
        index, index_to = slots.long(), to.long()
        tensors = self.layout.zeros(num_rows, self.device)
        for part, filled in zip(self.tensors, tensors, strict=True):
            if len(part):
                filled[index_to] = part[index]
        return RowBlock(
            self.layout,
            tensors,
            self.device,
            kernels=self._wanted_kernels,
            is_fused=self._is_fused,
            threads=self.threads,
        )

    def fill(self, slots: Tensor, rows: WideRows) -> None:
        """Replace the rows of these distinct slots, (n,) int32, which must count as unchanged.
        Raises BadRequest: as the constructor, or another number of rows.
        """
        if len(slots) != len(rows):
            raise BadRequest(
                f"RowBlock.fill: expected a row for each of {len(slots)} slots, found {len(rows)}"
            )
        if self._link.is_host:
            self.layout.fill(self.tensors, slots, rows, self.threads)
            return
        index = slots.long()
        for part, filled in zip(self.tensors, self._sent(rows), strict=True):
            if len(part) > 0:  # there are no shows in a table that is not scored
                part[index] = filled

    def _sent(self, rows: WideRows) -> RowTensors:
        if self._link.is_host and rows.ndim == 2:
            tensors = self.layout.room(len(rows), self.device)
            slots = torch.arange(len(rows), dtype=torch.int32)
            self.layout.fill(tensors, slots, rows, self.threads)
            return tensors
        return RowTensors(*self._link.send(self.layout.split(rows, self.threads)).receive())

    def _rows_at(self, slots: Tensor) -> RowTensors:
        index = slots.long()
        return RowTensors(*(part[index] if len(part) else part for part in self.tensors))

    def _update(self, slots: Tensor, grads: Tensor, step: RowStep) -> None:
        self.kernels.update(self.tensors, slots, grads, step)
        self.is_changed.index_fill_(0, slots.long(), True)

    def _update_bags(self, bags: SlotBags, grad: Tensor, step: RowStep) -> None:
        self.kernels.sum_and_update(self.tensors, bags, grad, step)
        self.is_changed.index_fill_(0, bags.occurrences.slots.long(), True)

    def _keep_gradient(self, bags: SlotBags, grad: Tensor) -> Tensor | None:
        if self._is_fused:
            self._unsummed.append((bags, grad))
            return None
        self._index_of_lookup = index = bags.occurrences.slots[None].long()
        values = self.kernels.sum(grad, bags)
        return torch.sparse_coo_tensor(index, values, self.rows.shape, check_invariants=False)

    def _is_of_one_lookup(self, grad: Tensor) -> bool:
        """Whether its slots are distinct and ascending. torch forgets it, but keeps the index."""
        index = self._index_of_lookup
        return index is not None and grad._indices().data_ptr() == index.data_ptr()

    def _check_device(self, bags: SlotBags) -> None:
        if bags.slots.device != self.rows.device:
            raise BadRequest(
                f"RowBlock: expected slots on {self.rows.device}, found them on {bags.slots.device}"
            )


def _row_step(values: Mapping[str, Any], facts: UpdateFacts | None) -> RowStep:
    return RowStep(StepValues.of(values), facts or UpdateFacts())


def threads_of_torch() -> _core.Pool:
    """As many threads as torch has."""
    return _threads(torch.get_num_threads())


@cache
def _threads(num: int) -> _core.Pool:
    return _core.Pool(num)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, block: RowBlock, bags: SlotBags) -> Tensor:
        ctx.block, ctx.bags = block, bags
        return block.kernels.pool(rows, bags)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.block._keep_gradient(ctx.bags, grads[0].contiguous()), None, None
