"""A compute worker that is slow: what waits for it is bounded, in the worker, there, and at the
compute workers of the stages before.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import trireme as tr
from tests.conditions import wait_until
from tests.integration.compute_service import computing, stage_runner
from tests.jobs import Job
from trireme import _core, accelerator
from trireme.job.connecting import connect
from trireme.train.compute.kept_graphs import KeptGraphs
from trireme.train.compute.model_runner import ModelRunner
from trireme.train.compute.service import Service
from trireme.train.loop.scoring import Scorer

LOSS = nn.functional.binary_cross_entropy_with_logits
NUM_BATCHES, DEPTH = 50, 3


class Gate:
    """Where forward passes wait, and how far reading was ahead of them."""

    def __init__(self) -> None:
        self.entered, self.is_open = threading.Semaphore(0), threading.Event()
        self.changed = threading.Condition()
        self.num_read = self.num_computed = self.most_ahead = 0
        self.graphs: dict[str, KeptGraphs] = {}  # of compute workers that a test watches
        self.most_kept: Counter[str] = Counter()
        self.refused = threading.Event()

    def read(self) -> None:
        with self.changed:
            self.num_read += 1
            self.changed.notify_all()

    def wait_read(self, num: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_read >= num, 60)

    def compute(self) -> None:
        with self.changed:
            self.most_ahead = max(self.most_ahead, self.num_read - self.num_computed)
            self.num_computed += 1
            for label, graphs in self.graphs.items():
                self.most_kept[label] = max(self.most_kept[label], len(graphs))
        self.entered.release()
        assert self.is_open.wait(10)

    def observe(self, method: str, seconds: float, error: str) -> None:
        del method, seconds
        if error == "RESOURCE_EXHAUSTED":
            self.refused.set()


gate = Gate()  # not of the model, which is copied


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("t", dim=2, optimizer=tr.optim.SGD(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(table, features=["key"])

    def forward(self, batch: Any) -> Tensor:
        gate.compute()
        return self.rows(batch).sum((1, 2))


class Data:
    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[dict[str, Any]]:
        del index, num_streams, epoch
        for _ in range(NUM_BATCHES):
            gate.read()
            yield {"key": torch.tensor([1, 2]), "label": torch.tensor([0.0, 1.0])}


@contextmanager
def training(model: nn.Module, threads: int, heter: list[tuple[str, str]]) -> Iterator[None]:
    """A worker trains within the block and beyond, until all batches have been computed; forward
    passes at the gate wait until the block ends.
    """
    devices = {"gpu": "cpu", "npu": "cpu"}
    with (
        Job(1) as job,
        connect(job.endpoints, num_workers=1, threads=1, heter=heter, devices=devices) as cluster,
    ):
        parameters = list(model.parameters())
        trainer = tr.Trainer(
            model,
            torch.optim.SGD(parameters, lr=0.1) if parameters else None,
            loss=LOSS,
            depth=DEPTH,
            threads=threads,
            progress=False,
            cluster=cluster,
        )
        worker = threading.Thread(target=trainer.fit, args=(Data(),))
        worker.start()
        try:
            yield
        finally:
            gate.is_open.set()
            worker.join(60)
        [stats] = cluster.client.stats()
        assert stats["pushes"] == gate.num_computed == NUM_BATCHES


@contextmanager
def training_a_model(threads: int, queue_max: int = 64) -> Iterator[Service]:
    """The compute worker of a model without stages, whose forward passes wait."""
    global gate
    gate = Gate()
    runner = ModelRunner(Model(), Scorer(LOSS, "label"), accelerator.HOST, _core.Pool(1))
    with (
        computing(runner, queue_max=queue_max, observe=gate.observe) as (address, service),
        training(Model(), threads, [("cpu", address)]),
    ):
        yield service


def test_a_slow_compute_worker_makes_its_worker_wait_and_read_no_further() -> None:
    threads = 2
    most = threads + DEPTH + 1  # in flight, planned, and one that waits for room
    with training_a_model(threads) as service:
        assert gate.entered.acquire(timeout=60)
        gate.wait_read(most)
        assert service.num_waiting <= threads - 1
    assert gate.most_ahead <= most


def test_a_full_compute_worker_refuses_and_gets_the_batch_later() -> None:
    with training_a_model(3, queue_max=1) as service:
        assert gate.refused.wait(5)
        wait_until(lambda: service.num_waiting == 1)  # the first may not have left the queue yet


class Layer(nn.Module):
    """waits: at the gate, when training has given it what the stage before computed."""

    def __init__(self, *, waits: bool = False) -> None:
        super().__init__()
        self.layer, self.waits = nn.Linear(2, 2), waits

    def forward(self, values: Any) -> dict[str, Tensor]:
        if self.waits:
            gate.compute()
        return {"x": self.layer(values["x"])}


class First(Model):
    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"x": self.rows(batch).flatten(1)}


class Last(Layer):
    def forward(self, values: Any) -> Tensor:
        return super().forward(values)["x"].sum(1)


def stages() -> tr.Stages:
    return tr.Stages(cpu=First(), gpu=Layer(), npu=Layer(waits=True), gpu_2=Layer(), cpu_2=Last())


def test_a_slow_stage_of_one_label_bounds_what_the_worker_and_other_labels_keep() -> None:
    """The slow stage is between two of another label, which keeps a graph of each for a batch."""
    global gate
    gate = Gate()
    threads = 3
    most = threads + DEPTH + 1
    quick, slow = (stage_runner(stages(), Scorer(LOSS, "label")) for _ in range(2))
    gate.graphs = {"gpu": quick.graphs, "npu": slow.graphs}
    with (
        computing(quick) as (quick_address, quick_service),
        computing(slow) as (slow_address, slow_service),
    ):
        with training(stages(), threads, [("gpu", quick_address), ("npu", slow_address)]):
            assert gate.entered.acquire(timeout=60)
            gate.wait_read(most)
            # All batches in flight wait for the slow stage.
            wait_until(lambda: slow_service.num_waiting == threads - 1)
            assert (len(quick.graphs), len(slow.graphs)) == (threads, 0)
            assert quick_service.num_waiting == 0
        assert gate.most_ahead <= most
        assert gate.most_kept["gpu"] <= 2 * threads
        assert gate.most_kept["npu"] <= threads
        assert len(quick.graphs) == len(slow.graphs) == 0
