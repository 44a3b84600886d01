"""The numbers of one step of a rule as float32 computes with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme import _core
from trireme.optim import rule_values


def float32(value: float) -> float:
    """The nearest float32."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def power(base: float, exponent: int) -> float:
    """base^exponent by squaring, as core/base/power.h, with the same bits."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        exponent >>= 1
        base *= base
    return result


def square_root(x: Tensor) -> Tensor:
    """Rounded once. torch's own is not on CPUs, where it calls a library that may be off by one."""
    if x.device.type != "cpu":
        return torch.sqrt(x)
    with np.errstate(invalid="ignore"):  # a NaN stays one
        return torch.from_numpy(np.sqrt(x.numpy()))


def powers(base: float, exponents: Tensor) -> Tensor:
    """`power` of each of (K,) int64 exponents in [0, 2^32), as float64."""
    result = torch.ones(exponents.shape, dtype=torch.float64, device=exponents.device)
    for bit in range(32):
        result = torch.where((exponents >> bit & 1) == 1, result * base, result)
        base *= base
    return result


@dataclass(frozen=True)
class StepValues:
    """The values of a push, checked by the core. `exact` has them as float64, the others are
    rounded as the core's rules round them.
    """

    exact: _core.RuleValues

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StepValues:
        """values: of a param group (`trireme.optim.values_of_group`). Raises BadRequest: one is out
        of its range.
        """
        return cls(rule_values(values))

    def __getattr__(self, name: str) -> float:
        return float32(getattr(self.exact, name))

    @property
    def rate1(self) -> float:
        """How much of a gradient Adam's first moment takes."""
        return float32(1.0 - self.exact.beta1)

    @property
    def rate2(self) -> float:
        """How much of its square the second moment takes."""
        return float32(1.0 - self.exact.beta2)

    @property
    def share(self) -> float:
        """What momentum takes of a gradient after the first."""
        return float32(1.0 - self.exact.dampening)

    @property
    def step_size(self) -> float:
        """Of Adam in the step that the values name."""
        exact = self.exact
        root = math.sqrt(1.0 - power(exact.beta2, exact.step))
        return float32(exact.lr * root / (1.0 - power(exact.beta1, exact.step)))

    def step_sizes(self, counts: Tensor) -> Tensor:
        """(K, 1) float32: those of Adam in the counts-th update of each row, (K,) int64."""
        exact = self.exact
        root = square_root(1.0 - powers(exact.beta2, counts))
        sizes = exact.lr * root / (1.0 - powers(exact.beta1, counts))
        return sizes.to(torch.float32)[:, None]
