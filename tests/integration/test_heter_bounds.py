"""A compute worker that is slow: what waits for it is bounded at both ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import trireme as tr
from tests.jobs import Job
from trireme import _core, accelerator
from trireme.job.connecting import connect
from trireme.rpc import Server
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
def training(threads: int, queue_max: int = 64) -> Iterator[Service]:
    """A worker trains, with a compute worker whose forward passes wait; within the block."""
    global gate
    gate = Gate()
    host = accelerator.HOST
    runner = ModelRunner(Model(), Scorer(LOSS, "label"), host, _core.Pool(1))
    service = Service("heter 0", runner, accelerator.link_to(host), queue_max=queue_max)
    server = Server(
        "127.0.0.1:0", service.handlers(), name="heter 0", threads=1, observe=gate.observe
    )
    with Job(1) as job, server:
        heter = [("cpu", server.endpoint)]
        with connect(job.endpoints, num_workers=1, threads=1, heter=heter) as cluster:
            trainer = tr.Trainer(
                Model(),
                None,
                loss=LOSS,
                depth=DEPTH,
                threads=threads,
                progress=False,
                cluster=cluster,
            )
            both = [
                threading.Thread(target=service.run),
                threading.Thread(target=trainer.fit, args=(Data(),)),
            ]
            for thread in both:
                thread.start()
            yield service
            gate.is_open.set()
            both[1].join(60)
            service.end("the test is over")
            both[0].join(60)
            [stats] = cluster.client.stats()
            assert stats["pushes"] == gate.num_computed == NUM_BATCHES


def test_a_slow_compute_worker_makes_its_worker_wait_and_read_no_further() -> None:
    threads = 2
    most = threads + DEPTH + 1  # in flight, planned, and one that waits for room
    with training(threads) as service:
        assert gate.entered.acquire(timeout=60)
        gate.wait_read(most)
        assert service.num_waiting <= threads - 1
    assert gate.most_ahead <= most


def test_a_full_compute_worker_refuses_and_gets_the_batch_later() -> None:
    with training(3, queue_max=1) as service:
        assert gate.refused.wait(5)
        assert service.num_waiting == 1
