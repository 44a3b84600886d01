"""What a worker does between two steps of mode collective, alone or with the others, is what it is
in sync.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.test_sync import assert_same_bits
from tests.jobs import Job, in_threads
from tests.ranks import run_ranks
from trireme.errors import BadRequest, Unavailable
from trireme.job.cluster import Cluster
from trireme.policy import ScorePolicy, ShowClick
from trireme.train.modes.worker_group import WorkerGroup

TIMEOUT_S = 15.0
DAY = 86400
Weights = dict[str, np.ndarray]


class Model(nn.Module):
    """pulls_statistics: lookups answer the shows and clicks of rows."""

    def __init__(self, *, pulls_statistics: bool = False) -> None:
        super().__init__()
        shows = ShowClick("show", "label")
        policy = ScorePolicy(show_click=shows, decay_rate=0.5, pulls_statistics=pulls_statistics)
        rule = tr.optim.FleetAdagrad(lr=0.1, scale="loss")
        table = tr.Table("t", dim=2, optimizer=rule, policy=policy)
        self.rows = tr.nn.EmbeddingBag(table, features=["a"])
        self.top = nn.Linear(4 if pulls_statistics else 2, 1)
        generator = torch.Generator().manual_seed(3)  # workers are threads of one process
        for parameter in self.top.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(self.rows(batch).flatten(1)).squeeze(1)


def batches(num: int = 16) -> list[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(1)
    return [
        {
            "a": torch.from_numpy(rng.integers(0, 20, 4)),
            "label": torch.from_numpy(rng.integers(0, 2, 4).astype(np.float32)),
            "show": torch.ones(4),
        }
        for _ in range(num)
    ]


def make_trainer(
    cluster: Cluster, mode: str, model: Model, callback: tr.Callback, **options: Any
) -> tr.Trainer:
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.05),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=tr.Strategy(mode),
        callbacks=[callback],
        progress=False,
        cluster=cluster,
        **options,
    )
    trainer.set_time(100 * DAY)
    return trainer


def fit(
    cluster: Cluster,
    mode: str,
    model: Model,
    callback: tr.Callback,
    *,
    on_device: bool = False,
    **options: Any,
) -> Weights:
    trainer = make_trainer(cluster, mode, model, callback, **options)
    with trainer.on_device(batches()) if on_device else contextlib.nullcontext():
        trainer.fit(batches())
    return weights_at_end(cluster, trainer.optimizer, model)


def weights_at_end(cluster: Cluster, optimizer: tr.DistributedOptimizer, model: Model) -> Weights:
    cluster.client.coordinator.gather({}, [])  # the others may have more steps
    optimizer.refresh()
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def assert_as_in_sync(work: Callable[[Cluster, str], Weights], num_ranks: int = 2) -> None:
    with Job(2) as job:
        results = job.run(num_ranks, lambda cluster: work(cluster, "sync"), timeout_s=TIMEOUT_S)
    results += run_ranks(
        num_ranks, lambda cluster: work(cluster, "collective"), timeout_s=TIMEOUT_S
    )
    assert_same_bits(results)


class Calendar(tr.Callback):
    """A day passes after each step."""

    on_all_workers = True
    day = 100

    def step(self, fit: Any) -> None:
        self.day += 1
        fit.trainer.set_time(self.day * DAY)


def test_statistics_in_lookups_are_of_the_time_of_the_lookup() -> None:
    assert_as_in_sync(
        lambda cluster, mode: fit(cluster, mode, Model(pulls_statistics=True), Calendar())
    )


class Alone(tr.Callback):
    """Worker 0 evaluates after a step, and no other does."""

    def __init__(self, step: int = 3) -> None:
        self._step = step

    def step(self, fit: Any) -> None:
        if fit.trainer.optimizer.num_steps == self._step:
            fit.trainer.evaluate(batches(2))


@pytest.mark.parametrize(
    ("mode", "on_device"), [("collective", False), ("collective", True), ("hybrid", False)]
)
def test_a_worker_that_meets_alone_while_others_make_steps_ends_all_with_an_error(
    mode: str, on_device: bool
) -> None:
    errors: dict[int, str] = {}

    def work(cluster: Cluster) -> None:
        with pytest.raises(BadRequest) as error:
            fit(cluster, mode, Model(), Alone(), on_device=on_device)
        errors[cluster.worker] = str(error.value)
        cluster.abandon()

    timeout_s = 6.0 if on_device else TIMEOUT_S  # the pass is abandoned beside a worker that stays
    if mode != "hybrid":
        run_ranks(2, work, timeout_s=timeout_s)
    else:
        with Job(1) as job:
            job.run(2, work, timeout_s=timeout_s)
    for text in errors.values():
        assert "workers [0] came for 'evaluate', workers [1] for 'the next step'" in text


def test_a_worker_that_meets_alone_ends_one_that_was_restarted_after_a_pass() -> None:
    data, errors = batches(), {}

    def begin(worker: int) -> tuple[Cluster, tr.Trainer]:
        cluster = job.join(worker, 2, timeout_s=6.0)
        trainer = make_trainer(cluster, "sync", Model(), Alone(step=11))
        with trainer.on_device(data):
            trainer.fit(data)
        return cluster, trainer

    def work(worker: int) -> None:
        cluster, trainer = begin(worker)
        if worker == 1:
            cluster.abandon()
            cluster, trainer = begin(worker)
        with pytest.raises(BadRequest) as error, trainer.on_device(data):
            trainer.fit(data)
        errors[worker] = str(error.value)
        cluster.abandon()

    with Job(1) as job:
        in_threads([lambda: work(0), lambda: work(1)])
    for text in errors.values():
        assert "workers [0] came for 'evaluate', workers [1] for 'the next step'" in text


class Refresher(tr.Callback):
    """Worker 0 reads the newest weights after each step."""

    def step(self, fit: Any) -> None:
        fit.trainer.optimizer.refresh()


@pytest.mark.parametrize("clip_norm", [None, 0.05])  # with it, pulls follow after the push
def test_a_worker_may_refresh_alone(clip_norm: float | None) -> None:
    assert_as_in_sync(
        lambda cluster, mode: fit(cluster, mode, Model(), Refresher(), clip_norm=clip_norm)
    )


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_who_leaves_its_loop_alone_keeps_nobody_waiting(clip_norm: float | None) -> None:
    def work(cluster: Cluster, mode: str) -> Weights:
        model = Model()
        optimizer = tr.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.05),
            model,
            strategy=tr.Strategy(mode),
            clip_norm=clip_norm,
            cluster=cluster,
        )
        for epoch in range(2):
            loop = tr.prefetch(batches(), model, epoch=epoch, cluster=cluster)
            for number, batch in enumerate(loop):
                scores = model(batch)
                nn.functional.binary_cross_entropy_with_logits(scores, batch["label"]).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 1 + cluster.worker:
                    break
            loop.close()
            optimizer.end_pass()
        return weights_at_end(cluster, optimizer, model)

    assert_as_in_sync(work, num_ranks=3)


@pytest.mark.parametrize("at", [3, 7, 8])
def test_after_an_interrupted_exchange_a_worker_ends_at_once(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, num = WorkerGroup.all_to_all, Counter[int]()

    groups: list[WorkerGroup] = []

    def all_to_all(group: WorkerGroup, *arguments: Any) -> torch.Tensor:
        groups.append(group)
        received = real(group, *arguments)
        num[id(group)] += 1
        if num[id(group)] == at and group._cluster.worker == 0:
            raise KeyboardInterrupt  # between two messages of an exchange, or behind them
        return received

    monkeypatch.setattr(WorkerGroup, "all_to_all", all_to_all)

    def work(cluster: Cluster) -> str:
        model = Model()
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = tr.DistributedOptimizer(
            dense, model, strategy=tr.Strategy("collective"), cluster=cluster
        )
        try:
            with contextlib.suppress(KeyboardInterrupt):
                for batch in tr.prefetch(batches(), model, cluster=cluster):
                    nn.functional.mse_loss(model(batch), batch["label"]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            optimizer.end_pass()
        except Unavailable as error:
            return str(error)
        finally:
            cluster.abandon()
            for group in groups:  # the end of the process
                if group._cluster is cluster:
                    group.close()
        return "ended"

    interrupted, other = run_ranks(2, work, timeout_s=TIMEOUT_S)
    assert "an exchange was interrupted" in interrupted
    assert "workers [0] have gone" in other
