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

    @property
    def is_per_show(self) -> bool:
        """Whether scale="fleet" divides a gradient by the shows of its key."""
        return False

    def group(self) -> dict[str, Any]:
        """The values that travel with each push, under torch's names, as the param group of a
        table.
        """
        return {"lr": self.lr, "weight_decay": self.weight_decay, "bounds": self.bounds}


@dataclass(frozen=True, kw_only=True)
class SGD(Rule):
    """w -= lr * g. With momentum: b = momentum * b + (1 - dampening) * g; w -= lr * b.

    In a row's first update b = g. With `nesterov`, w -= lr * (g + momentum * b). As
    torch.optim.SGD, but lazy: rows without a gradient do not move on. Whether there is momentum is
    fixed with the table; its value travels with each push. State: D + 1 floats with momentum, else
    none.
    """

    name: ClassVar[str] = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        needs = "0 without momentum" if self.momentum == 0 else "0 with nesterov"
        is_free = self.momentum > 0 and not self.nesterov
        _check(
            "SGD",
            momentum=(0 <= self.momentum < 1, "in [0, 1)", self.momentum),
            dampening=(
                0 <= self.dampening < 1 and (is_free or self.dampening == 0),
                "in [0, 1)" if is_free else needs,
                self.dampening,
            ),
            nesterov=(
                not self.nesterov or self.momentum > 0,
                "False without momentum",
                self.nesterov,
            ),
        )

    def fixed(self) -> dict[str, Any]:
        if self.momentum == 0:
            return Rule.fixed(self)
        return {"name": "momentum", "nesterov": bool(self.nesterov)}

    def group(self) -> dict[str, Any]:
        if self.momentum == 0:
            return Rule.group(self)
        own = {"momentum": self.momentum}
        if not self.nesterov:
            own["dampening"] = self.dampening
        return {**Rule.group(self), **own}


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
            "shared": bool(self.shared),
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

    With `shared`, one m and one v for the row: each weight steps by its own new m and v, then their
    means over the row are kept (as Fleet's SparseSharedAdamSGDRule).
    State: 2 D floats, or 2; one more for "row".
    """

    name: ClassVar[str] = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    bias_correction: str = "global"
    shared: bool = False

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
        return {
            "name": self.name,
            "bias_correction": self.bias_correction,
            "shared": bool(self.shared),
        }

    def group(self) -> dict[str, Any]:
        return {**Rule.group(self), "betas": self.betas, "eps": self.eps}


@dataclass(frozen=True, kw_only=True)
class FTRL(Rule):
    """FTRL-proximal, for sparse weights: those with |z| <= l1 are exactly 0.

    sigma = (sqrt(n + g*g) - sqrt(n)) / lr; z += g - sigma*w; n += g*g;
    w = 0 if |z| <= l1, else (sign(z)*l1 - z) / ((beta + sqrt(n)) / lr + l2).
    McMahan et al., KDD 2013, algorithm 1; lr is its alpha. Weights follow from z and n, which start
    at 0: use it with `initializer.Constant(0.0)`, as other initial weights fade with the first
    update. A step with lr 0 changes nothing. State: 2 D floats.
    """

    name: ClassVar[str] = "ftrl"
    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        _check(
            "FTRL",
            weight_decay=(self.weight_decay == 0, "0: l2 regularizes", self.weight_decay),
            **{
                name: (math.isfinite(value) and value >= 0, ">= 0 and finite", value)
                for name, value in (("beta", self.beta), ("l1", self.l1), ("l2", self.l2))
            },
        )

    def group(self) -> dict[str, Any]:
        # beta travels in the place of eps: a number beside the root, too.
        return {**Rule.group(self), "eps": self.beta, "l1": self.l1, "l2": self.l2}


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
        and FleetAdagradV2, unless they say show_scale=False, then divide it by the shows of the
        key. In a table with a ScorePolicy the servers do so, by its shows; a key of examples that
        were not shown at all is not divided. In any other table the workers do, an occurrence is a
        show, and sync with several workers is refused.
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
        return {"name": self.name, "scale": self.scale, "per_show": self.is_per_show}


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
    show_scale: bool = True

    def __post_init__(self) -> None:
        FleetRule.__post_init__(self)
        initial = self.initial_g2sum
        _check(
            "FleetAdagrad",
            initial_g2sum=(_is_positive(initial), "> 0 and finite", initial),
        )

    def fixed(self) -> dict[str, Any]:
        return {**FleetRule.fixed(self), "shared": self.shared}

    @property
    def is_per_show(self) -> bool:
        return self.show_scale

    def group(self) -> dict[str, Any]:
        # It travels in the place of eps: a number below the root, too.
        return {**Rule.group(self), "eps": self.initial_g2sum}


@dataclass(frozen=True, kw_only=True)
class FleetAdagradV2(FleetRule):
    """sum += mean(g*g), then w -= lr * g / (sqrt(sum) + eps): Fleet's SparseAdaGradV2SGDRule.

    Head and tail have a sum each, which starts at 0.
    """

    name: ClassVar[str] = "fleet_adagrad_v2"
    lr: float = 0.05
    eps: float = 1e-8
    show_scale: bool = True

    @property
    def is_per_show(self) -> bool:
        return self.show_scale

    def __post_init__(self) -> None:
        FleetRule.__post_init__(self)
        _check("FleetAdagradV2", eps=(_is_positive(self.eps), "> 0 and finite", self.eps))

    def group(self) -> dict[str, Any]:
        return {**Rule.group(self), "eps": self.eps}


@dataclass(frozen=True, kw_only=True)
class FleetAdam(FleetRule):
    """Adam whose bias correction counts the updates of head and tail: Fleet's SparseAdamSGDRule."""

    name: ClassVar[str] = "fleet_adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        FleetRule.__post_init__(self)
        _check_adam(type(self).__name__, self.betas, self.eps)

    def group(self) -> dict[str, Any]:
        return {**Rule.group(self), "betas": self.betas, "eps": self.eps}


@dataclass(frozen=True, kw_only=True)
class FleetSharedAdam(FleetAdam):
    """FleetAdam with one m and one v for the head, and for the tail: SparseSharedAdamSGDRule.

    Each weight steps by its own new m and v, then their means over the part are kept. State: 6
    floats.
    """

    name: ClassVar[str] = "fleet_shared_adam"


def num_counts(rule: Mapping[str, Any]) -> int:
    """How many of the last floats of a row's state are integers of 32 bits: its updates so far.

    rule: as Rule.fixed() says it.
    """
    if rule["name"] == "adam":
        return int(rule["bias_correction"] == "row")
    return _NUM_COUNTS.get(rule["name"], 0)


_NUM_COUNTS = {
    "momentum": 1,
    "fleet_sgd": 1,
    "fleet_adagrad": 1,
    "fleet_adagrad_v2": 1,
    "fleet_adam": 2,  # of the head, of the tail
    "fleet_shared_adam": 2,
}


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _check_adam(rule: str, betas: tuple[float, float], eps: float) -> None:
    _check(
        rule,
        betas=(all(0 <= beta < 1 for beta in betas), "two values in [0, 1)", betas),
        eps=(_is_positive(eps), "> 0 and finite", eps),
    )


def values_of_group(group: Mapping[str, Any], step: int) -> dict[str, float | int]:
    """The values of a param group as they travel with a push (docs/protocol.md, `values`)."""
    # Momentum and dampening travel as betas: rates at which old and new are mixed, too.
    mixed = group.get("momentum", 0.0), group.get("dampening", 0.0)
    beta1, beta2 = group.get("betas", mixed)
    low, high = group["bounds"] or (-math.inf, math.inf)
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "eps": float(group.get("eps", 0.0)),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "l1": float(group.get("l1", 0.0)),
        "l2": float(group.get("l2", 0.0)),
        "lower": float(low),
        "upper": float(high),
        "step": int(step),
    }
