"""The weights, buffers and gradients of a model as lists of tensors, and what makes two models one.

Two processes that run the same script make the same model. Its description is compared before a
compute worker computes anything, so that lists of tensors need no names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trireme.errors import BadRequest, SchemaMismatch
from trireme.nn.lookup import specs_of

_SHOWN_MAX = 5

Description = dict[str, dict[str, str]]
"""Kind of a part -> its name -> what it is."""


def describe(model: nn.Module, loss: Callable[..., Any], label: str | None) -> Description:
    """What has to be the same at a worker and at a compute worker."""
    return {
        "parameter": {name: _form(p) for name, p in model.named_parameters()},
        "buffer": {name: _form(b) for name, b in model.named_buffers()},
        "module": {name or ".": type(m).__qualname__ for name, m in model.named_modules()},
        "lookup": {spec.name: f"{spec.table.width} columns" for spec in specs_of([model])},
        "trainer": {"loss": _name_of(loss), "label": str(label)},
    }


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def digest(description: Description) -> str:
    """Equal for equal descriptions."""
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def differences(own: Description, other: Mapping[str, Any]) -> str:
    """The first fields that differ, with both values, in words."""
    differing = [
        f"{kind} {name}: {parts.get(name, 'none')} here, {others.get(name, 'none')} there"
        for kind, parts in own.items()
        for others in [dict(other.get(kind, {}))]
        for name in dict.fromkeys((*parts, *others))
        if parts.get(name) != others.get(name)
    ]
    more = f"; and {len(differing) - _SHOWN_MAX} more" if len(differing) > _SHOWN_MAX else ""
    return "; ".join(differing[:_SHOWN_MAX]) + more if differing else "the order of their parts"


class ModelIdentity:
    """What a worker's model is, in the requests to compute workers.

    digest: of the model's description, which compute workers compare with their own.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any], label: str | None) -> None:
        self._description = describe(model, loss, label)
        self.digest = digest(self._description)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Let a SchemaMismatch of a compute worker say what differs."""
        try:
            yield
        except SchemaMismatch as error:
            if "model" not in (details := error.details or {}):
                raise
            there = differences(self._description, details["model"])
            raise SchemaMismatch(f"{error}: {there}") from None


def state_of(model: nn.Module) -> list[Tensor]:
    """The weights, then the buffers; not copied."""
    return [*model.parameters(), *model.buffers()]


def frozen_in(model: nn.Module) -> list[int]:
    """Which parameters, by their order, do not learn."""
    return [i for i, p in enumerate(model.parameters()) if not p.requires_grad]


def install(model: nn.Module, state: Sequence[Tensor], frozen: Sequence[int]) -> None:
    """Copy a state into the model. Raises BadRequest: it is another model's."""
    own = state_of(model)
    if [t.shape for t in own] != [t.shape for t in state]:
        raise BadRequest(
            f"compute workers: expected the state of a model of {len(own)} tensors, found another"
            f" of {len(state)}: shapes change while it trains"
        )
    with torch.no_grad():
        for target, value in zip(own, state, strict=True):
            target.data.copy_(value)
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i not in frozen)


def changed_buffers(model: nn.Module, state: Sequence[Tensor]) -> dict[int, Tensor]:
    """Copies of the buffers that are not those of `state` any more, by their order."""
    buffers = list(model.buffers())
    return changed(buffers, state[len(state) - len(buffers) :])


def changed(buffers: Sequence[Tensor], before: Sequence[Tensor]) -> dict[int, Tensor]:
    """Copies of the buffers that are not what they were, by their order."""
    return {
        i: buffer.detach().clone()
        for i, (buffer, old) in enumerate(zip(buffers, before, strict=True))
        if not torch.equal(buffer, old)
    }


def write_buffers(buffers: Sequence[Tensor], changed: Mapping[int, Tensor]) -> None:
    """Copy those that have changed into a model's. Raises BadRequest: they have other shapes."""
    for i, value in changed.items():
        if not 0 <= i < len(buffers) or buffers[i].shape != value.shape:
            raise BadRequest(
                f"compute workers: expected buffer {i} of {len(buffers)}, found one of shape"
                f" {tuple(value.shape)}"
            )
        buffers[i].data.copy_(value)


def write_gradients(
    targets: Iterator[Tensor] | Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> None:
    """Give each tensor its gradient, on its device, in place of the one that it has. Raises
    BadRequest: other shapes.
    """
    own = list(targets)
    forms = [None if g is None else g.shape for g in gradients]
    if len(own) != len(forms) or any(
        f not in (None, t.shape) for t, f in zip(own, forms, strict=True)
    ):
        raise BadRequest(
            f"compute workers: expected gradients of shapes {[tuple(t.shape) for t in own]}, found"
            f" {[None if f is None else tuple(f) for f in forms]}"
        )
    for target, gradient in zip(own, gradients, strict=True):
        target.grad = None if gradient is None else gradient.to(target.device)
