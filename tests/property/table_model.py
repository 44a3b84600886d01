"""A table as a plain dict; tables of the core must equal it bit for bit.

Written from the definitions, without the core, for one caller: rows are NumPy arrays in a dict,
marks an array per stream. Every operation in float32 stands for one of the core's, in its order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.property.table_life import NOTHING, Columns, Life, Policy, Statistics, power
from tests.tables import MASK, mix64, unmix64

NUM_BUCKETS = 4096
GOLDEN = 0x9E3779B97F4A7C15
F32 = np.float32
Ids = list[tuple[int, int]]


@functools.cache
def bucket_of(key: int) -> int:
    return mix64(key) >> 52


def key_at(bucket: int, rest: int) -> int:
    """The key of this bucket whose hash ends in these 52 bits."""
    return unmix64(bucket << 52 | rest)


@dataclass(frozen=True)
class Values:
    """The numbers of a step, as in RuleValues."""

    lr: float
    weight_decay: float = 0.0
    eps: float = 1e-10
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    dampening: float = 0.5
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    initial_g2sum: float = 3.0
    lower: float = -np.inf
    upper: float = np.inf
    step: int = 1


# A rule changes weights (D,) and state (W,) in place, for a gradient (D,).
Apply = Callable[[np.ndarray, np.ndarray, np.ndarray, Values], None]


def decayed(weights: np.ndarray, grad: np.ndarray, v: Values) -> np.ndarray:
    return grad + F32(v.weight_decay) * weights


def move(weights: np.ndarray, step: np.ndarray, v: Values) -> None:
    weights -= step
    if v.lower > -np.inf or v.upper < np.inf:
        weights.clip(F32(v.lower), F32(v.upper), out=weights)


def sgd(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    move(weights, F32(v.lr) * decayed(weights, grad, v), v)


def momentum(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    buffer = next_buffer(state, decayed(weights, grad, v), v, F32(1 - v.dampening))
    move(weights, F32(v.lr) * buffer, v)


def nesterov(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    grad = decayed(weights, grad, v)
    move(weights, F32(v.lr) * (grad + F32(v.momentum) * next_buffer(state, grad, v, F32(1))), v)


def next_buffer(state: np.ndarray, grad: np.ndarray, v: Values, share: np.float32) -> np.ndarray:
    taken = F32(1) if next_count(state[-1:]) == 1 else share
    state[:-1] = F32(v.momentum) * state[:-1] + taken * grad
    return state[:-1]


def adagrad(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    grad = decayed(weights, grad, v)
    state += grad * grad
    move(weights, F32(v.lr) * grad / (np.sqrt(state) + F32(v.eps)), v)


def shared_adagrad(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    grad = decayed(weights, grad, v)
    state += sum_of(grad * grad) / F32(len(grad))
    move(weights, F32(v.lr) * grad / (np.sqrt(state) + F32(v.eps)), v)


def sum_of(squares: np.ndarray) -> np.float32:
    """Sixteen partial sums, of every sixteenth element each; then halves are added four times."""
    padded = np.zeros(-len(squares) % 16 + len(squares), F32)
    padded[: len(squares)] = squares
    partial = np.zeros(16, F32)
    for part in padded.reshape(-1, 16):
        partial += part
    for half in (8, 4, 2, 1):
        partial = partial[:half] + partial[half:]
    return partial[0]


def adam(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    adam_at(v.step, weights, state, grad, v)


def row_adam(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    adam_at(next_count(state[-1:]), weights, state[:-1], grad, v)


def adam_at(t: int, weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    means, squares = np.split(state, 2)
    grad = decayed(weights, grad, v)
    means += F32(1 - v.beta1) * (grad - means)
    squares += F32(1 - v.beta2) * (grad * grad - squares)
    move(weights, adam_size(t, v) * (means / (np.sqrt(squares) + F32(v.eps))), v)


def adam_size(t: int, v: Values) -> np.float32:
    return F32(v.lr * np.sqrt(1 - power(v.beta2, t)) / (1 - power(v.beta1, t)))


def shared_adam(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    shared_adam_at(v.step, weights, state, grad, v)


def shared_row_adam(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    shared_adam_at(next_count(state[-1:]), weights, state[:-1], grad, v)


def shared_adam_at(
    t: int, weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values
) -> None:
    grad = decayed(weights, grad, v)
    mean = state[0] + F32(1 - v.beta1) * (grad - state[0])
    square = state[1] + F32(1 - v.beta2) * (grad * grad - state[1])
    state[:] = sum_of(mean) / F32(len(grad)), sum_of(square) / F32(len(grad))
    move(weights, adam_size(t, v) * (mean / (np.sqrt(square) + F32(v.eps))), v)


def ftrl(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    if v.lr == 0:
        return
    z, n = np.split(state, 2)
    root = np.sqrt(n + grad * grad)
    z += grad - (root - np.sqrt(n)) / F32(v.lr) * weights
    n += grad * grad
    beyond = np.abs(z) - F32(v.l1)
    divisor = (F32(v.beta) + root) / F32(v.lr) + F32(v.l2)
    with np.errstate(invalid="ignore"):  # 0 / 0, not used
        weights[:] = np.where(beyond <= 0, F32(0), -np.copysign(beyond, z) / divisor)
    move(weights, F32(0), v)


def count(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    move(weights, F32(-1), v)


def next_count(state: np.ndarray) -> int:
    """Counts an update in the last float of a state, as an integer."""
    count = state[-1:].view(np.uint32)
    count += np.uint32(1)
    return int(count[0])


def fleet_sgd(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    size = len(weights) if next_count(state) > 1 else 1
    move(weights[:size], F32(v.lr) * grad[:size], v)


def fleet_adagrad(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    size = len(weights) if next_count(state) > 1 else 1
    sums, grad = state[:size], grad[:size]
    move(
        weights[:size],
        F32(v.lr) * grad * np.sqrt(F32(v.initial_g2sum) / (F32(v.initial_g2sum) + sums)),
        v,
    )
    sums += grad * grad


def shared_fleet_adagrad(
    weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values
) -> None:
    parts = [slice(0, 1), slice(1, None)] if next_count(state) > 1 else [slice(0, 1)]
    for sums, part in zip((state[:1], state[1:2]), parts, strict=False):
        gradient = grad[part]
        if not len(gradient):
            continue
        rate = F32(v.lr) * np.sqrt(F32(v.initial_g2sum) / (F32(v.initial_g2sum) + sums[0]))
        move(weights[part], rate * gradient, v)
        sums += sum_of(gradient * gradient) / F32(len(gradient))


def fleet_adagrad_v2(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    for sums, part in zip((state[:1], state[1:2]), parts_of(grad, next_count(state)), strict=False):
        gradient = grad[part]
        sums += sum_of(gradient * gradient) / F32(len(gradient))
        move(weights[part], F32(v.lr) * gradient / (np.sqrt(sums[0]) + F32(v.eps)), v)


def parts_of(grad: np.ndarray, count: int) -> list[slice]:
    """The parts of a row that learn in the update of this number: head and tail."""
    return [slice(0, 1), slice(1, None)][: 2 if count > 1 and len(grad) > 1 else 1]


def fleet_adam(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    v = dataclasses.replace(v, weight_decay=0.0)
    means, squares = np.split(state[:-2], 2)
    for part, t in steps_of(state[-2:], grad):
        moments = np.concatenate([means[part], squares[part]])
        adam_at(t, weights[part], moments, grad[part], v)
        means[part], squares[part] = np.split(moments, 2)


def shared_fleet_adam(weights: np.ndarray, state: np.ndarray, grad: np.ndarray, v: Values) -> None:
    v = dataclasses.replace(v, weight_decay=0.0)
    for moments, (part, t) in zip((state[:2], state[2:4]), steps_of(state[4:], grad), strict=False):
        shared_adam_at(t, weights[part], moments, grad[part], v)


def steps_of(counts: np.ndarray, grad: np.ndarray) -> list[tuple[slice, int]]:
    """The parts of a row that learn, each with the number of its step; counts them."""
    head = next_count(counts[:1])
    parts = parts_of(grad, head)
    return list(
        zip(parts, [head, next_count(counts[1:])] if len(parts) == 2 else [head], strict=True)
    )


# Rule of tests.tables.RULES -> how it applies, floats of state per weight and per row.
RULES: dict[str, tuple[Apply, int, int]] = {
    "sgd": (sgd, 0, 0),
    "momentum": (momentum, 1, 1),
    "nesterov": (nesterov, 1, 1),
    "adagrad": (adagrad, 1, 0),
    "shared adagrad": (shared_adagrad, 0, 1),
    "adam": (adam, 2, 0),
    "row adam": (row_adam, 2, 1),
    "shared adam": (shared_adam, 0, 2),
    "shared row adam": (shared_row_adam, 0, 3),
    "ftrl": (ftrl, 2, 0),
    "count": (count, 0, 0),
    "fleet sgd": (fleet_sgd, 0, 1),
    "fleet adagrad": (fleet_adagrad, 1, 1),
    "shared fleet adagrad": (shared_fleet_adagrad, 0, 3),
    "fleet adagrad v2": (fleet_adagrad_v2, 0, 3),
    "fleet adam": (fleet_adam, 2, 2),
    "shared fleet adam": (shared_fleet_adam, 0, 6),
}


class Model:
    """The operations of a table that has uniform initial weights, on a dict."""

    def __init__(
        self,
        dim: int,
        rule: str,
        *,
        seed: int = 1,
        low: float = -0.5,
        high: float = 0.25,
        accumulator: float = 0.0,
        absent: str = "initial",
        num_streams: int = 4,
        policy: Policy | None = None,
    ) -> None:
        self.apply, per_weight, per_row = RULES[rule]
        self.dim = dim
        self.num_state = per_weight * dim + per_row
        self.seed = mix64((seed + GOLDEN) & MASK)
        self.low, self.width = F32(low), F32(high) - F32(low)
        self.accumulator = accumulator
        self.absent_is_zero = absent == "zeros"
        self.rows: dict[int, np.ndarray] = {}  # key -> (D + W,): weights, then state
        self._keys_of: dict[int, set[int]] = defaultdict(set)
        self.marks = np.zeros((num_streams, NUM_BUCKETS), np.uint64)
        self.initial = functools.cache(self._initial)
        self.life = Life(policy or Policy())

    def _initial(self, key: int) -> np.ndarray:
        numbers = np.arange(1, self.dim + 1, dtype=np.uint64)
        bits = mix64(np.uint64(mix64(key ^ self.seed)) + numbers * np.uint64(GOLDEN)) >> 40
        return self.low + self.width * (bits.astype(F32) * F32(2.0**-24))

    def lookup(self, keys: np.ndarray) -> tuple[np.ndarray, int]:
        """The weights of each key, and how many keys have no row."""
        out, missing = np.zeros((len(keys), self.dim), F32), 0
        for i, key in enumerate(keys.tolist()):
            row = self.rows.get(key)
            if row is not None:
                out[i] = row[: self.dim]
                continue
            missing += 1
            if not self.absent_is_zero:
                out[i] = self.initial(key)
        return out, missing

    def update(
        self,
        keys: np.ndarray,
        grads: np.ndarray,
        ids: Ids,
        values: Values,
        columns: Columns = NOTHING,
    ) -> int:
        """Returns how many keys it was applied to: those of buckets that have none of the ids."""
        self.life.version = max(self.life.version, columns.version)
        done = np.logical_or.reduce([self.marks[stream] >= number for stream, number in ids])
        applied = 0
        for i, (key, grad) in enumerate(zip(keys.tolist(), grads, strict=True)):
            if done[bucket_of(key)]:
                continue
            row = self.rows.get(key)
            if row is None:
                row = np.full(self.dim + self.num_state, self.accumulator, F32)
                row[: self.dim] = self.initial(key)
                self._insert(key, row)
                self.life.counters["admitted"] += 1
            self.life.push(key, i, columns)
            self.apply(row[: self.dim], row[self.dim :], grad, values)
            applied += 1
        for stream, number in ids:
            marks = self.marks[stream]
            marks[:] = np.where(done, marks, np.maximum(marks, np.uint64(number)))
        if self.life.policy.max_rows is not None:
            for bucket in [bucket for bucket in self._keys_of if not done[bucket]]:
                self._evict(bucket)
        return applied

    def advance(self, ids: Ids) -> None:
        for stream, number in ids:
            np.maximum(self.marks[stream], number, out=self.marks[stream])

    def keys_of(self, bucket: int) -> list[int]:
        return list(self._keys_of.get(bucket, ()))

    def _insert(self, key: int, row: np.ndarray) -> None:
        self.rows[key] = row
        self._keys_of[bucket_of(key)].add(key)

    def _drop(self, key: int) -> None:
        del self.rows[key]
        self._keys_of[bucket_of(key)].remove(key)

    def _evict(self, bucket: int) -> int:
        keys = self._keys_of.get(bucket, set())
        surplus = self.life.surplus(keys, int(self.marks[:, bucket].sum()))
        self._remove(bucket, surplus)
        self.life.counters["evicted"] += len(surplus)
        return len(surplus)

    def _remove(self, bucket: int, keys: list[int]) -> None:
        for key in keys:
            self._drop(key)
            self.life.remove(bucket, key, len(self._keys_of[bucket]))

    def shrink(self, bucket: int, time: int, version: int, *, day_over: bool) -> tuple[int, int]:
        self.life.version = max(self.life.version, version)
        expired = [
            key
            for key in self.keys_of(bucket)
            if self.life.is_expired(key, time, day_over=day_over)
        ]
        self._remove(bucket, expired)
        self.life.counters["expired"] += len(expired)
        return len(expired), self._evict(bucket)

    def settle(self, keys: np.ndarray, delta_scores: np.ndarray) -> None:
        for key, score in zip(keys.tolist(), delta_scores, strict=True):
            if (row := self.life.statistics.get(key)) is not None:
                row.delta_score = float(F32(row.delta_score) - score)

    def erase(self, keys: np.ndarray) -> int:
        erased = 0
        for key in keys.tolist():
            if key in self.rows:
                self._remove(bucket_of(key), [key])
                erased += 1
        return erased

    def contains(self, keys: np.ndarray) -> list[bool]:
        return [key in self.rows for key in keys.tolist()]

    def snapshot(self, bucket: int, since: int = 0) -> tuple[dict[int, bytes], dict[int, int]]:
        """The bytes of each row, by key; the marks that are not 0, by stream."""
        statistics, is_scored = self.life.statistics, self.life.policy.is_scored
        rows = {
            key: self.rows[key].tobytes() + statistics[key].pack(is_scored)
            for key in self.keys_of(bucket)
            if since == 0 or statistics[key].version > since
        }
        marks = enumerate(self.marks[:, bucket].tolist())
        return rows, {stream: mark for stream, mark in marks if mark > 0}

    def restore(self, bucket: int, rows: dict[int, bytes], marks: dict[int, int]) -> None:
        for key in self.keys_of(bucket):
            self._drop(key)
            del self.life.statistics[key]
        self.life.restore(bucket, self._put(rows))
        self.marks[:, bucket] = [marks.get(stream, 0) for stream in range(len(self.marks))]

    def apply_rows(self, bucket: int, rows: dict[int, bytes], removed: list[int]) -> None:
        """Remove keys, then put rows in."""
        for key in removed:
            if key in self.rows:
                self._drop(key)
                del self.life.statistics[key]
        self.life.put(self._put(rows))

    def _put(self, rows: dict[int, bytes]) -> dict[int, Statistics]:
        """Returns the rows' statistics."""
        at = 4 * (self.dim + self.num_state)
        for key, row in rows.items():
            self._insert(key, np.frombuffer(row[:at], F32).copy())
        return {key: Statistics.unpack(row[at:]) for key, row in rows.items()}


def rows_of(content: Any) -> tuple[dict[int, bytes], dict[int, int]]:
    """What a table's snapshot() returned, as a model's does; checks that no key occurs twice."""
    assert not content.classes.any(), content.classes
    keys = content.keys.tolist()
    actual = {key: row.tobytes() for key, row in zip(keys, content.rows, strict=True)}
    assert len(actual) == len(keys), f"a key twice: {sorted(keys)}"
    return actual, content.marks
