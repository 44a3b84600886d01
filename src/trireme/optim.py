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
from typing import Any, ClassVar, Literal

from trireme.errors import BadRequest

Bounds = tuple[float, float] | None


def _check(rule: str, **conditions: tuple[bool, str, object]) -> None:
    for field, (holds, expected, found) in conditions.items():
        if not holds:
            raise BadRequest(f"{rule}: expected {field} {expected}, found {found!r}")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Base of the update rules. `name` is permanent: it is stored in schemas and checkpoints.

    scale: what a gradient means: "loss", that of the loss as written; "fleet", see FleetRule.
    """

    name: ClassVar[str]
    scale: ClassVar[str] = "loss"

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
        _check_adam("Adam", self.betas, self.eps)
        _check(
            "Adam",
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


@dataclass(frozen=True, kw_only=True)
class FleetRule(Rule):
    """Base of Fleet's rules, so that learning rates and bounds keep the meaning they have there.

    Weight 0 of a row is its head, the others its tail. A row's first update moves the head alone;
    then its tail begins. Use them with `Table(absent="zeros", initializer=TailUniform(...))`, as
    Fleet does.

    scale: "fleet": a gradient is multiplied by the number of examples in the batch; FleetAdagrad
        divides it by the number of times the key occurs there (each is one show; Fleet's
        ShowClickEntry can say another number, nothing here can). Not in sync with several workers.
        "loss": a gradient is that of the loss as written.
    """

    scale: Literal["loss", "fleet"] = "fleet"  # type: ignore[misc]  # a field here
    bounds: Bounds = (-10.0, 10.0)

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        _check(
            type(self).__name__,
            scale=(self.scale in ("loss", "fleet"), "'loss' or 'fleet'", self.scale),
            weight_decay=(self.weight_decay == 0, "0: Fleet's rules have none", self.weight_decay),
        )

    def fixed(self) -> dict[str, Any]:
        return {"name": self.name, "scale": self.scale}


@dataclass(frozen=True, kw_only=True)
class FleetSGD(FleetRule):
    """w -= lr * g: Fleet's SparseNaiveSGDRule."""

    name: ClassVar[str] = "fleet_sgd"
    lr: float = 0.05


@dataclass(frozen=True, kw_only=True)
class FleetAdagrad(FleetRule):
    """w -= lr * g * sqrt(g0 / (g0 + sum)), then sum += mean(g*g): Fleet's SparseAdaGradSGDRule.

    Head and tail have a sum each; without `shared` every weight has its own, as in
    StdAdaGradSGDRule. g0 is `initial_g2sum`; a row's sum starts at 0.
    """

    name: ClassVar[str] = "fleet_adagrad"
    lr: float = 0.05
    initial_g2sum: float = 3.0
    shared: bool = True

    def __post_init__(self) -> None:
        FleetRule.__post_init__(self)
        initial = self.initial_g2sum
        _check(
            "FleetAdagrad",
            initial_g2sum=(math.isfinite(initial) and initial > 0, "> 0 and finite", initial),
        )

    def fixed(self) -> dict[str, Any]:
        return {**FleetRule.fixed(self), "shared": self.shared}

    def group(self) -> dict[str, Any]:
        # It travels in the place of eps: a number below the root, too.
        return {**Rule.group(self), "eps": self.initial_g2sum}


@dataclass(frozen=True, kw_only=True)
class FleetAdam(FleetRule):
    """Adam whose bias correction counts the updates of head and tail: Fleet's SparseAdamSGDRule."""

    name: ClassVar[str] = "fleet_adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        FleetRule.__post_init__(self)
        _check_adam("FleetAdam", self.betas, self.eps)

    def group(self) -> dict[str, Any]:
        return {**Rule.group(self), "betas": self.betas, "eps": self.eps}


def _check_adam(rule: str, betas: tuple[float, float], eps: float) -> None:
    _check(
        rule,
        betas=(all(0 <= beta < 1 for beta in betas), "two values in [0, 1)", betas),
        eps=(math.isfinite(eps) and eps > 0, "> 0 and finite", eps),
    )


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
