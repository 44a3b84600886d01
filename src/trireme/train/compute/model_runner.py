"""Runs a model on requests, and keeps nothing that a later request needs."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trireme import _core, accelerator
from trireme.errors import NotReady
from trireme.nn.modules import TableModule
from trireme.rpc import Handler
from trireme.train.compute.compute_messages import (
    METHOD,
    ComputeAnswer,
    ComputeRequest,
    host_tensors,
    leaves_of,
)
from trireme.train.compute.model_state import changed_buffers, install
from trireme.train.compute.tensors import Array
from trireme.train.loop.scoring import Scored, Scorer


class Method(NamedTuple):
    """What a request is answered by, in the computing thread.

    host_tensors: body -> the numbers of the tensors that stay on the CPU. Raises BadRequest.
    run: body, tensors -> body and arrays of the answer.
    """

    host_tensors: Callable[[Mapping[str, Any]], set[int]]
    run: Callable[[Mapping[str, Any], Sequence[Tensor]], tuple[dict[str, Any], list[Array]]]


class ModelRunner:
    """The model of a compute worker.

    Args:
        model: on `device`; each request brings its weights and buffers.
        scorer: with the loss.
        pool: threads for the lookups of a batch.
        threads: that may run requests at the same time, each with a replica of the model. With
            more than one the seeds of requests have no effect, because torch's random numbers are
            one sequence for all threads.
    """

    def __init__(
        self,
        model: nn.Module,
        scorer: Scorer,
        device: torch.device,
        pool: _core.Pool,
        *,
        threads: int = 1,
    ) -> None:
        self.model, self.scorer, self.num_threads = model, scorer, threads
        self._idle: queue.SimpleQueue[_ModelCopy] = queue.SimpleQueue()
        if threads > 1:
            torch.seed()  # another sequence than that of every other compute worker
        for number in range(threads):
            own = copy.deepcopy(model, _shared(model)) if number else model
            self._idle.put(_ModelCopy(own, scorer, device, pool, seeds=threads == 1))

    def methods(self) -> dict[str, Method]:
        return {METHOD: Method(host_tensors, self._answer)}

    def handlers(self) -> dict[str, Handler]:
        """Of requests that need not wait for the computing thread."""
        return {}

    def _answer(
        self, body: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> tuple[dict[str, Any], list[Array]]:
        return self.run(ComputeRequest.from_wire(body, tensors)).to_wire()

    def run(self, request: ComputeRequest) -> ComputeAnswer:
        """Forward, and backward in training. Raises NotReady: the request names a state that the
        model does not have; what the model, the loss or the scorer raises.
        """
        own = self._idle.get()  # there is one for each thread
        try:
            return own.run(request)
        finally:
            self._idle.put(own)


def _shared(model: nn.Module) -> dict[int, Any]:
    """What a copy of the model has in common with it, by identity: its tables."""
    tables = [part.table for part in model.modules() if isinstance(part, TableModule)]
    return {id(table): table for table in tables}


class _ModelCopy:
    """The model, or a copy of it, for one request at a time.

    scorer: with the loss. seeds: whether requests set torch's random numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        scorer: Scorer,
        device: torch.device,
        pool: _core.Pool,
        *,
        seeds: bool,
    ) -> None:
        self.model = model
        self._with_loss, self._without = scorer, scorer.without_loss()
        self._device, self._pool, self._seeds = device, pool, seeds
        self._state_id = ""  # of what the model has; "": it has no name

    def run(self, request: ComputeRequest) -> ComputeAnswer:
        self._install(request)
        if self._seeds or request.random is not None:
            set_random(request.random, request.seed, self._device)
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
        answer.inputs = [leaf.grad for leaf in leaves]
        answer.parameters = [parameter.grad for parameter in self.model.parameters()]
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


def set_random(random: Tensor | None, seed: int, device: torch.device) -> None:
    """Let torch's random numbers depend on a request alone."""
    if random is None:
        # torch.manual_seed also formats the stack, for devices that are not initialized: 0.2 ms.
        torch.default_generator.manual_seed(seed)
    else:
        torch.set_rng_state(random)
    accelerator.seed_from_host(device)
