"""Some stages of a model, for one batch, at a compute worker: forward, then backward."""

from __future__ import annotations

import itertools
import secrets
import threading
from typing import Any

import torch
from torch import Tensor

from trireme.errors import BadRequest, NotReady
from trireme.train.compute.compute_messages import ComputeAnswer
from trireme.train.compute.compute_workers import ComputeWorkers
from trireme.train.compute.model_state import (
    ModelIdentity,
    check_buffers,
    check_gradients,
    check_loss,
    check_random,
    write_buffers,
)
from trireme.train.compute.stage_messages import (
    BACKWARD,
    DROP,
    STAGES,
    TOKENS_MAX,
    BackwardRequest,
    Owner,
    StageRequest,
)

DROP_S = 1.0
"""Seconds to tell a compute worker what it need not keep."""


class RemoteGraphs:
    """The graphs that compute workers keep for this worker, by token. Threads: any."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        # Drawn, since a worker of another job that asks the same compute worker may be the same
        # owner, and must not get the gradients of this one's graph.
        self._token_prefix, self._numbers = secrets.token_hex(8), itertools.count()
        self._kept: dict[str, tuple[ComputeWorkers, str]] = {}
        self._lock = threading.Lock()

    def next_token(self) -> str:
        return f"{self._token_prefix} {next(self._numbers)}"

    def note(self, token: str, workers: ComputeWorkers, address: str) -> None:
        """A compute worker has the graph of this token. Of more than TOKENS_MAX the oldest are
        forgotten: those of batches whose loss did not depend on the stage, so that backward never
        asks for them.
        """
        with self._lock:
            self._kept[token] = (workers, address)
            while len(self._kept) > TOKENS_MAX:
                del self._kept[next(iter(self._kept))]

    def forget(self, token: str) -> str | None:
        """Where the graph is, which is asked for or lost now."""
        with self._lock:
            _, address = self._kept.pop(token, (None, None))
            return address

    def drop(self) -> None:
        """Tell compute workers which graphs nobody will ask for, if they can be reached."""
        with self._lock:
            kept, self._kept = self._kept, {}
        by_place: dict[tuple[ComputeWorkers, str], list[str]] = {}
        for token, place in kept.items():
            by_place.setdefault(place, []).append(token)
        for (workers, address), tokens in by_place.items():
            body = {**self.owner.to_wire(), "tokens": tokens}
            workers.call_at(address, DROP, body, [], timeout_s=DROP_S)


class StageCall:
    """The calls for a batch. The compute worker that has computed forward keeps the graph; if it
    has gone, or the graph has, another computes both from the same request, with the same bits.

    request: as it is sent. inputs: the tensors of it that return gradients, then `parameters`.
    buffers: of the model here; those that have changed are written.

    Threads: one at a time.
    """

    def __init__(
        self,
        workers: ComputeWorkers,
        identity: ModelIdentity,
        graphs: RemoteGraphs,
        request: StageRequest,
        inputs: list[Tensor],
        parameters: list[Tensor],
        buffers: list[Tensor],
    ) -> None:
        self._workers, self._identity, self._graphs = workers, identity, graphs
        self.request = request
        self.inputs, self.parameters, self._buffers = inputs, parameters, buffers
        self._answer = ComputeAnswer()

    def forward(self) -> ComputeAnswer:
        request = self.request
        learns = request.training and bool(self.inputs or self.parameters)
        if learns and request.labels is None:
            request.token = self._graphs.next_token()
        answer, address = self._ask(request)
        if request.token:
            self._graphs.note(request.token, self._workers, address)
        self._check(answer)
        write_buffers(self._buffers, answer.buffers)
        if answer.random is not None:
            torch.set_rng_state(answer.random)
        # Copies: in memory that torch has aligned, kernels add up in the same order everywhere.
        answer.outputs = {name: tensor.clone() for name, tensor in answer.outputs.items()}
        self._answer = answer
        return answer

    def _check(self, answer: ComputeAnswer) -> None:
        """Raises BadRequest: it is no answer to the request. Then nothing has changed here."""
        has_loss = self.request.labels is not None
        check_loss(answer.loss, is_wanted=has_loss)
        if has_loss and self.request.training:
            check_gradients(self._leaves, [*answer.inputs, *answer.parameters])
        for name in answer.learned:
            output = answer.outputs.get(name)
            if output is None or not output.is_floating_point():
                raise BadRequest(
                    f"compute workers: expected floats that learn among the outputs"
                    f" {', '.join(answer.outputs)}, found {name}"
                )
        check_buffers(self._buffers, answer.buffers)
        check_random(answer.random, self.request.random)

    @property
    def _leaves(self) -> list[Tensor]:
        """What gets gradients, in their order."""
        return [*self.inputs, *self.parameters]

    def backward(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the inputs, then of the parameters. gradients: of the outputs, or of the
        loss, if it was asked for.
        """
        if self.request.labels is not None:
            return _scaled([*self._answer.inputs, *self._answer.parameters], gradients[0])
        answer = self._kept_backward(gradients) or self._anew(gradients)
        of_leaves = [*answer.inputs, *answer.parameters]
        check_gradients(self._leaves, of_leaves)
        check_buffers(self._buffers, answer.buffers)
        write_buffers(self._buffers, answer.buffers)
        return of_leaves

    def _kept_backward(self, gradients: list[Tensor | None]) -> ComputeAnswer | None:
        """None: the graph has gone, or its compute worker has."""
        request = self.request
        address = self._graphs.forget(request.token)
        if address is None:
            return None
        ask = BackwardRequest(
            model=request.model, owner=request.owner, token=request.token, gradients=gradients
        )
        try:
            with self._identity.explained():
                reply = self._workers.call_at(address, BACKWARD, *ask.to_wire())
        except NotReady as error:
            if "raised" in (error.details or {}):
                raise
            return None
        return None if reply is None else ComputeAnswer.from_wire(reply.body, reply.arrays)

    def _anew(self, gradients: list[Tensor | None]) -> ComputeAnswer:
        self.request.token, self.request.gradients = "", gradients
        answer, _ = self._ask(self.request)
        return answer

    def _ask(self, request: StageRequest) -> tuple[ComputeAnswer, str]:
        with self._identity.explained():
            reply, address = self._workers.call(STAGES, *request.to_wire())
        return ComputeAnswer.from_wire(reply.body, reply.arrays), address


def call_stages(call: StageCall) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The loss, if the request has labels, and the outputs by name: with gradients in training,
    unless they are those of the model.
    """
    names: list[str] = []
    results = _Calling.apply(call, names, *call.inputs, *call.parameters)  # type: ignore[no-untyped-call]
    outputs = dict(zip(names, results[1:], strict=True))
    return None if call.request.labels is None else results[0], outputs


class _Calling(torch.autograd.Function):
    """inputs, parameters -> loss (nothing, if there is none), outputs."""

    @staticmethod
    def forward(ctx: Any, call: StageCall, names: list[str], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        answer, ctx.call = call.forward(), call
        names += answer.outputs
        loss = torch.empty(0) if answer.loss is None else answer.loss
        learned = {loss} if answer.loss is not None else set()
        if call.request.labels is None:
            learned = {answer.outputs[name] for name in answer.learned}
        results = (loss, *answer.outputs.values())
        ctx.mark_non_differentiable(*(result for result in results if result not in learned))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: StageCall = ctx.call
        is_loss = call.request.labels is not None
        return None, None, *call.backward(list(gradients[:1] if is_loss else gradients[1:]))


def _scaled(gradients: list[Tensor | None], factor: Tensor | None) -> list[Tensor | None]:
    if factor is None or float(factor) == 1.0:
        return gradients
    return [None if gradient is None else gradient * factor for gradient in gradients]
