"""A model that begins anew in a job with servers: once for the job, and for good."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.jobs import Job
from tests.programs import Template
from trireme.job.cluster import Cluster

KEYS = torch.arange(20)
DATA = [{"id": KEYS, "label": (KEYS % 2).float()} for _ in range(4)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = tr.Table("ids", dim=2, optimizer=tr.optim.Adagrad(lr=0.5))
        self.rows = tr.nn.EmbeddingBag(table, features="id")

    def forward(self, batch: tr.data.Batch) -> torch.Tensor:
        return self.rows(batch).flatten(1).sum(1)


def make_trainer(cluster: Cluster, fresh: bool | None = None) -> tr.Trainer:
    loss = nn.functional.binary_cross_entropy_with_logits
    strategy = tr.Strategy("sync")
    return tr.Trainer(
        Model(), None, loss=loss, strategy=strategy, progress=False, fresh=fresh, cluster=cluster
    )


def test_workers_begin_anew_together_only_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trireme")

    def train(cluster: Cluster) -> list[float]:
        losses = []
        for fresh in (None, None, True):
            trainer = make_trainer(cluster, fresh)
            losses.append(trainer.evaluate(DATA)["loss"])
            trainer.fit(DATA)
        return losses

    with Job(2) as job:
        first, second = job.run(2, train)
    assert first == second
    untrained, continued, anew = first
    assert continued < untrained
    assert anew == untrained
    assert caplog.text.count("begins anew: drops the rows of table 'ids'") == 1


def test_a_server_that_is_killed_stays_without_the_dropped_rows(
    programs: Template, tmp_path: Path
) -> None:
    with DurableServers(programs, 1, tmp_path) as servers, servers.join(0, 1) as cluster:
        trainer = make_trainer(cluster)
        untrained = trainer.evaluate(DATA)["loss"]
        trainer.fit(DATA)
        trained = trainer.evaluate(DATA)["loss"]
        trainer = make_trainer(cluster, True)
        servers.kill(0)
        servers.start(0)
        assert trainer.evaluate(DATA)["loss"] == untrained != trained
        trainer.fit(DATA)
        servers.kill(0)
        servers.start(0)
        assert trainer.evaluate(DATA)["loss"] == trained


def test_a_worker_that_leaves_a_loop_alone_keeps_nobody_waiting() -> None:
    def train(cluster: Cluster) -> tuple[int, float, bool]:
        trainer = make_trainer(cluster)
        optimizer = trainer.optimizer
        for batch in tr.prefetch(DATA * 3, trainer.model, cluster=cluster):
            nn.functional.mse_loss(trainer.model(batch), batch["label"]).backward()
            optimizer.step()
            if cluster.worker == 1:
                break
        optimizer.end_pass()
        loss = trainer.evaluate(DATA)["loss"]
        return optimizer.num_steps, loss, optimizer.agree_to_stop(cluster.worker == 1)

    with Job(1) as job:
        first, second = job.run(2, train)
    assert (first[0], second[0]) == (6, 1)
    assert first[1:] == second[1:]
    assert first[2]
