"""The reference implementation: torch operations, for any device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trireme import _core
from trireme.device.block_layout import BlockLayout, RowTensors
from trireme.device.block_statistics import RowStep, check_shows, count
from trireme.device.slot_bags import SlotBags, chunks_of
from trireme.device.tensor_rules import tensor_rule


class TorchKernels:
    """See `trireme.device.kernels.Kernels`. Sums go through torch.segment_reduce, which adds the
    elements of a segment one after the other; index_add would add them in any order on a GPU.
    """

    name = "torch operations"

    def __init__(self, layout: BlockLayout) -> None:
        self._rule, self._policy = tensor_rule(layout.rule), layout.policy

    def pool(self, weights: Tensor, bags: SlotBags) -> Tensor:
        return pool(weights, bags)

    def sum(self, grad: Tensor, bags: SlotBags) -> Tensor:
        return sum_gradients(grad, bags)

    def weights(self, rows: RowTensors, slots: Tensor) -> Tensor:
        return torch.index_select(rows.weights, 0, slots)

    def update(self, rows: RowTensors, slots: Tensor, grads: Tensor, step: RowStep) -> None:
        index = slots.long()
        count(rows, index, step.facts, self._policy)
        weights, state = self._rule(rows.weights[index], rows.state[index], grads, step.values)
        rows.weights[index] = weights
        rows.state[index] = state

    def sum_and_update(self, rows: RowTensors, bags: SlotBags, grad: Tensor, step: RowStep) -> None:
        self.update(rows, bags.occurrences.slots, self.sum(grad, bags), step)


def pool(weights: Tensor, bags: SlotBags) -> Tensor:
    """See `Kernels.pool`."""
    dim = weights.shape[1]
    is_row = (bags.slots >= 0)[:, None]
    if len(weights) == 0:  # then all is padding
        values = weights.new_zeros(len(bags.slots), dim)
    else:
        values = torch.where(is_row, weights[bags.slots.clamp(min=0).long()], 0.0)
    if bags.weights is not None:
        values = 0.0 + bags.weights[:, None] * values
    if bags.offsets is not None:
        values = segment_sums(values, bags.offsets)
    values_FBD = values.view(bags.num_features, bags.num_examples, dim)
    return values_FBD.transpose(0, 1).contiguous()


def sum_gradients(grad: Tensor, bags: SlotBags) -> Tensor:
    """See `Kernels.sum`."""
    _, order, starts = bags.occurrences
    position = order.long()
    bag = bags.bag_of[position].long()
    example, feature = bag % max(bags.num_examples, 1), bag // max(bags.num_examples, 1)
    values = grad[example, feature]
    if bags.weights is not None:
        values = bags.weights[position][:, None] * values
    chunks = chunks_of(starts)
    return segment_sums(segment_sums(values, chunks.starts), chunks.first)


def segment_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """(n, D): sums of values[offsets[i]:offsets[i + 1]] in order; offsets: (n + 1,) int64."""
    # Unsafe: offsets are not checked, which would wait for the device.
    return torch.segment_reduce(values, "sum", offsets=offsets, axis=0, initial=0.0, unsafe=True)


class CoreKernels(TorchKernels):
    """As there, but rows are looked up and updated by the core. Bags are pooled and summed by torch
    operations: passes do so by the gather of `trireme.nn`, and give distinct slots.
    """

    name = "the C++ core"

    def __init__(self, layout: BlockLayout, threads: _core.Pool) -> None:
        super().__init__(layout)
        self._layout, self._threads = layout, threads

    def weights(self, rows: RowTensors, slots: Tensor) -> Tensor:
        out = np.empty((len(slots), self._layout.dim), np.float32)
        layout, arrays = self._layout, rows.arrays()
        layout.core.block_weights(arrays, slots.numpy(), out, self._threads, layout.row_class)
        return torch.from_numpy(out)

    def update(self, rows: RowTensors, slots: Tensor, grads: Tensor, step: RowStep) -> None:
        layout, facts = self._layout, step.facts
        check_shows(facts, layout.policy)
        layout.core.update_block(
            rows.arrays(),
            slots.numpy(),
            grads.contiguous().numpy(),
            step.values.exact,
            self._threads,
            layout.row_class,
            time=facts.time,
            version=facts.version,
            show_click=None if facts.show_click is None else facts.show_click.numpy(),
            features=None if facts.features is None else facts.features.numpy(),
        )
