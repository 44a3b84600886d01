"""The gradient norm of a step: an exact sum of squares, however gradients are divided."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.seeds import SEED
from trireme.errors import BadRequest, NotFinite
from trireme.protocol.clipping import (
    Clip,
    NormReply,
    norm_from_wire,
    norm_of,
    norm_of_step,
    square_sum,
)


def some_values(num: int) -> np.ndarray:
    """Of all magnitudes that float32 has, subnormal ones and zeros too."""
    generator = np.random.default_rng(SEED)
    values = generator.normal(size=num) * 2.0 ** generator.uniform(-150, 60, num)
    values[::7] = 0
    return values.astype(np.float32)


def test_a_sum_of_squares_is_exact() -> None:
    values = np.append(some_values(500), np.float32([3.4028235e38, 1e-45, -0.0, -1.5]))
    expected = sum(Fraction(float(value)) ** 2 for value in values) * 2**298
    assert square_sum(values) == expected


def test_it_is_the_same_in_any_order_and_parts() -> None:
    values = some_values(200_000)
    whole = square_sum(values)
    shuffled = np.random.default_rng(SEED).permutation(values)
    parts = [square_sum(part) for part in np.split(shuffled, [3, 70_000, 70_001])]
    assert whole == sum(part for part in parts if part is not None)
    assert square_sum(values.reshape(400, 500).T) == whole
    assert norm_of(whole or 0) == pytest.approx(math.sqrt(float(np.sum(values.astype(float) ** 2))))


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_has_no_sum(wrong: float) -> None:
    assert square_sum(np.float32([1.0, wrong])) is None
    assert square_sum(np.float32([])) == 0


@pytest.mark.parametrize("limit", [0.5, 3.0, 100.0])
def test_clipping_is_torchs(limit: float) -> None:
    gradient = np.random.default_rng(SEED).normal(size=300).astype(np.float32)
    parameter = torch.nn.Parameter(torch.zeros(300))
    parameter.grad = torch.from_numpy(gradient.copy())
    torch.nn.utils.clip_grad_norm_([parameter], limit)
    actual = Clip("norm", limit).clipped(gradient, norm_of(square_sum(gradient) or 0))
    np.testing.assert_allclose(actual, parameter.grad.numpy(), rtol=2e-6)
    parameter.grad = torch.from_numpy(gradient.copy())
    torch.nn.utils.clip_grad_value_([parameter], limit)
    np.testing.assert_array_equal(
        Clip("value", limit).clipped(gradient, None), parameter.grad.numpy()
    )


def test_the_norm_of_a_step_is_combined_from_all_servers() -> None:
    def reply(total: int | None, norm: float | None = None, *, applied: bool = False) -> NormReply:
        sent = NormReply(total, norm, applied)
        assert NormReply.from_wire(sent.to_wire()) == sent
        return sent

    assert norm_of_step(3, [reply(9 << 298), reply(16 << 298), reply(0)]) == 5.0
    assert norm_of_step(3, [reply(9 << 298), reply(None, 2.0, applied=True)]) == 2.0
    assert norm_of_step(3, [reply(None, applied=True)]) is None
    with pytest.raises(NotFinite, match=r"in step 3, found NaN or infinity on servers \[1\]"):
        norm_of_step(3, [reply(1), reply(None)])


def test_malformed_clips_and_norms_are_refused() -> None:
    assert Clip.from_wire(Clip("norm", 2.0).to_wire()) == Clip("norm", 2.0)
    wrong = [["norm"], ["norm", 0.0], ["value", math.inf], ["value", math.nan], ["all", 1.0], 1.0]
    for body in wrong:
        with pytest.raises(BadRequest, match="push: expected clip"):
            Clip.from_wire(body)
    for body in (-1.0, math.inf, math.nan, "1", True):
        with pytest.raises(BadRequest, match="pull: expected norm"):
            norm_from_wire(body)
