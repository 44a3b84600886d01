"""Runs a model on requests, and keeps nothing that a later request needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trireme import _core, accelerator
from trireme.errors import NotReady
from trireme.train.compute.compute_messages import ComputeAnswer, ComputeRequest, leaves_of
from trireme.train.compute.model_state import changed_buffers, install
from trireme.train.loop.scoring import Loss, Scored, Scorer


class ModelRunner:
    """The model of a compute worker.

    Args:
        model: on `device`; each request brings its weights and buffers.
        loss, label: as Trainer has them.
        pool: threads for the lookups of a batch.

    Threads: one.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        label: str | None,
        device: torch.device,
        pool: _core.Pool,
    ) -> None:
        self.model, self.loss, self.label = model, loss, label
        self._device, self._pool = device, pool
        self._with_loss, self._without = Scorer(loss, label), Scorer(None, None)
        self._state_id = ""  # of what the model has; "": it has no name

    def run(self, request: ComputeRequest) -> ComputeAnswer:
        """Forward, and backward in training. Raises NotReady: the request names a state that the
        model does not have; what the model, the loss or the scorer raises.
        """
        self._install(request)
        _set_random(request, self._device)
        request.batch.pool = self._pool
        leaves = leaves_of(request.batch)
        self.model.train(request.training)
        score = self._with_loss if request.scores else self._without
        if request.training:
            answer = self._train(request, leaves, score)
        else:
            answer = self._evaluate(request, score)
        if request.random is not None:
            answer.random = torch.get_rng_state()
        return answer

    def _install(self, request: ComputeRequest) -> None:
        if request.state is not None:
            self._state_id = ""  # until all of it is installed
            install(self.model, request.state, request.frozen)
            self._state_id = request.state_id
        elif not request.state_id or request.state_id != self._state_id:
            raise NotReady("compute worker: expected the state of the model, found its name only")

    def _train(self, request: ComputeRequest, leaves: list[Tensor], score: Scorer) -> ComputeAnswer:
        for leaf in leaves:
            leaf.requires_grad_()
        self.model.zero_grad()
        self._state_id = ""
        scored = score(self.model, request.batch)
        assert scored.loss is not None
        scored.loss.backward()  # type: ignore[no-untyped-call]
        assert request.state is not None
        answer = _answer(scored)
        answer.rows = [leaf.grad for leaf in leaves]
        answer.gradients = [parameter.grad for parameter in self.model.parameters()]
        answer.buffers = changed_buffers(self.model, request.state)
        self.model.zero_grad()  # the answer alone has the gradients
        return answer

    def _evaluate(self, request: ComputeRequest, score: Scorer) -> ComputeAnswer:
        before = _versions(self.model)
        with torch.no_grad():
            answer = _answer(score(self.model, request.batch))
        if _versions(self.model) != before:
            self._state_id = ""
        return answer


def _answer(scored: Scored) -> ComputeAnswer:
    """Copies: an output may be a view of a weight, which the next request overwrites."""
    outputs = {name: output.clone() for name, output in scored.outputs.items()}
    return ComputeAnswer(outputs=outputs, loss=scored.loss)


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    return [(id(buffer), buffer._version) for buffer in model.buffers()]


def _set_random(request: ComputeRequest, device: torch.device) -> None:
    """Let torch's random numbers depend on the request alone."""
    if request.random is None:
        torch.manual_seed(request.seed)
    else:
        torch.set_rng_state(request.random)
        accelerator.seed_from_host(device)
