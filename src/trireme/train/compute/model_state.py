"""The weights, buffers and gradients of a model as lists of tensors, and what makes two models one.

Two processes that run the same script make the same model. Its description is compared before a
compute worker computes anything, so that lists of tensors need no names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trireme.errors import BadRequest, SchemaMismatch
from trireme.nn.lookup import specs_of
from trireme.train.loop.scoring import Scorer

_SHOWN_MAX = 5

Description = dict[str, dict[str, str]]
"""Kind of a part -> its name -> what it is."""


def describe(model: nn.Module, scorer: Scorer) -> Description:
    """What has to be the same at a worker and at a compute worker."""
    return {
        "parameter": {name: _form(p) for name, p in model.named_parameters()},
        "buffer": {name: _form(b) for name, b in model.named_buffers()},
        "module": {name or ".": type(m).__qualname__ for name, m in model.named_modules()},
        "lookup": {spec.name: f"{spec.table.width} columns" for spec in specs_of([model])},
        "trainer": {
            "loss": str(getattr(scorer.loss, "__qualname__", type(scorer.loss).__qualname__)),
            "label": str(scorer.label),
            "autocast": str(scorer.autocast),
        },
    }


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def digest(description: Description) -> str:
    """Equal for equal descriptions."""
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def differences(own: Description, other: Mapping[str, Any]) -> str:
    """The first fields that differ, with both values, in words."""
    others_by_kind = {
        kind: others if isinstance(others := other.get(kind), Mapping) else {} for kind in own
    }
    differing = [
        f"{kind} {name}: {parts.get(name, 'none')} here, {others.get(name, 'none')} there"
        for kind, parts in own.items()
        for others in [others_by_kind[kind]]
        for name in dict.fromkeys((*parts, *others))
        if parts.get(name) != others.get(name)
    ]
    more = f"; and {len(differing) - _SHOWN_MAX} more" if len(differing) > _SHOWN_MAX else ""
    return "; ".join(differing[:_SHOWN_MAX]) + more if differing else "the order of their parts"


class ModelIdentity:
    """What a worker's model is, in the requests to compute workers.

    digest: of the model's description, which compute workers compare with their own.
    """

    def __init__(self, model: nn.Module, scorer: Scorer) -> None:
        self._description = describe(model, scorer)
        self.digest = digest(self._description)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Let a SchemaMismatch of a compute worker say what differs."""
        try:
            yield
        except SchemaMismatch as error:
            model = (error.details or {}).get("model")
            if not isinstance(model, Mapping):
                raise
            there = differences(self._description, model)
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


def check_buffers(buffers: Sequence[Tensor], changed: Mapping[int, Tensor]) -> None:
    """Raises BadRequest: an answer's buffers are not some of a model's."""
    for i, value in changed.items():
        if not 0 <= i < len(buffers):
            raise BadRequest(
                f"compute workers: expected the number of one of {len(buffers)} buffers, found {i}"
            )
        _check_forms(f"buffer {i}", [buffers[i]], [value])


def check_gradients(targets: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Raises BadRequest: an answer's gradients are not those of these tensors."""
    _check_forms("gradients", targets, gradients)


def check_loss(loss: Tensor | None, *, is_wanted: bool) -> None:
    """Raises BadRequest: an answer lacks the loss, has one that was not asked for, or more numbers
    than one.
    """
    is_loss = loss is not None and loss.numel() == 1 and loss.is_floating_point()
    if is_loss if is_wanted else loss is None:
        return
    expected = "a loss of one float" if is_wanted else "no loss"
    raise BadRequest(
        f"compute workers: expected {expected}, found {'none' if loss is None else _form(loss)}"
    )


def check_random(random: Tensor | None, sent: Tensor | None) -> None:
    """Raises BadRequest: an answer lacks torch's random numbers though they were sent, or has what
    is no state of them.
    """
    if random is None and sent is None:
        return
    if random is None or sent is None or _form(random) != _form(sent):
        expected, actual = (("none" if t is None else _form(t)) for t in (sent, random))
        raise BadRequest(
            f"compute workers: expected a state of random numbers {expected}, found {actual}"
        )
    try:
        torch.Generator().set_state(random)
    except RuntimeError as error:
        raise BadRequest(
            f"compute workers: expected a state of random numbers, found another: {error}"
        ) from error


def _check_forms(what: str, own: Sequence[Tensor], received: Sequence[Tensor | None]) -> None:
    """received: None in place of one that is not there."""
    if len(own) == len(received) and all(
        other is None or (other.dtype, other.shape) == (one.dtype, one.shape)
        for one, other in zip(own, received, strict=True)
    ):
        return
    forms = ["none" if tensor is None else _form(tensor) for tensor in received]
    raise BadRequest(
        f"compute workers: expected {what} of {', '.join(map(_form, own)) or 'nothing'}, found"
        f" {', '.join(forms) or 'nothing'}"
    )


def write_buffers(buffers: Sequence[Tensor], changed: Mapping[int, Tensor]) -> None:
    """Copy those that have changed into a model's, as `check_buffers` has found them."""
    for i, value in changed.items():
        buffers[i].data.copy_(value)


def write_gradients(targets: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Give each tensor its gradient, on its device, in place of the one that it has, as
    `check_gradients` has found them.
    """
    for target, gradient in zip(targets, gradients, strict=True):
        target.grad = None if gradient is None else gradient.to(target.device)
