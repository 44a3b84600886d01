"""Ctrl-C in the middle of calls, in a process that lives on as a notebook does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import trireme as tr
from trireme.coordinator.workers import Workers
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.server.block_store import BlockStore
from trireme.server.staging import Staging
from trireme.worker import passes
from trireme.worker.servers import Servers

IDS = torch.arange(400).reshape(4, 100)
DATA = [{"id": ids, "label": (ids % 2).float()} for ids in IDS]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = tr.nn.EmbeddingBag(
            tr.Table("ids", dim=4, optimizer=tr.optim.Adagrad(lr=0.1)), features="id"
        )
        self.head = nn.Linear(4, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        head: torch.Tensor = self.head(self.rows(batch).flatten(1)).squeeze(1)
        return head


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """The script's own, which `fit` leaves alone: as at the second Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    yield
    signal.signal(signal.SIGINT, before)


def trainer_on(cluster: Cluster) -> tr.Trainer:
    torch.manual_seed(0)
    model = Model()
    loss = nn.functional.binary_cross_entropy_with_logits
    dense = torch.optim.Adam(model.parameters(), 0.01)
    strategy = tr.Strategy("sync")
    return tr.Trainer(model, dense, loss=loss, strategy=strategy, cluster=cluster, progress=False)


def loss_of(figures: Mapping[str, float]) -> float:
    return figures["loss"]


def interrupted_once(function: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
    """The function, with Ctrl-C before its first call, or after it."""
    is_over = False

    def call(*args: Any, **named: Any) -> Any:
        nonlocal is_over
        is_now, is_over = not is_over, True
        if is_now and not after:
            signal.raise_signal(signal.SIGINT)
        answer = function(*args, **named)
        if is_now and after:
            signal.raise_signal(signal.SIGINT)
        return answer

    return call


@pytest.mark.parametrize(
    ("kind", "name", "after"),
    [
        (Workers, "begin_pass", True),  # the coordinator is about to open the pass
        (Servers, "everywhere_current", False),  # servers do not know of the pass
        (Servers, "everywhere_current", True),
    ],
)
def test_training_goes_on_wherever_the_beginning_of_a_pass_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, after: bool
) -> None:
    with embedded(timeout_s=10.0) as cluster, embedded() as other:
        trainer, undisturbed = trainer_on(cluster), trainer_on(other)
        for one in (trainer, undisturbed):
            one.fit(DATA)
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, interrupted_once(getattr(kind, name), after=after))
            with pytest.raises(KeyboardInterrupt):
                trainer.fit(DATA)
        assert loss_of(trainer.evaluate(DATA)) == loss_of(undisturbed.evaluate(DATA))
        assert loss_of(trainer.fit(DATA)) == loss_of(undisturbed.fit(DATA))
        for parameter, expected in zip(
            trainer.model.parameters(), undisturbed.model.parameters(), strict=True
        ):
            assert torch.equal(parameter, expected)


def test_dense_blocks_are_whole_when_the_end_of_a_pass_on_a_device_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with embedded(timeout_s=10.0) as cluster, embedded() as other:
        trainer, undisturbed = trainer_on(cluster), trainer_on(other)
        with undisturbed.on_device(DATA):
            undisturbed.fit(DATA)
        trainer.begin_pass(DATA)
        trainer.fit(DATA)
        with monkeypatch.context() as patch:
            within = interrupted_once(BlockStore._joined_group)
            patch.setattr(BlockStore, "_joined_group", within)
            with pytest.raises(KeyboardInterrupt):
                trainer.end_pass()
        trainer.end_pass()
        assert loss_of(trainer.evaluate(DATA)) == loss_of(undisturbed.evaluate(DATA))
        assert loss_of(trainer.fit(DATA)) == loss_of(undisturbed.fit(DATA))


def test_a_step_is_whole_when_the_pull_that_applies_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with embedded(timeout_s=10.0) as cluster:
        trainer = trainer_on(cluster)
        with monkeypatch.context() as patch:
            interrupt = interrupted_once(lambda: None)
            begin_step = Staging._begin_step

            def begin(staging: Staging) -> int:
                if step := begin_step(staging):
                    interrupt()
                return step

            patch.setattr(Staging, "_begin_step", begin)
            with pytest.raises(KeyboardInterrupt):
                trainer.fit(DATA)
        trainer.evaluate(DATA)
        trainer.fit(DATA)


def test_a_pass_is_left_once_when_the_call_that_leaves_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with embedded(timeout_s=10.0) as cluster:
        trainer = trainer_on(cluster)
        with monkeypatch.context() as patch:
            patch.setattr(passes, "leave", interrupted_once(passes.leave, after=True))
            with pytest.raises(KeyboardInterrupt):
                trainer.fit(DATA)
        trainer.evaluate(DATA)
        trainer.fit(DATA)
