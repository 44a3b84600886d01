"""Batches and boundaries far beyond the usual size, and what the limits of a message refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trireme as tr
from tests.integration.compute_service import computing, stage_runner
from tests.jobs import Job
from trireme.errors import ResourceExhausted
from trireme.job.connecting import connect
from trireme.rpc import Limits
from trireme.train.compute.service import Service
from trireme.train.loop.scoring import Scorer

LOSS = nn.functional.binary_cross_entropy_with_logits
NUM_EXAMPLES, NUM_BATCHES, DIM = 400_000, 2, 16


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("t", dim=DIM, optimizer=tr.optim.SGD(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(table, features=["key"])

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"rows": self.rows(batch).flatten(1), "key": batch["key"]}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.top = nn.Linear(DIM, 1)

    def forward(self, values: Any) -> Tensor:
        out: Tensor = self.top(values["rows"]).squeeze(1)
        return out


class Data:
    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[dict[str, Any]]:
        del index, num_streams, epoch
        for _ in range(NUM_BATCHES):
            keys = torch.arange(NUM_EXAMPLES) % 1000
            yield {"key": keys, "label": (keys % 2).float()}


def model() -> tr.Stages:
    return tr.Stages(cpu=Wide(), gpu=Tower())


def compute_worker(limits: Limits) -> AbstractContextManager[tuple[str, Service]]:
    return computing(stage_runner(model(), Scorer(LOSS, "label")), limits=limits)


def train(heter: list[tuple[str, str]]) -> dict[str, Tensor]:
    devices = {"gpu": "cpu"}
    with (
        Job(1) as job,
        connect(job.endpoints, num_workers=1, threads=1, heter=heter, devices=devices) as cluster,
    ):
        own = model()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        options: dict[str, Any] = {"progress": False, "cluster": cluster, "threads": 1}
        tr.Trainer(own, optimizer, loss=LOSS, **options).fit(Data())
        return own.state_dict()


def test_a_batch_of_400_000_examples_and_its_boundary_of_25_mb_cross() -> None:
    """Also in pieces, as a message has fewer bytes."""
    with compute_worker(Limits(message_bytes_max=1 << 22)) as (address, _):
        crossed = train([("gpu", address)])
    alone = train([])
    assert crossed.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(crossed[name], value)


def test_a_boundary_beyond_the_limit_is_an_error_with_the_limit() -> None:
    limits = Limits(message_bytes_max=1 << 22, total_bytes_max=1 << 24)
    with (
        compute_worker(limits) as (address, _),
        pytest.raises(ResourceExhausted, match=f"total_bytes_max is {1 << 24}, found "),
    ):
        train([("gpu", address)])
