"""A load replaces what a failed push, or a loop that was left, has begun."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.test_not_finite import STRATEGIES, Model, batch, equal, step
from tests.integration.test_not_finite import weights as weights_of
from tests.jobs import Job, in_threads
from tests.tables import T_ROWS
from trireme.errors import BadRequest, ResourceExhausted, TriremeError, Unavailable, WrongMap
from trireme.job.cluster import Cluster
from trireme.rpc import Call, Reply

BATCHES = [batch(number) for number in range(8)]


def trainer_of(mode: str, cluster: Cluster) -> tr.Trainer:
    model = Model()
    return tr.Trainer(
        model,
        torch.optim.SGD(model.top.parameters(), lr=0.1),
        loss=nn.functional.mse_loss,
        strategy=STRATEGIES[mode],
        progress=False,
        cluster=cluster,
    )


def fail_second_push(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    client, num_pushes = cluster.client, 0
    push = client.push

    def failing(*args: Any, **options: Any) -> None:
        nonlocal num_pushes
        num_pushes += 1
        if num_pushes == 2:
            raise Unavailable("made up")
        push(*args, **options)

    monkeypatch.setattr(client, "push", failing)


def note_pushes(cluster: Cluster) -> list[Call]:
    """Copies of the pushes that are sent from now on, in their order."""
    copies: list[Call] = []
    for locked in (cluster.client.servers.pushes, cluster.client.servers.pulls):
        transport, call_all = locked.transport, locked.transport.call_all

        def noting(calls: Any, *, timeout_s: float, _call_all: Any = call_all) -> list[Reply]:
            for call in calls:
                if call.method == "ps.push":
                    arrays = [array.copy() for array in call.arrays]
                    copies.append(
                        Call(call.endpoint, call.method, copy.deepcopy(call.body), arrays)
                    )
            return _call_all(calls, timeout_s=timeout_s)

        transport.call_all = noting
    return copies


@pytest.mark.parametrize("mode", STRATEGIES)
def test_a_load_after_a_push_that_failed_gives_a_trainer_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    with Job(2) as job, job.join(0, 1) as cluster:
        trainer = trainer_of(mode, cluster)
        trainer.fit(BATCHES)
        trainer.save(tmp_path / "saved")
        before = weights_of(trainer.model, cluster)
        fail_second_push(cluster, monkeypatch)
        with pytest.raises(Unavailable, match="made up"):
            trainer.fit(BATCHES)
        trainer.load(tmp_path / "saved")
        assert equal(before, weights_of(trainer.model, cluster))
        trainer.fit(BATCHES)
        trainer.optimizer.refresh()
        assert not equal(before, weights_of(trainer.model, cluster))


@pytest.mark.parametrize("mode", STRATEGIES)
def test_a_push_of_before_a_load_that_comes_late_is_refused(tmp_path: Path, mode: str) -> None:
    """Streams start where the checkpoint was, so its number would be that of the next push."""
    with Job(2) as job, job.join(0, 1) as cluster:
        trainer, servers = trainer_of(mode, cluster), cluster.client.servers
        trainer.fit(BATCHES)
        trainer.save(tmp_path / "saved")
        before, copies = weights_of(trainer.model, cluster), note_pushes(cluster)
        trainer.fit(BATCHES)
        trainer.load(tmp_path / "saved")
        for late in copies:
            with pytest.raises(WrongMap):
                servers.call_all([late], 10.0)
        assert copies
        assert equal(before, weights_of(trainer.model, cluster))


@pytest.mark.parametrize("mode", ["sync", "async", "bounded", "geo"])
def test_all_workers_load_after_a_step_of_one_has_failed(tmp_path: Path, mode: str) -> None:
    """The others learn that it does not come to the end of the pass, and do not wait for it."""

    def work(job: Job, worker: int) -> str:
        with job.join(worker, 2) as cluster:
            trainer = trainer_of(mode, cluster)
            trainer.fit(BATCHES)
            trainer.save(tmp_path / "saved")
            trainer.model.breaks = "dense" if worker == 1 else ""
            with pytest.raises(TriremeError) as failure:
                trainer.fit(BATCHES)
            trainer.model.breaks = ""
            trainer.load(tmp_path / "saved")
            trainer.fit(BATCHES)
            return str(failure.value)

    with Job(2) as job:
        waited, failed = in_threads([lambda w=w: work(job, w) for w in (0, 1)])
    assert "expected finite gradients" in failed
    assert "(end of train): expected all workers, found [1] at" in waited


def test_all_workers_load_after_a_step_that_a_server_could_not_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All get the server's error, and the load drops the pushes of the step."""

    def full(*_: Any) -> None:
        raise ResourceExhausted("made up")

    def work(job: Job, worker: int) -> None:
        with job.join(worker, 2) as cluster:
            state = job.servers[1].state
            trainer = trainer_of("sync", cluster)
            trainer.fit(BATCHES)
            trainer.save(tmp_path / "saved")
            with monkeypatch.context() as patch:
                if worker == 0:
                    patch.setattr(state, "_update_table", full)
                cluster.client.coordinator.gather({}, [])
                with pytest.raises(ResourceExhausted, match="made up"):
                    trainer.fit(BATCHES)
                trainer.load(tmp_path / "saved")
                assert state.staging.num_held()["staged"] == 0
            cluster.client.coordinator.gather({}, [])
            trainer.fit(BATCHES)

    with Job(2) as job:
        in_threads([lambda w=w: work(job, w) for w in (0, 1)])


@pytest.mark.parametrize("mode", STRATEGIES)
def test_a_load_within_a_loop_lets_it_train_on(
    default_cluster: Cluster, tmp_path: Path, mode: str
) -> None:
    trainer = trainer_of(mode, default_cluster)
    trainer.fit(BATCHES)
    trainer.save(tmp_path / "saved")
    ends = []
    for _ in range(2):
        for ready in BATCHES[:3]:
            step(trainer.model, trainer.optimizer, ready)
        trainer.optimizer.refresh()
        ends.append(weights_of(trainer.model, default_cluster))
        trainer.load(tmp_path / "saved")
    assert equal(*ends)


class Pair(nn.Module):
    """Two rows and a layer, on a table or, for torch alone, on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("t", dim=4, optimizer=tr.optim.Adam(lr=0.1))
        self.bag = tr.nn.EmbeddingBag(table, features=["key"])
        self.top = nn.Linear(4, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(self.bag(batch).flatten(1)).squeeze(1)


def loss_of(outputs_B: torch.Tensor, number: int) -> torch.Tensor:
    return nn.functional.mse_loss(outputs_B, torch.tensor([1.0, -float(number)]))


@pytest.mark.parametrize("mode", ["sync", "async", "bounded"])
def test_a_push_that_was_refused_does_not_count_in_a_checkpoint(tmp_path: Path, mode: str) -> None:
    """Adam divides by what depends on the number of the step: torch's own says what it must be."""
    with Job(2) as job, job.join(0, 1) as cluster:
        model = Pair()
        adam = torch.optim.Adam(model.top.parameters(), lr=0.1)
        trainer = tr.Trainer(
            model,
            adam,
            loss=nn.functional.mse_loss,
            strategy=STRATEGIES[mode],
            progress=False,
            cluster=cluster,
        )
        optimizer = trainer.optimizer

        def step(number: int) -> None:
            loss_of(model({"key": torch.tensor([1, 2])}), number).backward()
            optimizer.step()

        def rows_KD() -> torch.Tensor:
            keys = np.array([1, 2], np.uint64)
            return cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].clone()

        rows, top = nn.Parameter(rows_KD()), copy.deepcopy(model.top)
        plain = torch.optim.Adam([rows, *top.parameters()], lr=0.1)
        for number in range(6):
            if number == 2:
                optimizer.param_groups[0]["amsgrad"] = True  # servers have no state for it
                with pytest.raises(BadRequest, match="amsgrad"):
                    step(99)
                optimizer.param_groups[0]["amsgrad"] = False
                assert (optimizer.num_steps, optimizer.sequence) == (2, 2)
                trainer.save(tmp_path / "saved")
                trainer.load(tmp_path / "saved")
            step(number)
            plain.zero_grad()
            loss_of(top(rows).squeeze(1), number).backward()
            plain.step()
        optimizer.end_pass()
        assert optimizer.num_steps == 6
        torch.testing.assert_close(rows_KD(), rows.detach(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(model.top.weight, top.weight, rtol=1e-3, atol=1e-3)
