"""The optimizers of torch that servers run on blocks, and the values of their param groups."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trireme.accelerator import HOST
from trireme.dense.adam_d2sum import AdamD2Sum
from trireme.errors import BadRequest
from trireme.torch_compiler import step

# Element-wise optimizers: applied block by block they give the bits of the whole tensor.
ELEMENTWISE: Mapping[str, type[torch.optim.Optimizer]] = {
    cls.__name__: cls
    for cls in (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        AdamD2Sum,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
}
# These need whole parameters: they run if none is cut, and blocks have their shape.
WHOLE: Mapping[str, type[torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in ("Adafactor", "Muon")
    if hasattr(torch.optim, name)  # Muon came with torch 2.9
}
KNOWN: Mapping[str, type[torch.optim.Optimizer]] = {**ELEMENTWISE, **WHOLE}
REFUSED = {
    "LBFGS": "it needs the loss as a closure",
    "SparseAdam": "it is for sparse gradients; use trireme.optim.Adam on a table",
}
# Values of Muon that choose its function, so they are fixed when blocks are made.
FIXED = ("ns_coefficients", "ns_steps", "adjust_lr_fn")
NS_STEPS_MAX = 99
# Steps are tried with a late step count too, because some values fail only then; exact in float32.
_LATE_STEP = 1 << 24
# Classes with a fused CPU kernel: one pass over memory instead of one per operation.
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
# The server chooses the kernel: these change the speed, never the formula.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")

_FLOAT32_MAX = torch.finfo(torch.float32).max

GroupValues = dict[str, Any]


def step_fused(optimizer: torch.optim.Optimizer) -> None:
    """`step` of an optimizer that may be fused. SGD's fused kernel takes momentum of all parameters
    or of none: those that have their first gradient later than others make a step of their own.
    """
    late = [p for group in optimizer.param_groups for p in _without_momentum(optimizer, group)]
    if not late:
        step(optimizer)
        return
    all_of_them = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in all_of_them]
    is_late = set(map(id, late))
    try:
        for wanted in (False, True):
            for p, gradient in zip(all_of_them, gradients, strict=True):
                p.grad = gradient if (id(p) in is_late) == wanted else None
            step(optimizer)
    finally:
        for p, gradient in zip(all_of_them, gradients, strict=True):
            p.grad = gradient


def _without_momentum(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[Tensor]:
    """The parameters with a gradient that have no momentum yet, if others of their group have."""
    if not (isinstance(optimizer, torch.optim.SGD) and group["momentum"]):
        return []
    stepping = [p for p in group["params"] if p.grad is not None]
    late = [p for p in stepping if optimizer.state.get(p, {}).get("momentum_buffer") is None]
    return late if len(late) < len(stepping) else []


def optimizer_spec(optimizer: torch.optim.Optimizer) -> str:
    """The class name of an optimizer that servers can run. Raises BadRequest for others."""
    name = type(optimizer).__name__
    if name in REFUSED:
        raise BadRequest(f"DistributedOptimizer: {name} cannot run on blocks: {REFUSED[name]}")
    if KNOWN.get(name) is not type(optimizer):
        raise BadRequest(
            f"DistributedOptimizer: expected one of {', '.join(KNOWN)}, not a subclass,"
            f" found {type(optimizer).__module__}.{name}"
        )
    return name


def needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer needs whole parameters."""
    return WHOLE.get(type(optimizer).__name__) is type(optimizer)


def group_values(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> GroupValues:
    """The values of a param group that are sent with each push. defaults: the optimizer's;
    schedulers add names of their own to a group. Raises BadRequest for what servers would refuse.
    """
    values: GroupValues = {}
    for key, value in group.items():
        if key not in defaults or key in IMPLEMENTATION:
            continue
        if isinstance(value, Tensor):
            value = value.item()
        known, value = (tuple(v) if isinstance(v, list) else v for v in (defaults[key], value))
        if known is not None and not have_one_form(known, value):
            raise BadRequest(f"param groups: expected {key} like {known!r}, found {value!r}")
        values[key] = _checked_value(key, list(value) if isinstance(value, tuple) else value)
    return values


def _checked_value(key: str, value: Any) -> Any:
    if type(value) in (int, bool, float) and abs(value) <= _FLOAT32_MAX:
        return value
    for scalar in value if isinstance(value, list) else [value]:
        is_text = isinstance(scalar, str) and key in FIXED
        is_number = isinstance(scalar, int | float) and abs(scalar) <= _FLOAT32_MAX
        if not (scalar is None or is_text or is_number):
            raise BadRequest(f"param groups: expected finite float32, found {key}={value!r}")
    return value


def check_rates(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raises BadRequest: a learning rate is no finite float32; nothing has been trained with it."""
    for group in groups:
        lr = group.get("lr")
        if isinstance(lr, Tensor) and lr.device == HOST:  # others would have to be waited for
            lr = lr.item()
        if isinstance(lr, int | float):
            _checked_value("lr", lr)


def check_group(cls: type[torch.optim.Optimizer], group: dict[str, Any]) -> None:
    """Check the values of a param group: torch checks them as arguments, not in groups."""
    some = [torch.zeros(1, 1)]
    defaults = make(cls, some).defaults
    unknown = group.keys() - defaults.keys()
    if unknown:
        raise BadRequest(f"blocks: {cls.__name__} knows no {sorted(unknown)}")
    for key, value in group.items():
        if defaults[key] is not None and not have_one_form(defaults[key], value):
            raise BadRequest(f"blocks: expected {key} like {defaults[key]!r}, found {value!r}")
    ns_steps = group.get("ns_steps", 1)
    if not (isinstance(ns_steps, int) and 1 <= ns_steps <= NS_STEPS_MAX):
        raise BadRequest(f"blocks: expected 1 <= ns_steps <= {NS_STEPS_MAX}, found {ns_steps!r}")
    try:
        optimizer = make(cls, some, **arguments_of(cls, group))
    except (TypeError, ValueError) as error:
        raise BadRequest(f"blocks: {cls.__name__} does not take {group!r}: {error}") from error
    check_step(optimizer, 0, group, {})


def check_change(key: str, known: Any, value: Any) -> None:
    """Raises BadRequest unless a push may replace the current value by this one."""
    if not have_one_form(known, value) or (key in FIXED and known != value):
        raise BadRequest(f"blocks: expected {key} like {known!r}, found {value!r}")


def check_step(
    optimizer: torch.optim.Optimizer, group: int, values: GroupValues, state: Mapping[str, Any]
) -> None:
    """Raises BadRequest unless a group of the optimizer can step with these values on weights with
    this state. One element is tried: whether torch raises does not depend on the others.
    """
    tried = {name: _one_element(value) for name, value in state.items()}
    weights = tried.pop("weights", torch.zeros(1, 1))
    weights.grad = torch.zeros_like(weights)
    known = {name: optimizer.param_groups[group][name] for name in optimizer.defaults}
    like = make(type(optimizer), [{"params": [weights], **known, **values}])
    like.state[weights].update(tried)
    try:
        step(like)
        if isinstance(count := like.state[weights].get("step"), Tensor):
            count.fill_(_LATE_STEP)
        step(like)
    except Exception as error:  # torch raises a KeyError for state that is missing, and others
        what = f"the state {sorted(tried)}" if tried else "no state"
        raise BadRequest(
            f"blocks: {type(optimizer).__name__} cannot step with {values!r} where weights have"
            f" {what}: {type(error).__name__}: {error}"
        ) from error


def _one_element(value: Any) -> Any:
    """A copy of the first element of a tensor with as many dimensions; other values as they are."""
    return value[(slice(1),) * value.ndim].clone() if isinstance(value, Tensor) else value


def have_one_form(known: Any, value: Any) -> bool:
    if isinstance(known, tuple):
        is_alike = isinstance(value, tuple) and len(value) == len(known)
        return is_alike and all(map(_is_number_for, known, value))
    kinds = (tuple, bool, type(None))  # torch's fused kernels take no number for a bool
    return all(isinstance(known, kind) == isinstance(value, kind) for kind in kinds)


def _is_number_for(known: Any, value: Any) -> bool:
    """For elements of tuples such as betas. None stands for a number that torch computes."""
    return not isinstance(value, bool | tuple) and (known is None or value is not None)


def shapes_made(
    optimizer: torch.optim.Optimizer, group: int, shape: torch.Size
) -> dict[str, torch.Size]:
    """The shapes of weights, as "weights", and of the state that a step on them makes."""
    weights = torch.zeros(shape)
    weights.grad = torch.zeros(shape)
    values = {name: optimizer.param_groups[group][name] for name in optimizer.defaults}
    like = make(type(optimizer), [{"params": [weights], **values}])
    step(like)
    state = like.state[weights].items()
    return {"weights": shape} | {name: v.shape for name, v in state if isinstance(v, Tensor)}


def begin_state(optimizer: torch.optim.Optimizer, group: int, weights: Tensor) -> None:
    """Give weights of a group the state that a new optimizer begins with: Adagrad before torch 2.12
    makes it when it is constructed, others at the first step.
    """
    values = {name: optimizer.param_groups[group][name] for name in optimizer.defaults}
    arguments = arguments_of(type(optimizer), values)
    begun = make(type(optimizer), [{"params": [weights], **values}], **arguments)
    optimizer.state.pop(weights, None)
    optimizer.state.update(begun.state)


def make(
    cls: type[torch.optim.Optimizer], params: list[Any], **arguments: Any
) -> torch.optim.Optimizer:
    """Construct an optimizer; the base class of torch's optimizers declares fewer arguments."""
    constructor: Callable[..., torch.optim.Optimizer] = cls
    return constructor(params, **arguments)


def arguments_of(cls: type[torch.optim.Optimizer], group: dict[str, Any]) -> dict[str, Any]:
    """The values of a group that are arguments of the constructor."""
    known = inspect.signature(cls).parameters
    return {key: value for key, value in group.items() if key in known}


def as_group(values: Mapping[str, Any]) -> dict[str, Any]:
    """A param group from values of the wire: lists become tuples; only numbers are allowed."""
    group: dict[str, Any] = {}
    for key, value in values.items():
        if key in ("params", *IMPLEMENTATION):
            raise BadRequest(f"blocks: a push may not set {key!r}")
        checked = _checked_value(str(key), value)
        group[str(key)] = tuple(checked) if isinstance(checked, list) else checked
    return group
