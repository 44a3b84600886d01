"""Rows of several classes and types as a plain dict; tables of the core must equal it.

Written from the definitions, without the core: a row has the weights and the state of its class,
and is as wide as all others only where it is saved.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from random import Random

import numpy as np

from tests.property.table_model import F32, GOLDEN, RULES, Ids, Values
from tests.tables import MASK, mix64

# Dtype -> bits of fraction, exponent of the smallest normal number, largest number.
TYPES = {"bfloat16": (7, -126, 2.0**127 * (2 - 2.0**-7)), "float16": (10, -14, 65504.0)}
SALT = 3  # of the draws of stochastic rounding
NONCLK, CLICK = 0.5, 2.0


def draw_of(seed: int, key: int, stream: int, sequence: int) -> int:
    """The random bits of a key in a push."""
    of_table = mix64((seed + SALT * GOLDEN) & MASK)
    return mix64(mix64(mix64(of_table ^ key) ^ stream) ^ sequence)


def rounded(weights: np.ndarray, dtype: str, draw: int | None) -> np.ndarray:
    """Each weight as one of its two neighbours in the type: by chance, or the nearest."""
    if dtype == "float32":
        return weights
    fraction_bits, lowest, largest = TYPES[dtype]
    actual = []
    for j, weight in enumerate(weights.astype(np.float64).tolist()):
        exponent = max(int(np.frexp(weight)[1]) - 1, lowest)
        step = 2.0 ** (exponent - fraction_bits)
        whole, rest = divmod(abs(weight) / step, 1.0)
        if draw is None:
            is_up = rest > 0.5 or (rest == 0.5 and whole % 2 == 1)
        else:
            bits = mix64((draw + (j // 2 + 1) * GOLDEN) & MASK) >> 32 * (j % 2) & 0xFFFFFFFF
            is_up = goes_up(dtype, rest, bits, is_normal=abs(weight) >= 2.0**lowest)
        actual.append(np.copysign(min((whole + is_up) * step, largest), weight))
    return np.array(actual, F32)


def goes_up(dtype: str, rest: float, bits: int, *, is_normal: bool) -> bool:
    """A float32 has 16 or 13 bits that the type lacks: the chance of them all is exact."""
    if dtype == "float16" and not is_normal:
        return bits >> 1 < int(rest * 2**31)
    lacking = 16 if dtype == "bfloat16" else 13
    return rest * 2**lacking + bits % 2**lacking >= 2**lacking


@dataclass
class Row:
    row_class: int
    weights: np.ndarray
    state: np.ndarray
    show: float = 0.0
    click: float = 0.0
    delta_score: float = 0.0

    @property
    def score(self) -> float:
        return (self.show - self.click) * NONCLK + self.click * CLICK


class Rows:
    """The operations of a table that has uniform initial weights in [-0.5, 0.25)."""

    def __init__(
        self, dims: list[int], rule: str, dtype: str, threshold: float | None, *, seed: int = 1
    ) -> None:
        self.apply, self.per_weight, self.per_row = RULES[rule]
        self.dtype, self.threshold, self.seed = dtype, threshold, seed
        self.num_dims = len(dims)
        self.head = len(dims) if threshold is not None else None
        self.dims = dims + [1] * (threshold is not None)
        self.rows: dict[int, Row] = {}

    def initial(self, key: int, dim: int) -> np.ndarray:
        row = mix64(key ^ mix64((self.seed + GOLDEN) & MASK))
        bits = [mix64((row + (j + 1) * GOLDEN) & MASK) >> 40 for j in range(dim)]
        weights = F32(-0.5) + F32(0.75) * (np.array(bits, F32) * F32(2.0**-24))
        return rounded(weights, self.dtype, None)

    def new(self, key: int, row_class: int) -> Row:
        dim = self.dims[row_class]
        state = np.zeros(self.per_weight * dim + self.per_row, F32)
        return Row(row_class, self.initial(key, dim), state)

    def lookup(self, keys: list[int], row_class: int) -> np.ndarray:
        out = np.zeros((len(keys), self.dims[row_class]), F32)
        for weights, key in zip(out, keys, strict=True):
            if key in self.rows:
                actual = self.rows[key].weights
            else:
                actual = self.initial(key, 1 if self.head is not None else len(weights))
            size = min(len(actual), len(weights))
            weights[:size] = actual[:size]
        return out

    def update(
        self,
        keys: list[int],
        row_class: int,
        grads: np.ndarray,
        ids: Ids,
        values: Values,
        show_click: np.ndarray | None,
    ) -> None:
        """keys: distinct, all of one class."""
        for i, key in enumerate(keys):
            row = self.rows.get(key)
            if row is None:
                row = self.new(key, row_class if self.head is None else self.head)
                self.rows[key] = row
            grad = np.zeros(len(row.weights), F32)
            size = min(len(grad), grads.shape[1])
            grad[:size] = grads[i, :size]
            self.apply(row.weights, row.state, grad, values)
            row.weights = rounded(row.weights, self.dtype, draw_of(self.seed, key, *min(ids)))
            if show_click is not None:
                self.count(row, *show_click[i].tolist())
            if row.row_class == self.head and row.score >= (self.threshold or 0):
                self.rows[key] = self.grown(key, row, row_class)

    def count(self, row: Row, show: float, click: float) -> None:
        row.show, row.click = row.show + show, row.click + click
        gained = row.delta_score + ((show - click) * NONCLK + click * CLICK)
        row.delta_score = float(F32(gained))

    def grown(self, key: int, head: Row, row_class: int) -> Row:
        """The whole row that a head becomes."""
        row = self.new(key, row_class)
        row.weights[0] = head.weights[0]
        dim = self.dims[row_class]
        row.state[: self.per_weight * dim : dim] = head.state[: self.per_weight]
        row.state[self.per_weight * dim :] = head.state[self.per_weight :]
        row.show, row.click, row.delta_score = head.show, head.click, head.delta_score
        return row

    def wide(self, key: int) -> bytes:
        """A row as it is saved."""
        row, widest = self.rows[key], max(self.dims)
        planes = np.zeros((1 + self.per_weight, widest), F32)
        dim = len(row.weights)
        planes[0, :dim] = row.weights
        planes[1:, :dim] = row.state[: self.per_weight * dim].reshape(self.per_weight, dim)
        statistics = struct.pack("<II", 0, 0)
        if self.threshold is not None:
            statistics += struct.pack("<ddfI", row.show, row.click, row.delta_score, 0)
        return planes.tobytes() + row.state[self.per_weight * dim :].tobytes() + statistics


def values_of(random: Random) -> Values:
    return Values(
        lr=random.choice((0.0, 0.05, 0.3)),
        weight_decay=random.choice((0.0, 0.01)),
        eps=random.choice((1e-8, 1e-3)),
        dampening=random.choice((0.0, 0.4)),
        beta=random.choice((1e-8, 1.0)),
        initial_g2sum=random.choice((1e-3, 3.0)),
        l1=random.choice((0.0, 0.1)),
        upper=random.choice((np.inf, 0.3)),
        step=random.randint(1, 100),
    )
