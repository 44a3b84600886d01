"""torch's compiler stays unloaded where nothing is compiled: loading it takes as long as torch."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

# torch excludes these from compiling in a way that loads the compiler when they are first called.
_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def not_compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """torch.compiler.disable, for processes in which the compiler is loaded already; `function`
    itself in others.
    """

    def disabled(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        call: Callable[_P, _R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return call(*args, **kwargs)

    return _chosen_at_call(function, disabled)


def keep_unloaded() -> None:
    """From now on the optimizers of torch do not load the compiler, their `step` excepted."""
    for name in _METHODS:
        method = getattr(torch.optim.Optimizer, name)
        if hasattr(method, "__wrapped__") and not hasattr(method, "is_chosen_at_call"):
            chosen = _chosen_at_call(method.__wrapped__, method)
            chosen.is_chosen_at_call = True  # type: ignore[attr-defined]
            setattr(torch.optim.Optimizer, name, chosen)


def step(optimizer: torch.optim.Optimizer) -> None:
    """The `step` of an optimizer of torch's own, without its hooks and without the compiler."""
    with torch.no_grad():
        _plain_step(type(optimizer))(optimizer)  # type: ignore[arg-type]  # classes are hashable


@functools.cache
def _plain_step(cls: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    plain: Callable[[torch.optim.Optimizer], Any] = inspect.unwrap(cls.step)
    return plain


def _chosen_at_call(plain: Callable[_P, _R], disabled: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(plain)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        is_loaded = "torch._dynamo" in sys.modules
        return (disabled if is_loaded else plain)(*args, **kwargs)

    return call
