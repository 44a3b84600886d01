"""Measures each stage of a model in training, on real batches, in this process.

Activities are measured one after the other, each with all threads of the process, so that they add
up to what a worker does for a batch. In a job some of them overlap; a worker with several cores is
then faster than the sum says, and never slower. Tables are embedded: "pull" and "push" contain what
servers would do, in place of sending and receiving.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trireme import accelerator
from trireme.data.batch import Batch
from trireme.data.foreign import as_batch
from trireme.errors import DataError
from trireme.nn import BatchPlan, Planner
from trireme.nn.lookup import specs_of
from trireme.nn.on_device import SentBatch, device_of
from trireme.nn.session import collect
from trireme.nn.stages import Stages, check_boundary
from trireme.place.measurements import MODEL_ACTIVITIES, READ, READ_ACTIVITIES, StageTimes
from trireme.rpc import Reply, Request, RpcClient, Server
from trireme.train.compute.tensors import pack, unpack
from trireme.train.loop.worker_batches import Closable, worker_batches
from trireme.train.trainer import Trainer

BATCHES = 64
"""Batches that are read, at most, and are trained on, at least."""
WARM_UPS = 8
READINGS = 3
READ_S = 5.0  # of one reading, at most, once it has a batch
# Of training: a machine that stops its processes now and then, as where containers may use a part
# of a core, has to do so several times in each of the PARTS.
TRAIN_MIN_S, TRAIN_MAX_S = 2.0, 30.0
PARTS = 5

MODEL = "model"
"""The stage of a model without stages."""

_Times = dict[str, list[float]]
"""Activity -> seconds per example of each measured batch."""


def stages_of(model: nn.Module) -> dict[str, nn.Module]:
    """The stages of a model by name, in order."""
    return dict(model.items()) if isinstance(model, Stages) else {MODEL: model}


def num_first_of(stages: Mapping[str, nn.Module]) -> int:
    """How many stages, with READ, the workers that read have to compute: those with tables, unless
    the model is one stage.
    """
    if len(stages) == 1:
        return 1
    with_tables = [i for i, stage in enumerate(stages.values()) if any(specs_of([stage]))]
    return 2 + max(with_tables, default=-1)


def read_batches(trainer: Trainer, dataset: Iterable[Any]) -> tuple[list[Batch], float]:
    """Batches of a dataset, and the seconds that reading takes per example: the median of several
    readings, one if the dataset can be read only once. Raises DataError: there are no examples.
    """
    seconds = []
    for _ in range(1 if isinstance(dataset, Iterator) else READINGS):
        source = worker_batches(dataset, trainer.cluster)
        started = time.perf_counter()
        batches = []
        for one in itertools.islice(source, BATCHES):
            batches.append(as_batch(one))
            if time.perf_counter() - started > READ_S:
                break
        elapsed_s = time.perf_counter() - started
        if isinstance(source, Closable):
            source.close()
        num_examples = sum(batch.num_examples for batch in batches)
        if not num_examples:
            raise DataError("place: expected examples to measure with, found none in the dataset")
        seconds.append(elapsed_s / num_examples)
    return [batch for batch in batches if batch.num_examples], statistics.median(seconds)


class StageMeasuring:
    """Trains on batches one after the other and measures each activity.

    label: of the device that computes all stages. Raises BadRequest: there is none here.
    """

    def __init__(self, trainer: Trainer, label: str) -> None:
        trainer.optimizer.mode.check_between_passes("trireme place")
        trainer.model.to(trainer.cluster.device(label)).train()
        self._trainer, self._optimizer = trainer, trainer.optimizer
        self._stages = stages_of(trainer.model)
        self._device = device_of(trainer.model)
        self._link = accelerator.link_to(self._device)
        self._planner = Planner(trainer.model, pool=trainer.cluster.pool)
        self._score = trainer.scorer
        self._times: dict[str, _Times] = {name: defaultdict(list) for name in (READ, *self._stages)}
        self._bytes: _Times = defaultdict(list)  # before each stage
        self._examples = 1
        self._is_warm = False

    def run(self, batches: Sequence[Batch]) -> int:
        """Train on the batches, some of them several times if they are few. Returns how many were
        measured.
        """
        self._optimizer.begin_pass()
        self._optimizer.mode.begin_run()
        started = time.perf_counter()
        for number in itertools.count():
            elapsed_s = time.perf_counter() - started
            is_enough = number >= WARM_UPS + BATCHES and elapsed_s > TRAIN_MIN_S
            if is_enough or (self._is_warm and elapsed_s > TRAIN_MAX_S):
                break
            self._is_warm = number >= WARM_UPS
            self._train(number, batches[number % len(batches)])
        self._optimizer.mode.end_run()
        self._optimizer.end_pass()
        return len(self._times[READ]["plan"])

    def _train(self, number: int, source: Batch) -> None:
        self._examples = source.num_examples
        with self._measured(READ, "plan"):
            plan = self._planner.plan(source)
        with self._measured(READ, "pull"):
            pulled = self._optimizer.mode.pull(plan.keys(), blocks=True, number=number)
            sent = SentBatch(self._link, source, plan)
            sent.send_rows(pulled.rows)
            self._optimizer.replica.install(pulled)
            batch, plan, rows = sent.receive()
            leaves = plan.attach(batch, rows, train=True)
            collect(self._optimizer.replica.pending, plan, leaves, pulled)
        self._count_read(batch, plan, list(leaves.values()))
        self._compute(batch)
        with self._measured(READ, "push"):
            self._optimizer.step_of(self._optimizer.replica, examples=batch.num_examples)

    # ---- the model ----

    def _compute(self, batch: Batch) -> None:
        """Forward of every stage, then backward of every stage, the last first."""
        *inner, last = self._stages
        values: Any = batch
        inputs, outputs = [], []
        for name in inner:
            inputs.append(values)
            with self._measured(name, "forward"), self._score.autocasting([self._device]):
                outputs.append(self._stages[name](values))
            check_boundary(name, outputs[-1])
            values = _boundary(outputs[-1])
            self._bytes[_following(self._stages, name)].append(self._per_example(values))
        if inner:
            self._bytes[last][-1] += self._bytes_of_labels(batch) / self._examples
        with self._measured(last, "forward"):
            loss = self._score(_Given(self._stages[last], values), batch).loss
        assert loss is not None
        with self._measured(last, "backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        for name in reversed(inner):
            crossed = values
            values, output = inputs.pop(), outputs.pop()
            with self._measured(name, "backward"):
                _backward(output, crossed)

    @contextmanager
    def _measured(self, stage: str, activity: str) -> Iterator[None]:
        accelerator.await_device(self._device)
        started = time.perf_counter()
        yield
        accelerator.await_device(self._device)
        if self._is_warm:
            elapsed_s = time.perf_counter() - started
            self._times[stage][activity].append(elapsed_s / self._examples)

    # ---- bytes ----

    def _count_read(self, batch: Batch, plan: BatchPlan, leaves: Sequence[Tensor]) -> None:
        """Count what crosses before READ and before the first stage."""
        rows = sum(_num_bytes(leaf) for leaf in leaves)
        keys = sum(part.keys.nbytes for part in plan.tables)
        dense = sum(_num_bytes(p) for p in self._optimizer.replica.dense.parameters.values())
        self._bytes[READ].append(2 * (rows + keys + dense) / self._examples)
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        distinct = {(t.data_ptr(), _num_bytes(t)): _num_bytes(t) for t in tensors}  # no view twice
        first = next(iter(self._stages))
        self._bytes[first].append((sum(distinct.values()) + rows) / self._examples)

    def _per_example(self, values: Mapping[str, Tensor]) -> float:
        """Bytes of a boundary: there all tensors, back the gradients."""
        num_bytes = sum(_num_bytes(t) * (2 if t.requires_grad else 1) for t in values.values())
        return num_bytes / self._examples

    def _bytes_of_labels(self, batch: Batch) -> int:
        """Of what the loss reads, which is computed with the last stage."""
        label = self._trainer.label
        read = batch.columns if label is None else batch[label]
        return sum(_num_bytes(t) for t in pytree.tree_leaves(read) if isinstance(t, Tensor))

    def _bytes_of_weights(self, module: nn.Module) -> int:
        """Of a stage, there and back: weights, buffers and the gradients of weights."""
        learned = sum(_num_bytes(p) for p in module.parameters() if p.requires_grad)
        state = sum(map(_num_bytes, (*module.parameters(), *module.buffers())))
        return learned + state

    # ---- the result ----

    def stages(self, read_s: float, batches: Sequence[Batch]) -> tuple[StageTimes, ...]:
        """read_s: per example."""
        for name, times in self._times.items():
            times["read"] = [read_s] if name == READ else []
        examples = statistics.fmean(batch.num_examples for batch in batches)
        return tuple(
            StageTimes(
                name=name,
                seconds={
                    activity: rounded(median_of_parts(self._times[name][activity]))
                    for activity in (READ_ACTIVITIES if name == READ else MODEL_ACTIVITIES)
                },
                bytes_before=rounded(statistics.median(self._bytes[name])),
                bytes_sent_to=rounded(
                    0.0 if name == READ else self._bytes_of_weights(self._stages[name]) / examples
                ),
            )
            for name in self._times
        )


def median_of_parts(values: Sequence[float]) -> float:
    """The median of the means of PARTS consecutive parts: neither a single slow batch nor a machine
    that stops for a part of each moment hides what a batch takes.
    """
    size = -(-len(values) // PARTS)
    return statistics.median(
        statistics.fmean(values[begin : begin + size]) for begin in range(0, len(values), size)
    )


def rounded(number: float) -> float:
    """To six digits: more are noise, and would only lengthen the fractions that are computed."""
    return float(f"{number:.6g}")


class _Given(nn.Module):
    """The last stage with what it gets, in place of the whole model."""

    def __init__(self, stage: nn.Module, values: Any) -> None:
        super().__init__()
        self._stage, self._values = stage, values

    def forward(self, _: Batch) -> Any:
        return self._stage(self._values)


def _following(stages: Mapping[str, nn.Module], name: str) -> str:
    names = list(stages)
    return names[names.index(name) + 1]


def _boundary(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the next stage gets: detached tensors, which have gradients where these have."""
    return {
        name: tensor.detach().requires_grad_(tensor.requires_grad)
        for name, tensor in outputs.items()
    }


def _backward(outputs: Mapping[str, Tensor], crossed: Mapping[str, Tensor]) -> None:
    """Backward of a stage, from the gradients of what crossed."""
    with_gradient = [name for name, tensor in crossed.items() if tensor.grad is not None]
    if with_gradient:
        torch.autograd.backward(
            [outputs[name] for name in with_gradient],
            [crossed[name].grad for name in with_gradient],
        )


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


TENSORS, TENSOR_BYTES = 16, 1 << 16
"""Of a message: about those of a batch and of the weights of a stage."""
WARM_UPS = 10
MEASURE_S = 1.0
_TIMEOUT_S = 60.0


def seconds_per_byte() -> float:
    """Of one end, for a byte sent or received: measured by calls between two threads of this
    process, over loopback. Each end also copies what it receives, as into the weights of a model,
    and what it sends, as outputs and gradients of a model are new tensors.
    """
    ours, answered = _tensors(), _tensors()

    def echo(request: Request) -> Reply:
        _copy(unpack(request.body["tensors"], request.arrays), answered)
        specs, arrays = pack([tensor.clone() for tensor in answered])
        return Reply({"tensors": specs}, arrays)

    with (
        Server("127.0.0.1:0", {"echo": echo}, name="place") as server,
        RpcClient(name="place") as client,
    ):

        def call() -> None:
            specs, arrays = pack([tensor.clone() for tensor in ours])
            body = {"tensors": specs}
            reply = client.call(server.endpoint, "echo", body, arrays, timeout_s=_TIMEOUT_S)
            _copy(unpack(reply.body["tensors"], reply.arrays), ours)

        for _ in range(WARM_UPS):
            call()
        started, cpu_before, num_calls = time.perf_counter(), time.process_time(), 0
        while (elapsed_s := time.perf_counter() - started) < MEASURE_S:
            call()
            num_calls += 1
        cores = max(1.0, (time.process_time() - cpu_before) / elapsed_s)  # that both ends kept busy
    return elapsed_s * cores / 2 / (2 * TENSORS * TENSOR_BYTES * num_calls)


def _tensors() -> list[Tensor]:
    return [torch.zeros(TENSOR_BYTES, dtype=torch.uint8) for _ in range(TENSORS)]


def _copy(received: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for target, tensor in zip(targets, received, strict=True):
        target.copy_(tensor)
