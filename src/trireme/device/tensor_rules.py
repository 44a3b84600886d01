"""Every update rule in torch operations: the reference of the other implementations.

Operations, their order and their rounding are those of core/optim, whose files have formulas and
sources; so rows get the same bits as in a table of the core.

A rule takes weights w (K, D), state s (K, S), gradients g (K, D), all float32 on one device, and
the values of the step; it returns new weights and state. Sums over a row are (K, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trireme.device.step_values import StepValues, square_root
from trireme.errors import check_choice

Updated: TypeAlias = tuple[Tensor, Tensor]
TensorRule: TypeAlias = Callable[[Tensor, Tensor, Tensor, StepValues], Updated]

LANES = 16


def tensor_rule(rule: Mapping[str, Any]) -> TensorRule:
    """The rule of a schema. Raises BadRequest: there is none of that name."""
    name = rule["name"]
    is_shared = bool(rule.get("shared", False))
    is_by_row = rule.get("bias_correction", "global") == "row"
    rules: dict[str, TensorRule] = {
        "sgd": _sgd,
        "momentum": partial(_momentum, is_nesterov=bool(rule.get("nesterov", False))),
        "adagrad": _shared_adagrad if is_shared else _adagrad,
        "adam": partial(_adam, is_shared=is_shared, is_by_row=is_by_row),
        "ftrl": _ftrl,
        "count": _count,
        "fleet_sgd": _fleet_sgd,
        "fleet_adagrad": _shared_fleet_adagrad if is_shared else _fleet_adagrad,
        "fleet_adagrad_v2": _fleet_adagrad_v2,
        "fleet_adam": _fleet_adam,
        "fleet_shared_adam": _shared_fleet_adam,
    }
    check_choice("device block", rules, rule=name)
    return rules[name]


# ---- what rules share ----


def clip(w: Tensor, v: StepValues) -> Tensor:
    """A NaN stays a NaN."""
    w = torch.where(w < v.lower, v.lower, w)
    return torch.where(w > v.upper, v.upper, w)


def quotient(a: Tensor | float, b: Tensor | float, like: Tensor) -> Tensor:
    """a / b, rounded once. torch multiplies by a reciprocal where one of them is a number."""
    a, b = (
        x if isinstance(x, Tensor) else torch.full((), x, dtype=like.dtype, device=like.device)
        for x in (a, b)
    )
    return torch.div(a, b)


def mean_lanes(x: Tensor) -> Tensor:
    """(K, 1) the sum of (K, n) divided by n."""
    return quotient(sum_lanes(x), float(x.shape[1]), x)


def sum_lanes(x: Tensor) -> Tensor:
    """(K, 1) the sum of (K, n): sixteen partial sums, halved four times, as core/base/lanes.h."""
    num_rows, size = x.shape
    filled = torch.nn.functional.pad(x, (0, -size % LANES))
    partial_sums = x.new_zeros(num_rows, LANES)
    for chunk in filled.view(num_rows, -1, LANES).unbind(1):
        partial_sums = partial_sums + chunk
    while partial_sums.shape[1] > 1:
        low, high = partial_sums.chunk(2, dim=1)
        partial_sums = low + high
    return partial_sums


def next_count(column: Tensor) -> Tensor:
    """(K,) int64: counts, (K,) float32 with the bits of uint32, plus 1; they saturate."""
    bits = column.view(torch.int32)
    return (bits + (bits != -1).to(torch.int32)).long() & 0xFFFFFFFF


def as_float_bits(counts: Tensor) -> Tensor:
    """(K, 1) float32: the bits of (K,) int64 counts."""
    return counts.to(torch.int32).view(torch.float32)[:, None]


def _decayed(w: Tensor, g: Tensor, v: StepValues) -> Tensor:
    return g + v.weight_decay * w


# ---- rules ----


def _sgd(w: Tensor, s: Tensor, g: Tensor, v: StepValues) -> Updated:
    return clip(w - v.lr * _decayed(w, g, v), v), s


def _count(w: Tensor, s: Tensor, g: Tensor, v: StepValues) -> Updated:
    return clip(w + 1.0, v), s


def _momentum(w: Tensor, s: Tensor, g: Tensor, v: StepValues, *, is_nesterov: bool) -> Updated:
    dim = w.shape[1]
    counts = next_count(s[:, dim])
    taken = torch.where(counts == 1, 1.0, 1.0 if is_nesterov else v.share)[:, None]
    d = _decayed(w, g, v)
    buffer = v.momentum * s[:, :dim] + taken.to(w.dtype) * d
    step = d + v.momentum * buffer if is_nesterov else buffer
    return clip(w - v.lr * step, v), torch.cat([buffer, as_float_bits(counts)], 1)


def _adagrad(w: Tensor, s: Tensor, g: Tensor, v: StepValues) -> Updated:
    d = _decayed(w, g, v)
    sums = s + d * d
    return clip(w - v.lr * d / (square_root(sums) + v.eps), v), sums


def _shared_adagrad(w: Tensor, s: Tensor, g: Tensor, v: StepValues) -> Updated:
    d = _decayed(w, g, v)
    sums = s + mean_lanes(d * d)
    return clip(w - v.lr * d / (square_root(sums) + v.eps), v), sums


def _ftrl(w: Tensor, s: Tensor, g: Tensor, v: StepValues) -> Updated:
    if v.lr == 0.0:
        return w, s
    z, before = s.chunk(2, dim=1)
    squares = before + g * g
    root = square_root(squares)
    sums = z + (g - quotient(root - square_root(before), v.lr, w) * w)
    beyond = sums.abs() - v.l1
    divisor = quotient(v.beta + root, v.lr, w) + v.l2
    moved = quotient(-torch.copysign(beyond, sums), divisor, w)
    return clip(torch.where(beyond <= 0.0, 0.0, moved), v), torch.cat([sums, squares], 1)


def _adam(
    w: Tensor, s: Tensor, g: Tensor, v: StepValues, *, is_shared: bool, is_by_row: bool
) -> Updated:
    size = s.shape[1] - is_by_row
    moments, rest, step = s[:, :size], [], torch.full_like(w[:, :1], v.step_size)
    if is_by_row:
        counts = next_count(s[:, size])
        rest, step = [as_float_bits(counts)], v.step_sizes(counts)
    update = _shared_moments if is_shared else _own_moments
    w, moments = update(w, moments, _decayed(w, g, v), step, v)
    return w, torch.cat([moments, *rest], 1)


def _own_moments(w: Tensor, moments: Tensor, d: Tensor, step: Tensor, v: StepValues) -> Updated:
    """moments: (K, 2 D), first then second ones. d: gradients with decay. step: (K, 1)."""
    m, square = moments.chunk(2, dim=1)
    m = m + v.rate1 * (d - m)
    square = square + v.rate2 * (d * d - square)
    w = clip(w - step * (m / (square_root(square) + v.eps)), v)
    return w, torch.cat([m, square], 1)


def _shared_moments(w: Tensor, moments: Tensor, d: Tensor, step: Tensor, v: StepValues) -> Updated:
    """moments: (K, 2)."""
    m, square = moments.chunk(2, dim=1)
    means = m + v.rate1 * (d - m)
    squares = square + v.rate2 * (d * d - square)
    w = clip(w - step * (means / (square_root(squares) + v.eps)), v)
    return w, torch.cat([mean_lanes(means), mean_lanes(squares)], 1)


# ---- Fleet's: a head, weight 0, and a tail, which learns from the second update on ----


def _is_tail_due(counts: Tensor) -> Tensor:
    """(K, 1)"""
    return (counts > 1)[:, None]


def _fleet_sgd(w: Tensor, s: Tensor, g: Tensor, v: StepValues) -> Updated:
    counts = next_count(s[:, 0])
    new = clip(w - v.lr * g, v)
    return _first_or_all(counts, new, w), as_float_bits(counts)


def _first_or_all(counts: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """(K, D): the head of new, and its tail where it is due."""
    return torch.cat([new[:, :1], torch.where(_is_tail_due(counts), new, old)[:, 1:]], 1)


def _fleet_adagrad(w: Tensor, s: Tensor, g: Tensor, v: StepValues) -> Updated:
    dim = w.shape[1]
    sums, counts = s[:, :dim], next_count(s[:, dim])
    new = clip(w - v.lr * g * _ratio(sums, v), v)
    new_sums = _first_or_all(counts, sums + g * g, sums)
    return _first_or_all(counts, new, w), torch.cat([new_sums, as_float_bits(counts)], 1)


def _ratio(sums: Tensor, v: StepValues) -> Tensor:
    return square_root(quotient(v.initial_g2sum, v.initial_g2sum + sums, sums))


def _shared_fleet_adagrad(w: Tensor, s: Tensor, g: Tensor, v: StepValues) -> Updated:
    def part(w: Tensor, sums: Tensor, g: Tensor) -> Updated:
        rate = v.lr * _ratio(sums, v)
        return clip(w - rate * g, v), sums + mean_lanes(g * g)

    return _by_parts(part, w, s, g)


def _fleet_adagrad_v2(w: Tensor, s: Tensor, g: Tensor, v: StepValues) -> Updated:
    def part(w: Tensor, sums: Tensor, g: Tensor) -> Updated:
        sums = sums + mean_lanes(g * g)
        return clip(w - v.lr * g / (square_root(sums) + v.eps), v), sums

    return _by_parts(part, w, s, g)


def _by_parts(
    part: Callable[[Tensor, Tensor, Tensor], Updated], w: Tensor, s: Tensor, g: Tensor
) -> Updated:
    """Update head and tail, of which s has a sum each, and a count."""
    counts = next_count(s[:, 2])
    head, head_sum = part(w[:, :1], s[:, :1], g[:, :1])
    tail, tail_sum = w[:, 1:], s[:, 1:2]
    if w.shape[1] > 1:
        due = _is_tail_due(counts)
        new_tail, new_sum = part(tail, tail_sum, g[:, 1:])
        tail, tail_sum = torch.where(due, new_tail, tail), torch.where(due, new_sum, tail_sum)
    return torch.cat([head, tail], 1), torch.cat([head_sum, tail_sum, as_float_bits(counts)], 1)


def _fleet_adam(w: Tensor, s: Tensor, g: Tensor, v: StepValues) -> Updated:
    dim = w.shape[1]
    counts, tail_counts, step, tail_step, due = _fleet_steps(s[:, -2:], dim, v)
    moments = s[:, : 2 * dim]
    if dim == 1:
        w, moments = _own_moments(w, moments, g, step, v)
    else:
        steps = torch.cat([step, tail_step.expand(-1, dim - 1)], 1)
        new, new_moments = _own_moments(w, moments, g, steps, v)
        w = _first_or_all(counts, new, w)
        is_kept = ~due.expand(-1, 2 * dim).clone()
        is_kept[:, 0] = is_kept[:, dim] = False
        moments = torch.where(is_kept, moments, new_moments)
    return w, torch.cat([moments, as_float_bits(counts), as_float_bits(tail_counts)], 1)


def _shared_fleet_adam(w: Tensor, s: Tensor, g: Tensor, v: StepValues) -> Updated:
    dim = w.shape[1]
    counts, tail_counts, step, tail_step, due = _fleet_steps(s[:, 4:], dim, v)
    head, head_moments = _shared_moments(w[:, :1], s[:, :2], g[:, :1], step, v)
    tail, tail_moments = w[:, 1:], s[:, 2:4]
    if dim > 1:
        new_tail, new_moments = _shared_moments(tail, tail_moments, g[:, 1:], tail_step, v)
        tail = torch.where(due, new_tail, tail)
        tail_moments = torch.where(due, new_moments, tail_moments)
    numbers = [as_float_bits(counts), as_float_bits(tail_counts)]
    return torch.cat([head, tail], 1), torch.cat([head_moments, tail_moments, *numbers], 1)


def _fleet_steps(
    state: Tensor, dim: int, v: StepValues
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Counts of head and tail after this update, (K,), their step sizes, (K, 1), and whether the
    tail learns. state: (K, 2), the counts.
    """
    counts = next_count(state[:, 0])
    due = (counts > 1) & (dim > 1)
    before = state[:, 1].view(torch.int32).long() & 0xFFFFFFFF
    tail_counts = torch.where(due, next_count(state[:, 1]), before)
    tail_step = v.step_sizes(tail_counts.clamp(min=1))
    return counts, tail_counts, v.step_sizes(counts), tail_step, due[:, None]
