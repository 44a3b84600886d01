"""A model that compute workers run for this worker."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trireme.data.batch import Batch
from trireme.errors import BadRequest, NotReady
from trireme.job.cluster import Cluster
from trireme.train.compute.compute_messages import METHOD, ComputeAnswer, ComputeRequest, leaves_of
from trireme.train.compute.compute_workers import ComputeWorkers, workers_of_label
from trireme.train.compute.model_state import (
    ModelIdentity,
    check_buffers,
    check_gradients,
    check_loss,
    check_random,
    frozen_in,
    state_of,
    write_buffers,
    write_gradients,
)
from trireme.train.compute.tensors import pack
from trireme.train.loop.replica import Replica
from trireme.train.loop.scoring import Scored, Scorer

T = TypeVar("T")

CREDITS = 2
"""Batches in flight for each compute worker: one is on its way while one is computed."""


def credits_of(num_compute: int, num_workers: int) -> int:
    """Batches in flight of one worker that keep the compute workers of a job busy."""
    return max(CREDITS, math.ceil(CREDITS * num_compute / max(1, num_workers)))


def remote_model(cluster: Cluster, model: nn.Module, scorer: Scorer) -> RemoteModel:
    """The model on the compute workers of the job. Raises BadRequest: they have several labels, and
    the model does not say which it runs on.
    """
    labels = list(dict.fromkeys(name for name, _ in cluster.heter))
    if len(labels) > 1:
        raise BadRequest(
            f"Trainer: expected compute workers of one label for a model without stages, found"
            f" labels {', '.join(labels)}"
        )
    workers = workers_of_label(cluster, labels[0])
    return RemoteModel(workers, model, scorer, num_workers=cluster.num_workers)


class RemoteModel:
    """Runs batches at compute workers.

    Attributes:
        credits: batches in flight of this worker, see `credits_of`.
    """

    def __init__(
        self, workers: ComputeWorkers, model: nn.Module, scorer: Scorer, *, num_workers: int
    ) -> None:
        self.workers = workers
        self.credits = credits_of(len(workers), num_workers)
        self.labels, self.identity = (workers.label,), ModelIdentity(model, scorer)

    def begin(self, model: nn.Module, *, training: bool, threads: int) -> RemotePass:
        return RemotePass(self, model, training=training, threads=threads)

    def run(self, request: ComputeRequest, state: list[Tensor]) -> ComputeAnswer:
        """state: of the request, if it has only the state's name and the compute worker lacks it.

        Raises SchemaMismatch: a compute worker has another model; it names what differs. BadRequest
        and others: what the model raised there. DeadlineExceeded: see ComputeWorkers.
        """
        try:
            with self.identity.explained():
                reply, _ = self.workers.call(METHOD, *request.to_wire())
        except NotReady as error:
            if request.state is not None or "raised" in (error.details or {}):
                raise
            request.state = state
            return self.run(request, state)
        return ComputeAnswer.from_wire(reply.body, reply.arrays)


class RemotePass:
    """One pass over data with a remote model. Threads: each trains its own replica.

    Random numbers: with one batch in flight at a time they are those of one process, since each
    request carries torch's state and each answer the state after. Otherwise a batch's follow from
    its number and a seed of the pass.
    """

    def __init__(self, remote: RemoteModel, model: nn.Module, *, training: bool, threads: int):
        self._remote, self._model = remote, model
        self._seed = pass_seed(training=training, threads=threads)
        self._state, self._state_id = list[Tensor](), ""
        if not training:
            self._state = state_of(model)
            self._state_id = _digest(self._state)

    def train(self, replica: Replica, batch: Batch) -> Scored:
        """Forward and backward: the replica's parameters and the rows of the batch get gradients,
        its buffers their new values.
        """
        state, leaves = state_of(replica.model), leaves_of(batch)
        request = ComputeRequest(
            model=self._remote.identity.digest,
            training=True,
            scores=True,
            batch=batch,
            state=state,
            frozen=frozen_in(replica.model),
            random=torch.get_rng_state() if self._seed is None else None,
            seed=seed_of(self._seed, replica.number),
        )
        answer = self._remote.run(request, state)
        parameters, buffers = list(replica.model.parameters()), list(replica.model.buffers())
        # All is checked before anything is written: an answer that is wrong changes nothing.
        check_loss(answer.loss, is_wanted=True)
        check_gradients(leaves, answer.inputs)
        check_gradients(parameters, answer.parameters)
        check_buffers(buffers, answer.buffers)
        check_random(answer.random, request.random)
        write_gradients(leaves, answer.inputs)
        write_gradients(parameters, answer.parameters)
        write_buffers(buffers, answer.buffers)
        if answer.random is not None:
            torch.set_rng_state(answer.random)
        return Scored(batch, answer.outputs, answer.loss)

    def evaluate(self, batches: Iterable[Batch], *, scores: bool) -> Iterator[Scored]:
        """Forward of each batch, in order, with several in flight. scores: with the loss."""

        def score(number: int, batch: Batch) -> Scored:
            request = ComputeRequest(
                model=self._remote.identity.digest,
                training=False,
                scores=scores,
                batch=batch,
                state=None,
                state_id=self._state_id,
                seed=seed_of(self._seed, number),
            )
            answer = self._remote.run(request, self._state)
            check_loss(answer.loss, is_wanted=scores)
            return Scored(batch, answer.outputs, answer.loss)

        return in_order(score, batches, self._remote.credits)


def pass_seed(*, training: bool, threads: int) -> int | None:
    """What the random numbers of a pass's batches follow from; None: from torch's own state.
    Evaluation leaves that where it is.
    """
    if not training:
        state = torch.get_rng_state().numpy().tobytes()
        return int.from_bytes(hashlib.sha256(state).digest()[:7], "little")
    return int(torch.randint(1 << 62, ())) if threads > 1 else None


def seed_of(seed: int | None, number: int) -> int:
    """The seed of a request, of its number and of the seed of its pass."""
    return 0 if seed is None else (seed + number) % (1 << 62)


def in_order(
    work: Callable[[int, Batch], T], batches: Iterable[Batch], in_flight: int
) -> Iterator[T]:
    """work(number, batch) of each batch, in the order of the batches, this many at a time."""
    with ThreadPoolExecutor(in_flight, thread_name_prefix="trireme-compute") as pool:
        running: deque[Future[T]] = deque()
        for number, batch in enumerate(batches):
            running.append(pool.submit(work, number, batch))
            if len(running) == in_flight:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _digest(state: list[Tensor]) -> str:
    _, arrays = pack(state)
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()
