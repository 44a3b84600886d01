"""What a worker asks of a compute worker that runs some stages of a model, as messages.

stages: inputs -> outputs; the graph stays with the compute worker, under a token
stages: with the last stage, inputs and labels -> outputs, loss and gradients
stages: inputs and gradients of outputs -> gradients, where the graph is gone
backward: token and gradients of outputs -> gradients of inputs and parameters
drop: tokens of graphs that are not needed any more
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trireme.data.batch import Batch
from trireme.protocol.wire import need, need_list
from trireme.train.compute.compute_messages import (
    NumberedTensors,
    TensorNumbers,
    batch_from_wire,
    batch_to_wire,
    host_tensors,
)
from trireme.train.compute.tensors import Array

STAGES, BACKWARD, DROP = "compute.stages", "compute.backward", "compute.drop"
STAGES_MAX, TOKENS_MAX = 256, 4096


@dataclass(frozen=True)
class Owner:
    """A process whose graphs are kept: a worker, and its incarnation (see ARCHITECTURE.md)."""

    worker: int
    incarnation: int

    def to_wire(self) -> dict[str, int]:
        return {"worker": self.worker, "incarnation": self.incarnation}

    @staticmethod
    def from_wire(body: Mapping[str, Any]) -> Owner:
        return Owner(need(body, "worker", int), need(body, "incarnation", int))


@dataclass(kw_only=True, eq=False)
class StageRequest:
    """Forward of stages that follow one another, and backward where it is wanted at once.

    model: digest of the model's description. stages: their names, in order.
    owner: who asks. token: names the graph, which is to be kept; "": it is not.
    graphs_max: how many graphs of the owner are kept at most.
    inputs: the batch, if it is for the first stage; else the boundary tensors by name.
    learned: those of the boundary tensors that return gradients.
    labels: what the loss reads, if the last stage is among these; None: there is no loss.
    state: weights, then buffers. frozen: which of the weights do not learn.
    gradients: of the outputs, in their order, for a backward at once; None: not wanted.
    random, seed: as ComputeRequest.
    """

    model: str
    stages: list[str]
    owner: Owner
    token: str
    graphs_max: int
    training: bool
    inputs: Batch | dict[str, Tensor]
    learned: list[str] = field(default_factory=list)
    labels: Batch | None
    state: list[Tensor]
    frozen: list[int] = field(default_factory=list)
    gradients: Sequence[Tensor | None] | None = None
    random: Tensor | None = None
    seed: int = 0

    def to_wire(self) -> tuple[dict[str, Any], list[Array]]:
        numbers = TensorNumbers()
        batch = self.inputs if isinstance(self.inputs, Batch) else None
        boundary = {} if isinstance(self.inputs, Batch) else self.inputs
        return numbers.message(
            {
                "model": self.model,
                "stages": self.stages,
                **self.owner.to_wire(),
                "token": self.token,
                "graphs_max": self.graphs_max,
                "training": self.training,
                "batch": None if batch is None else batch_to_wire(batch, numbers),
                "boundary": numbers.by_key(boundary),
                "learned": self.learned,
                "labels": None if self.labels is None else batch_to_wire(self.labels, numbers),
                "state": numbers.all_of(self.state),
                "frozen": self.frozen,
                "random": numbers.of(self.random),
                "seed": self.seed,
                "gradients": None if self.gradients is None else numbers.all_of(self.gradients),
            }
        )

    @staticmethod
    def from_wire(body: Mapping[str, Any], tensors: Sequence[Tensor]) -> StageRequest:
        """tensors: as `unpack` gives them. Raises BadRequest, naming the field."""
        by_number = NumberedTensors(tensors)
        inputs: Batch | dict[str, Tensor] = by_number.by_key(body, "boundary", str)
        if body.get("batch") is not None:
            inputs = batch_from_wire(need(body, "batch", dict), by_number)
        labels = gradients = None
        if body.get("labels") is not None:
            labels = batch_from_wire(need(body, "labels", dict), by_number)
        if body.get("gradients") is not None:
            gradients = by_number.list_of(body, "gradients")
        return StageRequest(
            model=need(body, "model", str),
            stages=need_list(body, "stages", str, STAGES_MAX),
            owner=Owner.from_wire(body),
            token=need(body, "token", str),
            graphs_max=need(body, "graphs_max", int),
            training=need(body, "training", bool),
            inputs=inputs,
            learned=need_list(body, "learned", str),
            labels=labels,
            state=list(map(by_number.one, need_list(body, "state", int))),
            frozen=need_list(body, "frozen", int),
            gradients=gradients,
            random=by_number.maybe(need(body, "random", int)),
            seed=need(body, "seed", int),
        )


@dataclass(kw_only=True, eq=False)
class BackwardRequest:
    """Backward of a kept graph. gradients: of the outputs, in their order; None: of no loss."""

    model: str
    owner: Owner
    token: str
    gradients: Sequence[Tensor | None]

    def to_wire(self) -> tuple[dict[str, Any], list[Array]]:
        numbers = TensorNumbers()
        body = {"model": self.model, **self.owner.to_wire(), "token": self.token}
        return numbers.message({**body, "gradients": numbers.all_of(self.gradients)})

    @staticmethod
    def from_wire(body: Mapping[str, Any], tensors: Sequence[Tensor]) -> BackwardRequest:
        by_number = NumberedTensors(tensors)
        return BackwardRequest(
            model=need(body, "model", str),
            owner=Owner.from_wire(body),
            token=need(body, "token", str),
            gradients=by_number.list_of(body, "gradients"),
        )


def stage_host_tensors(body: Mapping[str, Any]) -> set[int]:
    """The numbers of the tensors of a request that stay on the CPU. Raises BadRequest."""
    stay = {need(body, "random", int)} if "random" in body else set()
    for name in ("batch", "labels"):
        if body.get(name) is not None:
            stay |= host_tensors({**need(body, name, dict), "random": -1})
    return stay
