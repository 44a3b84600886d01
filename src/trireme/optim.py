"""Update rules of tables: how servers update a row from its gradient.

Rules are lazy: a row without a gradient in a step does not change. The rule's name and the shape of
its state are fixed in the table's schema. All other values are sent with each push, so schedulers
may change them. The formulas are implemented in core/optim.

g is the gradient of the loss as written, summed over the occurrences of the key in the step, plus
weight_decay * w. `bounds` clips the weights to [low, high] after the update. State sizes are per
row of D weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar, Literal

from trireme import _core
from trireme.errors import check_choice, check_flags, check_numbers, check_values

Bounds = tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Base of the update rules. `name` is permanent: schemas and checkpoints store it.

    scale: "loss": gradients are those of the loss as written; "fleet": see FleetRule.

    Raises:
        BadRequest: a value is out of range; names it.
    """

    name: ClassVar[str]
    scale: ClassVar[str] = "loss"
    POSITIVE: ClassVar[tuple[str, ...]] = ()  # numbers that are not 0

    lr: float
    weight_decay: float = 0.0
    bounds: Bounds = None

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type is bool:
                check_flags(kind, **{one.name: value})
            elif one.type is float:
                expected = "> 0" if one.name in self.POSITIVE else ">= 0"
                check_numbers(kind, expected, **{one.name: value})
        if (pair := self.bounds) is not None:
            are_valid = _are_two(pair) and pair[0] <= pair[1]
            check_values(kind, bounds=(are_valid, "(low, high) with low <= high", pair))

    def fixed(self) -> dict[str, Any]:
        """The values for the table's schema."""
        return {"name": self.name}

    @property
    def is_per_show(self) -> bool:
        """Whether scale="fleet" divides a gradient by the shows of its key."""
        return bool(getattr(self, "show_scale", False))

    def group(self) -> dict[str, Any]:
        """The values that are sent with each push, by torch's names: the table's param group."""
        some = ("betas", "eps", "beta", "initial_g2sum", "l1", "l2")
        names = ("lr", "weight_decay", "bounds", *some)
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


@dataclass(frozen=True, kw_only=True)
class SGD(Rule):
    """w -= lr * g. With momentum: b = momentum * b + (1 - dampening) * g; w -= lr * b.

    In a row's first update b = g. With `nesterov`, w -= lr * (g + momentum * b). As in
    torch.optim.SGD, but lazy. Whether there is momentum is fixed with the table; its value is not.
    State: D + 1 floats with momentum, else none.
    """

    name: ClassVar[str] = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        has_momentum = self.momentum > 0
        needs = "0 with nesterov" if has_momentum else "0 without momentum"
        is_free = has_momentum and not self.nesterov
        is_right = 0 <= self.dampening < 1 and (is_free or self.dampening == 0)
        check_values(
            "SGD",
            momentum=(0 <= self.momentum < 1, "in [0, 1)", self.momentum),
            dampening=(is_right, "in [0, 1)" if is_free else needs, self.dampening),
            nesterov=(has_momentum or not self.nesterov, "False without momentum", self.nesterov),
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
    """s += g*g; w -= lr * g / (sqrt(s) + eps). As in torch.optim.Adagrad; Duchi et al., JMLR 2011.

    With `shared`, the row has one accumulator: s += mean(g*g). State: D floats, or 1.
    """

    name: ClassVar[str] = "adagrad"
    lr: float = 0.01
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    shared: bool = False

    def fixed(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "shared": bool(self.shared),
            "initial_accumulator": float(self.initial_accumulator_value),
        }


@dataclass(frozen=True, kw_only=True)
class Adam(Rule):
    """m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g*g; w -= lr * sqrt(c2)/c1 * m / (sqrt(v) + eps).

    c1 = 1 - b1^t, c2 = 1 - b2^t; eps is inside the bias correction, as in torch.optim.SparseAdam
    (torch.optim.Adam has it outside). With bias_correction="global", t is the step of the
    optimizer, as in torch.optim.SparseAdam; with "row", t counts the updates of the row, as in
    Fleet. Kingma, Ba, ICLR 2015.

    With `shared`, the row has one m and one v: each weight steps by its own new m and v, of which
    the means over the row are kept (Fleet's SparseSharedAdamSGDRule). State: 2 D floats, or 2; one
    more for "row".
    """

    name: ClassVar[str] = "adam"
    POSITIVE = ("eps",)
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    bias_correction: str = "global"
    shared: bool = False

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        _check_betas("Adam", self.betas)
        check_choice("Adam", ("global", "row"), bias_correction=self.bias_correction)

    def fixed(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bias_correction": self.bias_correction,
            "shared": bool(self.shared),
        }


@dataclass(frozen=True, kw_only=True)
class FTRL(Rule):
    """FTRL-proximal, for sparse weights: weights with |z| <= l1 are exactly 0.

    sigma = (sqrt(n + g*g) - sqrt(n)) / lr; z += g - sigma*w; n += g*g;
    w = 0 if |z| <= l1, else (sign(z)*l1 - z) / ((beta + sqrt(n)) / lr + l2).
    McMahan et al., KDD 2013, algorithm 1; lr is its alpha. Weights follow from z and n, which start
    at 0: use it with `initializer.Constant(0.0)`, since other initial weights are lost in the first
    update. A step with lr 0 changes nothing. State: 2 D floats.
    """

    name: ClassVar[str] = "ftrl"
    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        decay = self.weight_decay
        check_values("FTRL", weight_decay=(decay == 0, "0: l2 regularizes", decay))


@dataclass(frozen=True, kw_only=True)
class Count(Rule):
    """w += 1 for every update, whatever the gradient: for tests that count pushes."""

    name: ClassVar[str] = "count"
    lr: float = 0.0

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        is_zero = self.lr == self.weight_decay == 0
        check_values("Count", lr=(is_zero, "and weight_decay 0", self.lr))


@dataclass(frozen=True, kw_only=True)
class FleetRule(Rule):
    """Base of Fleet's rules: learning rates and bounds mean the same as there.

    Weight 0 of a row is its head, the others are its tail. A row's first update changes the head
    alone; then the tail gets its initial weights. Fleet's equal is
    `Table(absent="zeros", initializer=TailUniform(...))`.

    scale: "fleet": a gradient is multiplied by the number of examples in the batch; FleetAdagrad
        and FleetAdagradV2 then divide it by the shows of the key, unless show_scale is False or
        there are none. In a table with a ScorePolicy the servers do this, with the shows of the
        push. In other tables the workers do, every occurrence counts as a show, and sync with
        several workers is refused.
        "loss": a gradient is that of the loss as written.
    """

    scale: Literal["loss", "fleet"] = "fleet"  # type: ignore[misc]  # a field here
    bounds: Bounds = (-10.0, 10.0)

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        kind, decay = type(self).__name__, self.weight_decay
        check_choice(kind, ("loss", "fleet"), scale=self.scale)
        check_values(kind, weight_decay=(decay == 0, "0: Fleet's rules have none", decay))

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

    Head and tail have one sum each; without `shared` every weight has its own, as in
    StdAdaGradSGDRule. g0 is `initial_g2sum`; sums start at 0.
    """

    name: ClassVar[str] = "fleet_adagrad"
    POSITIVE = ("initial_g2sum",)
    lr: float = 0.05
    initial_g2sum: float = 3.0
    shared: bool = True
    show_scale: bool = True

    def fixed(self) -> dict[str, Any]:
        return {**FleetRule.fixed(self), "shared": self.shared}


@dataclass(frozen=True, kw_only=True)
class FleetAdagradV2(FleetRule):
    """sum += mean(g*g), then w -= lr * g / (sqrt(sum) + eps): Fleet's SparseAdaGradV2SGDRule.

    Head and tail have one sum each, which starts at 0.
    """

    name: ClassVar[str] = "fleet_adagrad_v2"
    POSITIVE = ("eps",)
    lr: float = 0.05
    eps: float = 1e-8
    show_scale: bool = True


@dataclass(frozen=True, kw_only=True)
class FleetAdam(FleetRule):
    """Adam with bias corrections that count the updates of head and tail: SparseAdamSGDRule."""

    name: ClassVar[str] = "fleet_adam"
    POSITIVE = ("eps",)
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        FleetRule.__post_init__(self)
        _check_betas(type(self).__name__, self.betas)


@dataclass(frozen=True, kw_only=True)
class FleetSharedAdam(FleetAdam):
    """FleetAdam with one m and one v for the head, and for the tail: SparseSharedAdamSGDRule.

    Each weight steps by its own new m and v, of which the means over the part are kept. State: 6
    floats.
    """

    name: ClassVar[str] = "fleet_shared_adam"


def _are_two(values: Any) -> bool:
    is_pair = isinstance(values, (tuple, list)) and len(values) == 2
    return is_pair and all(isinstance(value, Real) for value in values)


def _check_betas(rule: str, betas: tuple[float, float]) -> None:
    are_valid = _are_two(betas) and all(0 <= beta < 1 for beta in betas)
    check_values(rule, betas=(are_valid, "two values in [0, 1)", betas))


def values_of_group(group: Mapping[str, Any], step: int) -> dict[str, float | int]:
    """The `values` of a push (docs/protocol.md), of a param group. BadRequest: a wrong one."""
    # For the names that rules share in a push see `rule_values`.
    mixed = group.get("momentum", 0.0), group.get("dampening", 0.0)
    beta1, beta2 = group.get("betas", mixed)
    eps = group.get("beta", group.get("initial_g2sum", group.get("eps", 0.0)))
    low, high = group["bounds"] or (-math.inf, math.inf)
    values = {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "eps": float(eps),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "l1": float(group.get("l1", 0.0)),
        "l2": float(group.get("l2", 0.0)),
        "lower": float(low),
        "upper": float(high),
        "step": int(step),
    }
    rule_values(values)  # before the push has its number
    return values


def rule_values(values: Mapping[str, Any]) -> _core.RuleValues:
    """The core's values of a step for the `values` of a push.

    Some rules share a name in a push. In the core each rule reads its own fields.
    """
    return _core.RuleValues(
        **values,
        momentum=values["beta1"],
        dampening=values["beta2"],
        beta=values["eps"],
        initial_g2sum=values["eps"],
    )
