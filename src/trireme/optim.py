"""Update rules of tables: how the gradient of a row changes it, on the server.

Rules are lazy: a row without a gradient in a step does not change. What is fixed for the life of a
table (the rule's name and the shape of its state) is part of the table's schema; every other value
travels with each push, so a scheduler may change it. Formulas stand in core/optim; the classes here
carry their values.

g is the gradient of the loss as written, summed over the occurrences of the key in the step, plus
weight_decay * w. `bounds` clips the weights to [low, high] after the update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trireme.errors import BadRequest

Bounds = tuple[float, float] | None


def _check(rule: str, **conditions: tuple[bool, str, object]) -> None:
    for field, (holds, expected, found) in conditions.items():
        if not holds:
            raise BadRequest(f"{rule}: expected {field} {expected}, found {found!r}")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Base of the update rules. `name` is permanent: it is stored in schemas and checkpoints."""

    name: ClassVar[str]

    lr: float
    weight_decay: float = 0.0
    bounds: Bounds = None

    def __post_init__(self) -> None:
        kind = type(self).__name__
        _check(
            kind,
            lr=(math.isfinite(self.lr) and self.lr >= 0, ">= 0", self.lr),
            weight_decay=(
                math.isfinite(self.weight_decay) and self.weight_decay >= 0,
                ">= 0 and finite",
                self.weight_decay,
            ),
        )
        if self.bounds is not None:
            low, high = self.bounds
            _check(kind, bounds=(low <= high, "(low, high) with low <= high", self.bounds))

    def fixed(self) -> dict[str, Any]:
        """The part that the table's schema fixes."""
        return {"name": self.name}

    def group(self) -> dict[str, Any]:
        """The values that travel with each push, under torch's names, as the param group of a
        table.
        """
        return {"lr": self.lr, "weight_decay": self.weight_decay, "bounds": self.bounds}


@dataclass(frozen=True, kw_only=True)
class SGD(Rule):
    """w -= lr * g. As torch.optim.SGD without momentum."""

    name: ClassVar[str] = "sgd"
    lr: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Adagrad(Rule):
    """s += g*g; w -= lr * g / (sqrt(s) + eps). As torch.optim.Adagrad; Duchi et al., JMLR 2011.

    With `shared`, one accumulator for the row: s += mean(g*g). State: D floats, or 1.
    """

    name: ClassVar[str] = "adagrad"
    lr: float = 0.01
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    shared: bool = False

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        initial = self.initial_accumulator_value
        _check(
            "Adagrad",
            initial_accumulator_value=(
                math.isfinite(initial) and initial >= 0,
                ">= 0 and finite",
                initial,
            ),
            eps=(math.isfinite(self.eps) and self.eps >= 0, ">= 0 and finite", self.eps),
        )

    def fixed(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "shared": self.shared,
            "initial_accumulator": float(self.initial_accumulator_value),
        }

    def group(self) -> dict[str, Any]:
        return {**Rule.group(self), "eps": self.eps}


@dataclass(frozen=True, kw_only=True)
class Adam(Rule):
    """m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g*g; w -= lr * sqrt(c2)/c1 * m / (sqrt(v) + eps).

    c1 = 1 - b1^t, c2 = 1 - b2^t; eps stands inside of the bias correction, as in
    torch.optim.SparseAdam (torch.optim.Adam has it outside). With bias_correction="global", t is
    the step of the optimizer, which travels with the push (as torch.optim.SparseAdam); with "row",
    t counts the updates of the row (as Fleet). Kingma, Ba, ICLR 2015.
    State: 2 D floats, one more for "row".
    """

    name: ClassVar[str] = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    bias_correction: str = "global"

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        beta1, beta2 = self.betas
        _check(
            "Adam",
            betas=(0 <= beta1 < 1 and 0 <= beta2 < 1, "two values in [0, 1)", self.betas),
            eps=(math.isfinite(self.eps) and self.eps > 0, "> 0 and finite", self.eps),
            bias_correction=(
                self.bias_correction in ("global", "row"),
                "'global' or 'row'",
                self.bias_correction,
            ),
        )

    def fixed(self) -> dict[str, Any]:
        return {"name": self.name, "bias_correction": self.bias_correction}

    def group(self) -> dict[str, Any]:
        return {**Rule.group(self), "betas": self.betas, "eps": self.eps}


@dataclass(frozen=True, kw_only=True)
class Count(Rule):
    """w += 1 for every update, whatever the gradient: shows that each push was applied exactly
    once.
    """

    name: ClassVar[str] = "count"
    lr: float = 0.0

    def __post_init__(self) -> None:
        _check("Count", lr=(self.lr == 0 and self.weight_decay == 0, "and weight_decay 0", self.lr))
        Rule.__post_init__(self)


def values_of_group(group: Mapping[str, Any], step: int) -> dict[str, float | int]:
    """The values of a param group as they travel with a push (docs/protocol.md, `values`)."""
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    low, high = group["bounds"] or (-math.inf, math.inf)
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "eps": float(group.get("eps", 0.0)),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "lower": float(low),
        "upper": float(high),
        "step": int(step),
    }
