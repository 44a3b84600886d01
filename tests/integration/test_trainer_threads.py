"""Trainer(threads=): order, age of the weights, rows of each thread, and errors in a thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.planted_model import (
    OFFSETS,
    Linear,
    loader,
    rows_of,
    trainer_for,
)
from tests.jobs import Job
from trireme.data.batch import Ragged
from trireme.errors import BadRequest, DeadlineExceeded
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.worker.gradients import PushHeader


@pytest.mark.parametrize(("threads", "oldest"), [(1, 1), (2, 1), (3, 2)])
def test_async_weights_have_a_known_age_however_slow_the_pushes(
    monkeypatch: pytest.MonkeyPatch, threads: int, oldest: int
) -> None:
    with embedded() as cluster:
        push = cluster.client.push

        def slow_push(*args: Any, **options: Any) -> None:
            threading.Event().wait(0.02)  # a slow server, no synchronisation: longer than a step
            push(*args, **options)

        monkeypatch.setattr(cluster.client, "push", slow_push)
        trainer_for(cluster, threads=threads).fit(loader(1000))
        [stats] = cluster.client.stats()
    assert sum(stats["staleness"].values()) == 20
    assert max(map(int, stats["staleness"])) <= oldest


def test_threads_train_each_batch_once_and_push_in_the_order_of_the_stream() -> None:
    sequences = []
    with Job(2) as job, job.join(0, 1) as cluster:
        trainer = trainer_for(cluster, threads=4)
        push = cluster.client.push

        def note(step: PushHeader, *args: Any, **options: Any) -> None:
            sequences.append(step.sequence)
            push(step, *args, **options)

        cluster.client.push = note  # type: ignore[method-assign]
        torch_threads = torch.get_num_threads()
        figures = trainer.fit(loader(4000), epochs=2)
        assert torch.get_num_threads() == torch_threads
        assert cluster.client.stream_position().sequence == 160
        assert trainer.evaluate(loader(1000, seed=1))["auc"] > 0.75
        at_servers = trainer.model.bias.clone()
        trainer.optimizer.refresh()
        assert torch.equal(at_servers, trainer.model.bias)
    assert figures["examples"] == 4000
    assert sequences == list(range(1, 161))


def test_an_error_in_one_of_the_threads_ends_all_and_is_the_one_raised() -> None:
    class Fails(Linear):
        def forward(self, batch: Any) -> torch.Tensor:
            if int(batch["number"][0]) == 5:
                raise ArithmeticError("batch 5 has no logarithm")
            return super().forward(batch)

    def numbered() -> Any:
        for number, batch in enumerate(loader(2000)):
            yield {**batch, "number": torch.full((50,), number)}

    with embedded() as cluster:
        model = Fails()
        trainer = tr.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=nn.functional.binary_cross_entropy_with_logits,
            threads=3,
            progress=False,
            cluster=cluster,
        )
        before = set(threading.enumerate())
        with pytest.raises(ArithmeticError, match="batch 5 has no logarithm"):
            trainer.fit(numbered())
        assert set(threading.enumerate()) <= before
        assert cluster.client.stream_position().sequence == 5


@pytest.mark.parametrize("error", [DeadlineExceeded, KeyboardInterrupt])
def test_a_pull_that_fails_in_one_of_the_threads_ends_all(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    with embedded() as cluster:
        trainer = trainer_for(cluster, threads=3)
        pull, numbers, later = cluster.client.pull, itertools.count(), threading.Event()

        def fail_once(*args: Any, **options: Any) -> Any:
            number = next(numbers)
            if number == 4:
                later.wait(10.0)
                raise error("pull 4")
            if number == 5:
                later.set()
            return pull(*args, **options)

        monkeypatch.setattr(cluster.client, "pull", fail_once)
        with pytest.raises(error, match="pull 4"):
            trainer.fit(loader(2000))
        monkeypatch.undo()
        assert cluster.client.stream_position().sequence >= 3
        assert trainer.fit(loader(500))["examples"] == 500


def test_threads_push_what_their_own_forward_looks_up(
    default_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unplanned(Linear):
        """Looks up ids that it makes itself, which no plan knows."""

        def forward(self, batch: Any) -> torch.Tensor:
            made = {"a": batch["a"].values.clone(), "b": batch["b"].values.clone()}
            return self.rows(made).sum((1, 2)) + self.bias

    def counts(threads: int) -> np.ndarray:
        model = Unplanned()
        table = tr.Table(f"t{threads}", dim=1, optimizer=tr.optim.SGD(lr=1.0),
                         initializer=tr.initializer.Constant(0.0))  # fmt: skip
        model.rows = tr.nn.EmbeddingBag(table, features=["a", "b"])
        trainer = tr.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            loss=lambda outputs, labels: outputs.sum(),
            threads=threads,
            progress=False,
            cluster=default_cluster,
        )
        trainer.fit(
            {"a": Ragged(b["a"], OFFSETS), "b": Ragged(b["b"], OFFSETS), "label": b["label"]}
            for b in loader(2000)
        )
        return rows_of(default_cluster, model)

    np.testing.assert_array_equal(counts(3), counts(1))


class CallsInSteps(tr.Callback):
    """Calls a method of the trainer after each step."""

    on_all_workers = True

    def __init__(self, method: Callable[[tr.Trainer], object]) -> None:
        self._method = method
        self.num_steps = 0

    def step(self, fit: tr.FitState) -> None:
        self._method(fit.trainer)
        self.num_steps += 1


CALLS: dict[str, Callable[[tr.Trainer, Path], object]] = {
    "evaluate": lambda trainer, _: trainer.evaluate(loader(100)),
    "predict": lambda trainer, _: trainer.predict(loader(100)),
    "save": lambda trainer, to: trainer.save(to / str(trainer.optimizer.num_steps)),
    "refresh": lambda trainer, _: trainer.optimizer.refresh(),
    "end_pass": lambda trainer, _: trainer.optimizer.end_pass(),
    "shrink": lambda trainer, _: trainer.shrink(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_callback_cannot_use_a_model_on_which_other_threads_train(
    name: str, tmp_path: Path
) -> None:
    """They would train on in evaluation mode, with weights that change within a step."""
    with embedded() as cluster:
        for threads in (2, 1):
            calls = CallsInSteps(lambda trainer: CALLS[name](trainer, tmp_path))
            trainer = trainer_for(cluster, threads=threads, callbacks=[calls], fresh=True)
            if threads == 1:
                trainer.fit(loader(200))
                assert calls.num_steps == trainer.optimizer.num_steps > 0
                continue
            with pytest.raises(BadRequest, match="expected threads=1 in a callback's step"):
                trainer.fit(loader(200))
            assert calls.num_steps == 0
        CALLS[name](trainer, tmp_path / "after")
