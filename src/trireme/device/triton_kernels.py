"""The implementation for CUDA: Triton kernels, without atomics.

A program owns a bag or a row and adds its terms one after the other, so each sum has one order and
two runs give the same bits. Only rows that occur more than CHUNK times are divided: their chunks
are summed by programs of their own, then in order.

Shapes: as in kernels.py; C chunks.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme import accelerator
from trireme.device import slot_bags, triton_rules
from trireme.device.block_layout import BlockLayout, RowTensors
from trireme.device.block_statistics import RowStep, count
from trireme.device.slot_bags import SlotBags
from trireme.device.step_values import StepValues

OPTIONS = {"enable_fp_fusion": False}
"""Of all kernels: a fused multiply-add would round once where the others round twice."""

# What a gradient is read from, as bits of KIND.
IS_SUMMED: tl.constexpr = tl.constexpr(1)  # from `sums`, else from the gradient of the bags
HAS_BAGS: tl.constexpr = tl.constexpr(2)  # ids have other bags than their positions
HAS_FACTORS: tl.constexpr = tl.constexpr(4)


class _Source(NamedTuple):
    """The gradients of K rows, for kernels. What KIND does not name is not read."""

    sums: Tensor  # (K, D)
    chunk_sums: Tensor  # (C, D)
    firsts: Tensor  # (K + 1,) int32: the chunks of each row; none if it has only one
    starts: Tensor  # (K + 1,), order: (N,) of Occurrences
    order: Tensor
    grad: Tensor  # (B, F, D)
    bags: Tensor  # (N,)
    factors: Tensor  # (N,)
    num_examples: int
    num_features: int


@triton.jit
def _pool(
    out,
    weights,
    slots,
    offsets,
    factors,
    num_examples,
    num_features,
    KIND: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out: (B, F, D). offsets: (F*B + 1,), where the ids have bags."""
    bag = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    begin = bag
    end = bag + 1
    if HAS_BAGS & KIND:
        begin = tl.load(offsets + bag)
        end = tl.load(offsets + bag + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(begin, end):
        slot = tl.load(slots + i).to(tl.int64)
        row = tl.load(weights + slot * D + cols, mask & (slot >= 0), 0.0)
        if HAS_FACTORS & KIND:
            row = tl.load(factors + i) * row
        if KIND:
            total = total + row
        else:
            total = row
    at = (bag % num_examples) * num_features + bag // num_examples
    tl.store(out + at * D + cols, total, mask)


@triton.jit
def _terms(begin, end, cols, mask, source, KIND: tl.constexpr, D: tl.constexpr):
    """The sum of the gradients of the occurrences begin to end - 1."""
    total = tl.zeros_like(cols).to(tl.float32)
    for o in range(begin, end):
        position = tl.load(source.order + o)
        bag = position.to(tl.int64)
        if HAS_BAGS & KIND:
            bag = tl.load(source.bags + position).to(tl.int64)
        at = (bag % source.num_examples) * source.num_features + bag // source.num_examples
        term = tl.load(source.grad + at * D + cols, mask, 0.0)
        if HAS_FACTORS & KIND:
            term = tl.load(source.factors + position) * term
        total = total + term
    return total


@triton.jit
def _sum_chunk(
    source,
    owners,
    num_rows,
    KIND: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """owners: the row of each chunk. There are programs for more chunks than there may be."""
    chunk = tl.program_id(0).to(tl.int64)
    if chunk < tl.load(source.firsts + num_rows):
        cols = tl.arange(0, BLOCK)
        mask = cols < D
        row = tl.load(owners + chunk)
        begin = tl.load(source.starts + row) + (chunk - tl.load(source.firsts + row)) * CHUNK
        end = tl.minimum(begin + CHUNK, tl.load(source.starts + row + 1))
        total = _terms(begin, end, cols, mask, source, KIND, D)
        tl.store(source.chunk_sums + chunk * D + cols, total, mask)


@triton.jit
def _gradient(row, cols, mask, source, KIND: tl.constexpr, D: tl.constexpr):
    """That of a row in these columns."""
    if IS_SUMMED & KIND:
        return tl.load(source.sums + row.to(tl.int64) * D + cols, mask, 0.0)
    else:
        first = tl.load(source.firsts + row).to(tl.int64)
        last = tl.load(source.firsts + row + 1).to(tl.int64)
        begin = tl.load(source.starts + row)
        end = tl.load(source.starts + row + 1)
        total = _terms(begin, tl.where(first == last, end, begin), cols, mask, source, KIND, D)
        for chunk in range(first, last):
            part = source.chunk_sums + chunk * D + cols
            total = total + tl.load(part, mask, 0.0)
        return total


@triton.jit
def _sum(source, KIND: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    total = _gradient(row, cols, mask, source, KIND, D)
    tl.store(source.sums + row.to(tl.int64) * D + cols, total, mask)


@triton.jit
def _update(
    weights,
    states,
    slots,
    source,
    values,
    exact,
    KIND: tl.constexpr,
    RULE: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the row of one slot by a rule of whole rows."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    g = _gradient(row, cols, mask, source, KIND, D)
    at = weights + slot * D + cols
    w = tl.load(at, mask, 0.0)
    w = triton_rules.apply(w, g, states + slot * S, cols, mask, values, exact, RULE, D, BLOCK)
    tl.store(at, w, mask)


@triton.jit
def _update_parts(
    weights,
    states,
    slots,
    source,
    values,
    exact,
    KIND: tl.constexpr,
    RULE: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the row of one slot by a rule of Fleet: its head, and from its second update on its
    tail.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    state = states + slot * S
    num_updates = triton_rules.next_count(state + triton_rules.count_at(RULE, D))
    for part in tl.static_range(2):
        cols = tl.arange(0, BLOCK) + part
        mask = (cols < 1 + part * D) & (cols < D) & ((part == 0) | (num_updates > 1))
        if (part == 0) | ((num_updates > 1) & (D > 1)):
            g = _gradient(row, cols, mask, source, KIND, D)
            at = weights + slot * D + cols
            w = tl.load(at, mask, 0.0)
            w = triton_rules.apply_part(
                w, g, state, cols, mask, num_updates, values, exact, part, RULE, D, BLOCK
            )
            tl.store(at, w, mask)


class TritonKernels:
    """See `trireme.device.kernels.Kernels`."""

    name = "Triton"

    def __init__(self, layout: BlockLayout) -> None:
        self._rule = triton_rules.name_of(layout.rule)
        self._kernel = _update_parts if self._rule.startswith("fleet") else _update
        self._state_floats, self._policy = layout.state_floats, layout.policy

    def pool(self, weights: Tensor, bags: SlotBags) -> Tensor:
        dim = weights.shape[1]
        out = weights.new_empty(bags.num_examples, bags.num_features, dim)
        _launch(
            _pool,
            out.device,
            bags.num_examples * bags.num_features,
            dim,
            out,
            weights,
            bags.slots,
            bags.slots if bags.offsets is None else bags.offsets,
            bags.slots if bags.weights is None else bags.weights,
            bags.num_examples,
            bags.num_features,
            KIND=_kind(bags),
        )
        return out

    def sum(self, grad: Tensor, bags: SlotBags) -> Tensor:
        source = _unsummed(grad, bags)
        _launch(_sum, grad.device, len(source.sums), grad.shape[2], source, KIND=_kind(bags))
        return source.sums

    def weights(self, rows: RowTensors, slots: Tensor) -> Tensor:
        return torch.index_select(rows.weights, 0, slots)

    def update(self, rows: RowTensors, slots: Tensor, grads: Tensor, step: RowStep) -> None:
        count(rows, slots.long(), step.facts, self._policy)
        source = _summed(grads.contiguous(), slots)
        self._update(rows, slots, source, step.values, IS_SUMMED.value)

    def sum_and_update(self, rows: RowTensors, bags: SlotBags, grad: Tensor, step: RowStep) -> None:
        count(rows, bags.occurrences.slots.long(), step.facts, self._policy)
        source = _unsummed(grad, bags)
        self._update(rows, bags.occurrences.slots, source, step.values, _kind(bags))

    def _update(
        self, rows: RowTensors, slots: Tensor, source: _Source, values: StepValues, kind: int
    ) -> None:
        numbers = [getattr(values, name) for name in triton_rules.VALUES]
        exact = [values.exact.lr, values.exact.beta1, values.exact.beta2]
        _launch(
            self._kernel,
            slots.device,
            len(slots),
            rows.weights.shape[1],
            rows.weights,
            rows.state,
            slots,
            source,
            tuple(numbers),
            torch.tensor(exact, dtype=torch.float64).to(slots.device, non_blocking=True),
            KIND=kind,
            RULE=self._rule,
            S=self._state_floats,
        )


def _kind(bags: SlotBags) -> int:
    has_bags = 0 if bags.offsets is None else HAS_BAGS.value
    return has_bags | (0 if bags.weights is None else HAS_FACTORS.value)


def _summed(grads: Tensor, slots: Tensor) -> _Source:
    return _Source(grads, grads, slots, slots, slots, grads, slots, grads, 1, 1)


def _unsummed(grad: Tensor, bags: SlotBags) -> _Source:
    """The gradient of bags, with the sums of chunks done."""
    slots, order, starts = bags.occurrences
    dim, num_rows, chunk = grad.shape[2], len(slots), slot_bags.CHUNK
    counts = starts.diff()
    chunks = torch.where(counts > chunk, (counts + (chunk - 1)) // chunk, 0)
    firsts = torch.zeros_like(starts)
    torch.cumsum(chunks, 0, out=firsts[1:], dtype=torch.int32)
    num_chunks_max = 2 * len(order) // chunk  # known without waiting for the device
    source = _Source(
        sums=grad.new_empty(num_rows, dim),
        chunk_sums=grad.new_empty(num_chunks_max, dim),
        firsts=firsts,
        starts=starts,
        order=order,
        grad=grad.contiguous(),
        bags=order if bags.offsets is None else bags.bag_of,
        factors=order if bags.weights is None else bags.weights,
        num_examples=max(bags.num_examples, 1),
        num_features=bags.num_features,
    )
    if num_chunks_max > 0 and num_rows > 0:
        numbers = torch.arange(num_chunks_max, dtype=torch.int32, device=grad.device)
        owners = torch.searchsorted(firsts, numbers, right=True, out_int32=True) - 1
        _launch(
            _sum_chunk,
            grad.device,
            num_chunks_max,
            dim,
            source,
            owners,
            num_rows,
            KIND=_kind(bags),
            CHUNK=chunk,
        )
    return source


def _launch(
    kernel: Any, device: torch.device, num_programs: int, dim: int, *args: Any, **constants: Any
) -> None:
    if num_programs == 0:
        return
    block = max(16, triton.next_power_of_2(dim))
    with accelerator.current(device):
        kernel[(num_programs,)](
            *args,
            **constants,
            D=dim,
            BLOCK=block,
            num_warps=max(1, min(8, block // 128)),
            **OPTIONS,
        )
