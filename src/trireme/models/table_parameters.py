"""PaddleRec's table_parameters.* of a table, as far as they have a meaning here: how its rows start
and learn. Fleet's formulas: see trireme.optim.FleetRule.

| Key, below table_parameters.TABLE.accessor | Means |
|---|---|
| embedx_dim | floats of a row's tail: the table's dim less 1 |
| fea_dim | the same, counted with what Fleet stores: the table's dim and 2 |
| embed_sgd_param, embedx_sgd_param | rule of head and tail: here one for both |
| *.name | SparseNaiveSGDRule, SparseAdaGradSGDRule, SparseAdaGradV2SGDRule, StdAdaGradSGDRule, |
| | SparseAdamSGDRule or SparseSharedAdamSGDRule |
| *.{naive, adagrad, adam}.learning_rate, initial_range, weight_bounds | of the rule |
| *.adagrad.initial_g2sum | of the rule |
| *.adam.beta1_decay_rate, beta2_decay_rate, ada_epsilon | of the rule |
"""

from __future__ import annotations

from typing import Any

from trireme import optim
from trireme.config import Config
from trireme.errors import BadRequest
from trireme.initializer import TailUniform

_RULES: dict[str, tuple[str, type[optim.FleetRule], dict[str, Any]]] = {
    "SparseNaiveSGDRule": ("naive", optim.FleetSGD, {}),
    "SparseAdaGradSGDRule": ("adagrad", optim.FleetAdagrad, {"shared": True}),
    "StdAdaGradSGDRule": ("adagrad", optim.FleetAdagrad, {"shared": False}),
    "SparseAdaGradV2SGDRule": ("adagrad", optim.FleetAdagradV2, {}),
    "SparseAdamSGDRule": ("adam", optim.FleetAdam, {}),
    "SparseSharedAdamSGDRule": ("adam", optim.FleetSharedAdam, {}),
}
_PARTS = ("embed_sgd_param", "embedx_sgd_param")


def table_options(config: Config, table: str, dim: int) -> dict[str, Any]:
    """What table_parameters says of a table, as keyword arguments of `Table`; nothing if the
    configuration says nothing.

    Raises:
        BadRequest: another dim than the model's, an unknown rule, or different ones for head and
            tail.
    """
    accessor = f"table_parameters.{table}.accessor"
    for key, expected in (("embedx_dim", dim - 1), ("fea_dim", dim + 2)):
        found = config.get(f"{accessor}.{key}", expected)
        if found != expected:
            raise BadRequest(
                f"{accessor}.{key}: expected {expected}, as the model's rows have {dim} floats,"
                f" found {found}"
            )
    parts = {p: f"{accessor}.{p}" for p in _PARTS if f"{accessor}.{p}.name" in config}
    options = {part: _options(config, key) for part, key in parts.items()}
    if not options:
        return {}
    first, *others = options.values()
    if others and others[0] != first:
        raise BadRequest(
            f"{accessor}: expected one rule for head and tail, as a row has one rule and one"
            f" rate, found {first['optimizer']} and {others[0]['optimizer']},"
            f" {first['initializer']} and {others[0]['initializer']}"
        )
    return first


def _options(config: Config, key: str) -> dict[str, Any]:
    name = config.get(f"{key}.name")
    if name not in _RULES:
        raise BadRequest(f"{key}.name: expected one of {', '.join(_RULES)}, found {name!r}")
    part, rule, values = _RULES[name]
    is_adam = issubclass(rule, optim.FleetAdam)

    def number(option: str, default: float) -> float:
        found = config.get(f"{key}.{part}.{option}", default)
        if type(found) not in (int, float):
            raise BadRequest(f"{key}.{part}.{option}: expected a number, found {found!r}")
        return float(found)

    values = {
        **values,
        "lr": number("learning_rate", 1e-3 if is_adam else 0.05),
        "bounds": _bounds(config, f"{key}.{part}.weight_bounds"),
    }
    if rule is optim.FleetAdagrad:
        values["initial_g2sum"] = number("initial_g2sum", 3.0)
    elif is_adam:
        values["betas"] = number("beta1_decay_rate", 0.9), number("beta2_decay_rate", 0.999)
        values["eps"] = number("ada_epsilon", 1e-8)
    start = number("initial_range", 1e-4)
    return {
        "optimizer": rule(**values),
        "initializer": TailUniform(-start, start),
        "absent": "zeros",
    }


def _bounds(config: Config, key: str) -> tuple[float, float]:
    found = config.get(key, (-10.0, 10.0))
    if (
        not isinstance(found, (list, tuple))
        or len(found) != 2
        or any(type(bound) not in (int, float) for bound in found)
    ):
        raise BadRequest(f"{key}: expected [lowest, highest], found {found!r}")
    return float(found[0]), float(found[1])
