"""Update rules as functions of Triton kernels, one row per program.

Operations, their order and their rounding are those of core/optim and of tensor_rules.py: sums of a
row in sixteen lanes, division and square root rounded once, no fused multiply-add (the kernels are
compiled with enable_fp_fusion=False). So rows get the same bits.

A rule takes vectors over the columns of a row and returns new weights; it loads and stores state.
`v` is a tuple of the step's float32 values, in the order of VALUES; `exact` points to lr, beta1 and
beta2 as float64.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

# Whether kernels run in Triton's interpreter, on CPU tensors: TRITON_INTERPRET=1 before the import.
is_interpreted: bool = triton.knobs.runtime.interpret

VALUES = (
    *("lr", "weight_decay", "eps", "rate1", "rate2", "step_size"),
    *("momentum", "share", "beta", "l1", "l2", "initial_g2sum", "lower", "upper"),
)

LR: tl.constexpr = tl.constexpr(0)
WEIGHT_DECAY: tl.constexpr = tl.constexpr(1)
EPS: tl.constexpr = tl.constexpr(2)
RATE1: tl.constexpr = tl.constexpr(3)
RATE2: tl.constexpr = tl.constexpr(4)
STEP_SIZE: tl.constexpr = tl.constexpr(5)
MOMENTUM: tl.constexpr = tl.constexpr(6)
SHARE: tl.constexpr = tl.constexpr(7)
BETA: tl.constexpr = tl.constexpr(8)
L1: tl.constexpr = tl.constexpr(9)
L2: tl.constexpr = tl.constexpr(10)
INITIAL_G2SUM: tl.constexpr = tl.constexpr(11)
LOWER: tl.constexpr = tl.constexpr(12)
UPPER: tl.constexpr = tl.constexpr(13)


# ---- what rules share ----


@triton.jit
def clip(w, v):
    w = tl.where(w < v[LOWER], v[LOWER], w)
    return tl.where(w > v[UPPER], v[UPPER], w)


@triton.jit
def _halved(x, HALF: tl.constexpr):
    low, high = tl.split(tl.permute(tl.reshape(x, (2, HALF)), (1, 0)))
    return low + high


@triton.jit
def sum_lanes(x, BLOCK: tl.constexpr):
    """The sum of a vector whose unused columns are 0, as core/base/lanes.h."""
    lines = tl.reshape(x, (BLOCK // 16, 16))
    number = tl.arange(0, BLOCK // 16)[:, None]
    total = tl.zeros((16,), tl.float32)
    for line in tl.static_range(BLOCK // 16):
        total = total + tl.sum(tl.where(number == line, lines, 0.0), axis=0)  # of one line
    total = _halved(_halved(_halved(total, 8), 4), 2)
    return tl.sum(total, axis=0)


@triton.jit
def mean_lanes(x, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """SIZE: how many columns are in the mask."""
    size = tl.full((), SIZE, tl.float32)
    return tl.div_rn(sum_lanes(tl.where(mask, x, 0.0), BLOCK), size)


@triton.jit
def store_number(at, number):
    """Store a number of the row, after every thread of the program has loaded the one before."""
    tl.debug_barrier()
    tl.store(at, number)


@triton.jit
def next_count(count):
    """The count that a pointer to float32 leads to, as uint32, plus 1; it saturates."""
    n = tl.load(count).to(tl.uint32, bitcast=True).to(tl.int64)
    n = tl.where(n == 4294967295, n, n + 1)
    store_number(count, n.to(tl.uint32).to(tl.float32, bitcast=True))
    return n


@triton.jit
def _power(base, n):
    result = tl.full((), 1.0, tl.float64)
    while n > 0:
        result = tl.where((n & 1) == 1, result * base, result)
        base = base * base
        n = n >> 1
    return result


@triton.jit
def step_size_at(n, exact):
    """Of Adam in the n-th update of a row."""
    root = tl.sqrt(1.0 - _power(tl.load(exact + 2), n))
    size = tl.load(exact) * root / (1.0 - _power(tl.load(exact + 1), n))
    return size.to(tl.float32)


# ---- rules of whole rows ----


@triton.jit
def sgd(w, g, v):
    return clip(w - v[LR] * (g + v[WEIGHT_DECAY] * w), v)


@triton.jit
def momentum(w, g, state, cols, mask, v, D: tl.constexpr, NESTEROV: tl.constexpr):
    share = 1.0 if NESTEROV else v[SHARE]
    taken = tl.where(next_count(state + D) == 1, 1.0, share)
    d = g + v[WEIGHT_DECAY] * w
    buffer = v[MOMENTUM] * tl.load(state + cols, mask, 0.0) + taken * d
    tl.store(state + cols, buffer, mask)
    step = buffer
    if NESTEROV:
        step = d + v[MOMENTUM] * buffer
    return clip(w - v[LR] * step, v)


@triton.jit
def adagrad(w, g, state, cols, mask, v):
    d = g + v[WEIGHT_DECAY] * w
    sums = tl.load(state + cols, mask, 0.0) + d * d
    tl.store(state + cols, sums, mask)
    return clip(w - tl.div_rn(v[LR] * d, tl.sqrt_rn(sums) + v[EPS]), v)


@triton.jit
def shared_adagrad(w, g, state, mask, v, D: tl.constexpr, BLOCK: tl.constexpr):
    d = g + v[WEIGHT_DECAY] * w
    total = tl.load(state) + mean_lanes(d * d, mask, D, BLOCK)
    store_number(state, total)
    return clip(w - tl.div_rn(v[LR] * d, tl.sqrt_rn(total) + v[EPS]), v)


@triton.jit
def ftrl(w, g, state, cols, mask, v, D: tl.constexpr):
    before = tl.load(state + D + cols, mask, 0.0)
    squares = before + g * g
    root = tl.sqrt_rn(squares)
    sigma = tl.div_rn(root - tl.sqrt_rn(before), v[LR])
    sums = tl.load(state + cols, mask, 0.0) + (g - sigma * w)
    beyond = tl.abs(sums) - v[L1]
    moved = tl.where(sums < 0.0, beyond, -beyond)
    moved = tl.div_rn(moved, tl.div_rn(v[BETA] + root, v[LR]) + v[L2])
    w_new = clip(tl.where(beyond <= 0.0, 0.0, moved), v)
    is_step = v[LR] != 0.0
    tl.store(state + cols, sums, mask & is_step)
    tl.store(state + D + cols, squares, mask & is_step)
    return tl.where(is_step, w_new, w)


@triton.jit
def own_moments(w, d, m_ptr, v_ptr, mask, step, v):
    """m_ptr, v_ptr: to the moments of each column. step: of the row, or of each column."""
    mean = tl.load(m_ptr, mask, 0.0)
    square = tl.load(v_ptr, mask, 0.0)
    mean = mean + v[RATE1] * (d - mean)
    square = square + v[RATE2] * (d * d - square)
    tl.store(m_ptr, mean, mask)
    tl.store(v_ptr, square, mask)
    return clip(w - step * tl.div_rn(mean, tl.sqrt_rn(square) + v[EPS]), v)


@triton.jit
def shared_moments(w, d, moments, mask, step, v, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """moments: to m, then v. SIZE: how many columns are in the mask."""
    mean = tl.load(moments)
    square = tl.load(moments + 1)
    means = mean + v[RATE1] * (d - mean)
    squares = square + v[RATE2] * (d * d - square)
    store_number(moments, mean_lanes(means, mask, SIZE, BLOCK))
    store_number(moments + 1, mean_lanes(squares, mask, SIZE, BLOCK))
    return clip(w - step * tl.div_rn(means, tl.sqrt_rn(squares) + v[EPS]), v)


@triton.jit
def adam(w, g, state, cols, mask, v, step, D: tl.constexpr):
    d = g + v[WEIGHT_DECAY] * w
    return own_moments(w, d, state + cols, state + D + cols, mask, step, v)


@triton.jit
def apply(
    w, g, state, cols, mask, v, exact, RULE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """The new weights of a row. state: to its floats."""
    if RULE == "sgd":
        return sgd(w, g, v)
    elif RULE == "count":
        return clip(w + 1.0, v)
    elif RULE == "momentum" or RULE == "nesterov":
        return momentum(w, g, state, cols, mask, v, D, RULE == "nesterov")
    elif RULE == "adagrad":
        return adagrad(w, g, state, cols, mask, v)
    elif RULE == "shared_adagrad":
        return shared_adagrad(w, g, state, mask, v, D, BLOCK)
    elif RULE == "ftrl":
        return ftrl(w, g, state, cols, mask, v, D)
    elif RULE == "adam":
        return adam(w, g, state, cols, mask, v, v[STEP_SIZE], D)
    elif RULE == "row_adam":
        step = step_size_at(next_count(state + 2 * D), exact)
        return adam(w, g, state, cols, mask, v, step, D)
    elif RULE == "shared_adam":
        d = g + v[WEIGHT_DECAY] * w
        return shared_moments(w, d, state, mask, v[STEP_SIZE], v, D, BLOCK)
    else:
        tl.static_assert(RULE == "shared_row_adam")
        d = g + v[WEIGHT_DECAY] * w
        step = step_size_at(next_count(state + 2), exact)
        return shared_moments(w, d, state, mask, step, v, D, BLOCK)


# ---- Fleet's: part 0 is the head, column 0; part 1 is the tail, the columns from 1 on ----


@triton.jit
def count_at(RULE: tl.constexpr, D: tl.constexpr):
    """Where in a row's state the count of its updates is."""
    if RULE == "fleet_sgd":
        return 0
    elif RULE == "fleet_adagrad":
        return D
    elif RULE == "fleet_adam":
        return 2 * D
    elif RULE == "fleet_shared_adam":
        return 4
    else:
        return 2


@triton.jit
def apply_part(
    w,
    g,
    state,
    cols,
    mask,
    num_updates,
    v,
    exact,
    PART: tl.constexpr,
    RULE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The new weights of a part of a row."""
    SIZE: tl.constexpr = 1 if PART == 0 else D - 1
    if RULE == "fleet_sgd":
        return clip(w - v[LR] * g, v)
    elif RULE == "fleet_adagrad":
        sums = tl.load(state + cols, mask, 0.0)
        tl.store(state + cols, sums + g * g, mask)
        return clip(w - v[LR] * g * fleet_ratio(sums, v), v)
    elif RULE == "fleet_shared_adagrad":
        total = tl.load(state + PART)
        store_number(state + PART, total + mean_lanes(g * g, mask, SIZE, BLOCK))
        return clip(w - v[LR] * fleet_ratio(total, v) * g, v)
    elif RULE == "fleet_adagrad_v2":
        total = tl.load(state + PART) + mean_lanes(g * g, mask, SIZE, BLOCK)
        store_number(state + PART, total)
        return clip(w - tl.div_rn(v[LR] * g, tl.sqrt_rn(total) + v[EPS]), v)
    elif RULE == "fleet_adam":
        n = num_updates if PART == 0 else next_count(state + 2 * D + 1)
        step = step_size_at(n, exact)
        return own_moments(w, g, state + cols, state + D + cols, mask, step, v)
    else:
        tl.static_assert(RULE == "fleet_shared_adam")
        n = num_updates if PART == 0 else next_count(state + 5)
        step = step_size_at(n, exact)
        return shared_moments(w, g, state + 2 * PART, mask, step, v, SIZE, BLOCK)


@triton.jit
def fleet_ratio(sums, v):
    initial = tl.zeros_like(sums) + v[INITIAL_G2SUM]
    return tl.sqrt_rn(tl.div_rn(initial, initial + sums))


def name_of(rule: Mapping[str, Any]) -> str:
    """What the kernels call the rule of a schema."""
    name = str(rule["name"])
    if name == "momentum":
        return "nesterov" if rule.get("nesterov") else name
    if name == "adam":
        row = "row_" if rule.get("bias_correction") == "row" else ""
        return f"{'shared_' if rule.get('shared') else ''}{row}adam"
    if name in ("adagrad", "fleet_adagrad") and rule.get("shared"):
        return "fleet_shared_adagrad" if name.startswith("fleet") else "shared_adagrad"
    return name
