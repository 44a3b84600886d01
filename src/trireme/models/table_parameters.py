"""PaddleRec's table_parameters.* of a table: how its rows start, learn, fade and expire, by Fleet's
formulas (trireme.optim.FleetRule, trireme.policy.ScorePolicy).

table_parameters.TABLE.table_class is MemorySparseTable (default) or SSDSparseTable: rows may lie on
SSD, as with `Table(ssd=True)`.

| Key, below table_parameters.TABLE.accessor | Means |
|---|---|
| accessor_class | SparseAccessor (default); CtrCommonAccessor, CtrDoubleAccessor: lookups return |
| | show and click before the weights, and the model's dim counts them |
| embedx_dim | floats of a row's tail: the model's dim less 1, less 3 for the Ctr accessors |
| fea_dim | the same, counted with what Fleet stores: the model's dim and 2; for Ctr, its dim |
| embedx_threshold | score from which a row has a tail; default 0: from its first update on |
| ctr_accessor_param.nonclk_coeff, click_coeff | of the score; default 0.1, 1 |
| *.show_click_decay_rate | per day; default 1 |
| *.delete_threshold, delete_after_unseen_days | of shrink; default 0, 30 |
| *.base_threshold, delta_threshold, delta_keep_days | of exports; default 0, 0, 16 |
| *.show_scale | whether the Adagrad rules divide gradients by shows; default true |
| *.zero_init | whether heads start at 0; default true, without a tail always false |
| embed_sgd_param, embedx_sgd_param | rule of head and tail: here one for both |
| *.name | SparseNaiveSGDRule, SparseAdaGradSGDRule, SparseAdaGradV2SGDRule, StdAdaGradSGDRule, |
| | SparseAdamSGDRule or SparseSharedAdamSGDRule |
| *.{naive, adagrad, adam}.learning_rate, initial_range, weight_bounds | of the rule |
| *.adagrad.initial_g2sum | of the rule |
| *.adam.beta1_decay_rate, beta2_decay_rate, ada_epsilon | of the rule |
"""

from typing import Any

from trireme import optim
from trireme.config import Config
from trireme.errors import BadRequest, check_choice
from trireme.initializer import TailUniform, Uniform
from trireme.policy import ACCESSORS, UNSET_ACCESSOR, ShowClick, SparseAccessor

RULES: dict[str, tuple[str, type[optim.FleetRule], dict[str, Any]]] = {
    "SparseNaiveSGDRule": ("naive", optim.FleetSGD, {}),
    "SparseAdaGradSGDRule": ("adagrad", optim.FleetAdagrad, {"shared": True}),
    "StdAdaGradSGDRule": ("adagrad", optim.FleetAdagrad, {"shared": False}),
    "SparseAdaGradV2SGDRule": ("adagrad", optim.FleetAdagradV2, {}),
    "SparseAdamSGDRule": ("adam", optim.FleetAdam, {}),
    "SparseSharedAdamSGDRule": ("adam", optim.FleetSharedAdam, {}),
}
_IN_MEMORY, _ON_SSD = "MemorySparseTable", "SSDSparseTable"
_PARTS = ("embed_sgd_param", "embedx_sgd_param")
# Numbers of ctr_accessor_param by their names in a policy, and those that are whole days.
_DAYS = ("delete_after_unseen_days", "delta_keep_days")
_THRESHOLDS = ("delete_threshold", "base_threshold", "delta_threshold")
_SAME_NAMES = ("nonclk_coeff", "click_coeff", *_THRESHOLDS, *_DAYS)
_NUMBERS = {"show_click_decay_rate": "decay_rate", **{name: name for name in _SAME_NAMES}}


def table_options(
    config: Config, table: str, width: int, show_click: ShowClick | None = None
) -> dict[str, Any]:
    """The table_parameters of a table as keyword arguments of `Table`; empty if there are none.

    Args:
        width: floats per key that the model computes with.
        show_click: columns that count shows and clicks of examples; None: each occurrence of a key
            is one show.

    Raises:
        BadRequest: another dim than the model's, an unknown class, accessor or rule, or different
            rules for head and tail.
    """
    key = f"table_parameters.{table}.accessor"
    table_class = config.get(f"table_parameters.{table}.table_class", _IN_MEMORY)
    check_choice(f"table_parameters.{table}", (_IN_MEMORY, _ON_SSD), table_class=table_class)
    ssd = {"ssd": True} if table_class == _ON_SSD else {}
    if not config.has_section(key):
        return ssd
    kind = config.get(f"{key}.accessor_class", "SparseAccessor")
    check_choice(key, ACCESSORS, accessor_class=kind)
    accessor = ACCESSORS[kind]
    tail = width - (3 if accessor.pulls_statistics else 1)
    stored = width + (0 if accessor.pulls_statistics else 2)
    for name, expected in (("embedx_dim", tail), ("fea_dim", stored)):
        configured = config.get(f"{key}.{name}", expected)
        if configured != expected:
            raise BadRequest(
                f"{key}.{name}: expected {expected}, as the model's rows have {width} floats with"
                f" {kind}, found {configured}"
            )
    return {
        "dim": tail + 1,
        "policy": _policy(config, key, accessor, show_click),
        **_rule_options(config, key, has_tail=tail > 0),
        **ssd,
    }


def _policy(
    config: Config, key: str, accessor: type[SparseAccessor], show_click: ShowClick | None
) -> SparseAccessor:
    values = dict(UNSET_ACCESSOR)
    for name, own in _NUMBERS.items():
        if (number := config.get(f"{key}.ctr_accessor_param.{name}", None)) is not None:
            whole = own in _DAYS and isinstance(number, float) and number.is_integer()
            values[own] = int(number) if whole else number
    if threshold := config.get(f"{key}.embedx_threshold", 0):
        values["embedx_threshold"] = threshold
    try:
        return accessor(show_click=show_click, **values)
    except BadRequest as error:
        raise BadRequest(f"{key}: {error}") from error


def _flag(config: Config, key: str) -> bool:
    value = config.get(key, True)
    if not isinstance(value, bool):
        raise BadRequest(f"{key}: expected true or false, found {value!r}")
    return value


def _rule_options(config: Config, accessor: str, *, has_tail: bool) -> dict[str, Any]:
    parts = {p: f"{accessor}.{p}" for p in _PARTS if f"{accessor}.{p}.name" in config}
    show_scale = _flag(config, f"{accessor}.ctr_accessor_param.show_scale")
    zero_init = _flag(config, f"{accessor}.ctr_accessor_param.zero_init") and has_tail
    options = {p: _options(config, key, show_scale, zero_init) for p, key in parts.items()}
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


def _options(config: Config, key: str, show_scale: bool, zero_init: bool) -> dict[str, Any]:
    name = config.get(f"{key}.name")
    check_choice(key, RULES, name=name)
    part, rule, values = RULES[name]
    is_adam = issubclass(rule, optim.FleetAdam)

    def number(option: str, default: float) -> float:
        value = config.get(f"{key}.{part}.{option}", default)
        if type(value) not in (int, float):
            raise BadRequest(f"{key}.{part}.{option}: expected a number, found {value!r}")
        return float(value)

    values = {
        **values,
        "lr": number("learning_rate", 1e-3 if is_adam else 0.05),
        "bounds": _bounds(config, f"{key}.{part}.weight_bounds"),
    }
    if part == "adagrad":
        values["show_scale"] = show_scale
    if rule is optim.FleetAdagrad:
        values["initial_g2sum"] = number("initial_g2sum", 3.0)
    elif is_adam:
        values["betas"] = number("beta1_decay_rate", 0.9), number("beta2_decay_rate", 0.999)
        values["eps"] = number("ada_epsilon", 1e-8)
    start = number("initial_range", 1e-4)
    return {
        "optimizer": rule(**values),
        "initializer": (TailUniform if zero_init else Uniform)(-start, start),
        "absent": "zeros",
    }


def _bounds(config: Config, key: str) -> tuple[float, float]:
    bounds = config.get(key, (-10.0, 10.0))
    is_list = isinstance(bounds, (list, tuple)) and len(bounds) == 2
    if not is_list or any(type(bound) not in (int, float) for bound in bounds):
        raise BadRequest(f"{key}: expected [lowest, highest], found {bounds!r}")
    return float(bounds[0]), float(bounds[1])
