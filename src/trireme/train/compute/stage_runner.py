"""Runs stages of a model on requests. It keeps graphs, which can be computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trireme import _core
from trireme.data.batch import Batch
from trireme.errors import BadRequest, NotReady
from trireme.nn.stages import Stages
from trireme.protocol.wire import need_list
from trireme.rpc import Handler, Reply, Request
from trireme.train.compute.compute_messages import ComputeAnswer, leaves_of
from trireme.train.compute.kept_graphs import Graph, KeptGraphs
from trireme.train.compute.model_runner import Method, set_random
from trireme.train.compute.model_state import changed
from trireme.train.compute.stage_messages import (
    BACKWARD,
    DROP,
    STAGES,
    TOKENS_MAX,
    BackwardRequest,
    Owner,
    StageRequest,
    stage_host_tensors,
)
from trireme.train.loop.scoring import Scored, Scorer

T = TypeVar("T")


class StageRunner:
    """The stages of a compute worker, all on its device.

    A request's weights and buffers are used in place of the model's own, so that the graph of a
    batch is not disturbed by the next one. In backward, too: torch.utils.checkpoint computes parts
    of forward again there, with what the modules have then.

    Threads: one.
    """

    num_threads = 1

    def __init__(
        self,
        stages: Stages,
        scorer: Scorer,
        device: torch.device,
        pool: _core.Pool,
        graphs: KeptGraphs,
    ) -> None:
        self.graphs = graphs
        self.model, self.scorer = stages, scorer
        self._with_state = _WithState(stages)
        self._without = scorer.without_loss()
        self._device, self._pool = device, pool

    def methods(self) -> dict[str, Method]:
        def stages(body: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
            return self.run(StageRequest.from_wire(body, tensors)).to_wire()

        def gradients(body: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
            return self.backward(BackwardRequest.from_wire(body, tensors)).to_wire()

        return {
            STAGES: Method(stage_host_tensors, stages),
            BACKWARD: Method(lambda _: set(), gradients),
        }

    def handlers(self) -> dict[str, Handler]:
        return {DROP: self._on_drop}

    def _on_drop(self, request: Request) -> Reply:
        owner = Owner.from_wire(request.body)
        self.graphs.meet(owner)
        self.graphs.drop(owner, need_list(request.body, "tokens", str, TOKENS_MAX))
        return Reply()

    def run(self, request: StageRequest) -> ComputeAnswer:
        """Raises BadRequest: another model's state; what the stages or the loss raise."""
        names = request.stages
        check_stages(self.model, names)
        set_random(request.random, request.seed, self._device)
        parameters, buffers = self._state(request)
        before = _copies(buffers)
        values, leaves = self._inputs(request)
        self.model.train(request.training)
        with torch.set_grad_enabled(request.training):
            with self.scorer.autocasting([self._device]):
                outputs = self._with_state.run(
                    lambda: self.model.run(names, values), parameters, buffers
                )
            answer, roots = self._answer(request, outputs)
        graph = Graph(roots, leaves, parameters, buffers)
        if request.training and request.labels is not None:
            self._train(graph, [torch.ones_like(root) for root in roots], answer)
        elif request.gradients is not None:
            self._train(graph, request.gradients, answer)
        elif request.training and request.token:
            self.graphs.keep(request.owner, request.token, graph, request.graphs_max)
        answer.buffers = changed([*buffers.values()], before)
        if request.random is not None:
            answer.random = torch.get_rng_state()
        return answer

    def backward(self, request: BackwardRequest) -> ComputeAnswer:
        """Raises NotReady: the graph is not here any more."""
        self.graphs.meet(request.owner)
        graph = self.graphs.take(request.owner, request.token)
        if graph is None:
            raise NotReady(f"compute worker: expected the graph {request.token!r}, found none")
        answer, before = ComputeAnswer(), _copies(graph.buffers)
        self._train(graph, request.gradients, answer)
        answer.buffers = changed([*graph.buffers.values()], before)
        return answer

    def _train(
        self, graph: Graph, gradients: Sequence[Tensor | None], answer: ComputeAnswer
    ) -> None:
        """Backward from gradients of the outputs; the answer gets those of the leaves."""
        if len(gradients) != len(graph.outputs):
            raise BadRequest(
                f"compute workers: expected gradients of {len(graph.outputs)} outputs, found"
                f" {len(gradients)}"
            )
        with_gradient = [
            (output, gradient)
            for output, gradient in zip(graph.outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if with_gradient:
            roots, of_roots = zip(*with_gradient, strict=True)
            self._with_state.run(
                lambda: torch.autograd.backward(roots, of_roots), graph.parameters, graph.buffers
            )
        answer.inputs = [leaf.grad for leaf in graph.inputs]
        answer.parameters = [p.grad for p in graph.parameters.values() if p.requires_grad]

    def _state(self, request: StageRequest) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The request's parameters and buffers, by the names of the model's own."""
        parameters, buffers = part_state(self.model, request.stages)
        own = [*parameters.values(), *buffers.values()]
        if [t.shape for t in own] != [t.shape for t in request.state]:
            raise BadRequest(
                f"compute workers: expected the state of stages {', '.join(request.stages)} of"
                f" {len(own)} tensors, found another of {len(request.state)}"
            )
        # Copies: in memory that torch has aligned, kernels add up in the same order everywhere.
        copies = [tensor.to(self._device, copy=True) for tensor in request.state]
        num = len(parameters)
        for i, weight in enumerate(copies[:num]):
            weight.requires_grad_(request.training and i not in request.frozen)
        return (
            dict(zip(parameters, copies[:num], strict=True)),
            dict(zip(buffers, copies[num:], strict=True)),
        )

    def _inputs(self, request: StageRequest) -> tuple[Any, list[Tensor]]:
        """What the first of the stages gets, and the leaves of it that return gradients."""
        inputs = request.inputs
        if isinstance(inputs, Batch):
            inputs.pool = self._pool
            leaves = leaves_of(inputs) if request.training else []
        else:
            inputs = {name: tensor.clone() for name, tensor in inputs.items()}
            leaves = [inputs[learned] for learned in request.learned if request.training]
        for leaf in leaves:
            leaf.requires_grad_()
        if not isinstance(inputs, Batch):
            inputs = self.model.carried(request.stages[0], inputs)
        return inputs, leaves

    def _answer(self, request: StageRequest, outputs: Any) -> tuple[ComputeAnswer, list[Tensor]]:
        """The answer without gradients, and the tensors that backward begins with."""
        if request.stages[-1] != self.model.names[-1]:
            learned = [name for name, tensor in outputs.items() if tensor.requires_grad]
            return ComputeAnswer(outputs=dict(outputs), learned=learned), list(outputs.values())
        scored = self._scored(outputs, request.labels)
        roots = [] if scored.loss is None else [scored.loss]
        return ComputeAnswer(outputs=scored.outputs, loss=scored.loss), roots

    def _scored(self, outputs: Any, labels: Batch | None) -> Scored:
        if labels is None:
            return self._without.scored(outputs, Batch({}))
        return self.scorer.scored(outputs, labels)


class _WithState(nn.Module):
    """Computes with other weights and buffers in place of those of stages."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self.stages = stages

    def run(
        self, compute: Callable[[], T], parameters: dict[str, Tensor], buffers: dict[str, Tensor]
    ) -> T:
        """What `compute` returns. parameters, buffers: as `part_state` names them; a buffer that a
        module replaces is replaced there.
        """
        state = {f"stages.{n}": t for n, t in (*parameters.items(), *buffers.items())}
        result: T = functional_call(self, state, (compute,))
        buffers.update({name: state[f"stages.{name}"] for name in buffers})
        return result

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


def _copies(buffers: Mapping[str, Tensor]) -> list[Tensor]:
    return [buffer.clone() for buffer in buffers.values()]


def part_state(
    stages: Stages, names: Sequence[str]
) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """The weights and the buffers of some stages by name; not copied."""
    parts = [(f"stage_{name}.", stages[name]) for name in names]
    return (
        {prefix + n: p for prefix, stage in parts for n, p in stage.named_parameters()},
        {prefix + n: b for prefix, stage in parts for n, b in stage.named_buffers()},
    )


def check_stages(stages: Stages, names: Sequence[str]) -> None:
    """Raises BadRequest: they are not stages that follow one another."""
    first = stages.names.index(names[0]) if names and names[0] in stages.names else -1
    if first < 0 or stages.names[first : first + len(names)] != tuple(names):
        raise BadRequest(
            f"compute workers: expected some of the stages {', '.join(stages.names)} in order,"
            f" found {', '.join(names)}"
        )
