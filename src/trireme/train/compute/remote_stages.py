"""A model in stages, some of which compute workers run for this worker.

In autograd's graph of a batch, the stages that a compute worker runs are one node. So backward of
the loss reaches all stages, here and there, in the order of one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trireme.data.batch import Batch
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.nn.stages import Stages, stage_label
from trireme.train.compute.compute_messages import leaves_of
from trireme.train.compute.compute_workers import ComputeWorkers, workers_of_label
from trireme.train.compute.model_state import ModelIdentity
from trireme.train.compute.remote_model import (
    RemoteModel,
    credits_of,
    in_order,
    pass_seed,
    remote_model,
    seed_of,
)
from trireme.train.compute.stage_call import RemoteGraphs, StageCall, call_stages
from trireme.train.compute.stage_messages import Owner, StageRequest
from trireme.train.compute.stage_runner import part_state
from trireme.train.loop.replica import Replica
from trireme.train.loop.scoring import Scored, Scorer, column_of


@dataclass(frozen=True, eq=False)
class StageGroup:
    """Stages that follow one another and are computed in one place.

    workers: the compute workers of their label; None: this process.
    """

    names: tuple[str, ...]
    workers: ComputeWorkers | None


def stage_groups(stages: Stages, cluster: Cluster) -> list[StageGroup]:
    """Where the stages are computed, in order. Raises BadRequest: a label without compute workers,
    or compute workers without a stage.
    """
    labels = {name: stage_label(name, cluster) for name in stages.names}
    workers = {label: workers_of_label(cluster, label) for label in dict(cluster.heter)}
    if unused := [label for label in workers if label not in labels.values()]:
        raise BadRequest(
            f"Stages: expected a stage for each label of the job's compute workers, found none for"
            f" {', '.join(unused)} among {', '.join(stages.names)}"
        )
    grouped = itertools.groupby(stages.names, lambda name: workers.get(labels[name]))
    return [StageGroup(tuple(names), where) for where, names in grouped]


class RemoteStages:
    """The stages of a model on the compute workers of their labels.

    Attributes:
        credits: batches in flight of this worker, see `credits_of`.

    Threads: any may use it.
    """

    def __init__(self, cluster: Cluster, stages: Stages, scorer: Scorer) -> None:
        self.groups = stage_groups(stages, cluster)
        self.identity = ModelIdentity(stages, scorer)
        self.scorer = scorer
        self.credits = credits_of(len(cluster.heter), cluster.num_workers)
        self.graphs = RemoteGraphs(Owner(cluster.worker, cluster.client.incarnation))
        cluster.add_running(self.graphs.drop)  # before the calls of `compute_workers` close

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the compute workers."""
        return tuple(
            dict.fromkeys(one.workers.label for one in self.groups if one.workers is not None)
        )

    def begin(self, stages: nn.Module, *, training: bool, threads: int) -> StagePass:
        """One pass over data; what is left of an earlier one that failed is dropped."""
        assert isinstance(stages, Stages)
        self.graphs.drop()
        return StagePass(self, stages, training=training, threads=threads)


class StagePass:
    """One pass over data. Threads: each trains its own replica.

    Random numbers: as RemotePass; stages of this process use torch's.
    """

    def __init__(
        self, remote: RemoteStages, stages: Stages, *, training: bool, threads: int
    ) -> None:
        self._remote, self._stages, self._training = remote, stages, training
        num_remote = sum(group.workers is not None for group in remote.groups)
        self._graphs_max = threads * num_remote
        self._seed = pass_seed(training=training, threads=threads)

    def train(self, replica: Replica, batch: Batch) -> Scored:
        """Forward and backward: parameters and the rows of the batch get gradients, buffers their
        new values.
        """
        assert isinstance(replica.model, Stages)
        scored = self._score(replica.model, batch, replica.number, self._remote.scorer)
        assert scored.loss is not None
        scored.loss.backward()  # type: ignore[no-untyped-call]
        return scored

    def evaluate(self, batches: Iterable[Batch], *, scores: bool) -> Iterator[Scored]:
        """Forward of each batch, in order, with several in flight. scores: with the loss."""
        scorer = self._remote.scorer if scores else self._remote.scorer.without_loss()

        def score(number: int, batch: Batch) -> Scored:
            with torch.no_grad():
                return self._score(self._stages, batch, number, scorer)

        return in_order(score, batches, self._remote.credits)

    def _score(self, stages: Stages, batch: Batch, number: int, scorer: Scorer) -> Scored:
        values: Any = batch
        *before, last = self._remote.groups
        for i, group in enumerate(before):
            values = self._computed(stages, group, values, self._seed_of(number, i))
        if last.workers is None:
            values = self._computed(stages, last, values, 0)
            return scorer.scored(stages.returned(values), batch)
        call = self._call(stages, last, values, self._seed_of(number, len(before)))
        call.request.labels = self._labels(batch) if scorer.loss is not None else None
        loss, outputs = call_stages(call)
        return Scored(batch, outputs, loss)

    def _computed(self, stages: Stages, group: StageGroup, values: Any, seed: int) -> Any:
        if group.workers is None:
            first = group.names[0]
            inputs = values if first == stages.names[0] else stages.carried(first, values)
            with self._remote.scorer.autocasting(stages.devices[name] for name in group.names):
                return stages.run(group.names, inputs)
        call = self._call(stages, group, values, seed)
        _, outputs = call_stages(call)
        return outputs

    def _call(self, stages: Stages, group: StageGroup, values: Any, seed: int) -> StageCall:
        """What compute workers are asked for a batch."""
        assert group.workers is not None
        parameters, buffers = part_state(stages, group.names)
        learned = list[str]()
        if isinstance(values, Batch):
            leaves = leaves_of(values) if self._training else []
        else:
            learned = [name for name, t in values.items() if t.requires_grad and self._training]
            leaves = [values[name] for name in learned]
        request = StageRequest(
            model=self._remote.identity.digest,
            stages=list(group.names),
            owner=self._remote.graphs.owner,
            token="",
            graphs_max=self._graphs_max,
            training=self._training,
            inputs=values,
            learned=learned,
            labels=None,
            # The buffers change before backward, which may need them as they are now.
            state=[*parameters.values(), *(buffer.clone() for buffer in buffers.values())],
            frozen=[i for i, p in enumerate(parameters.values()) if not p.requires_grad],
            random=torch.get_rng_state() if self._seed is None else None,
            seed=seed,
        )
        learning: list[Tensor] = [
            p for p in parameters.values() if p.requires_grad and self._training
        ]
        of_model = list(buffers.values())
        remote = self._remote
        return StageCall(
            group.workers, remote.identity, remote.graphs, request, leaves, learning, of_model
        )

    def _labels(self, batch: Batch) -> Batch:
        """What the loss reads of a batch."""
        name = self._remote.scorer.label
        if name is None:
            return Batch(batch.columns, batch.bags)
        return Batch({name: column_of(batch, name, "Trainer(label=)")})

    def _seed_of(self, number: int, group: int) -> int:
        return seed_of(self._seed, number * len(self._remote.groups) + group)


Remote = RemoteModel | RemoteStages


def remote_of(cluster: Cluster, model: nn.Module, scorer: Scorer) -> Remote | None:
    """The model on the compute workers of the job; None: it has none. Raises BadRequest: labels of
    the compute workers and of the model that do not fit.
    """
    if not cluster.heter:
        return None
    if isinstance(model, Stages):
        return RemoteStages(cluster, model, scorer)
    return remote_model(cluster, model, scorer)
