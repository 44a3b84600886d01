"""A mode without servers: the protocol of a mode is all that the training code asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.optim import rule_values
from trireme.rows.core_table import make_core_table
from trireme.train import optimizer as optimizer_module
from trireme.train.clipping import clip_gradients
from trireme.train.modes.base import Mode
from trireme.train.modes.setup import TableGradients, TrainingSetup, WorkerStep
from trireme.train.predecessor import PredecessorProgress
from trireme.worker.client import StreamPosition, WorkerClient
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import KeysByClass
from trireme.worker.pull import Pulled


class Alone(Mode):
    """A process that trains on its own tables, with its own dense optimizer."""

    trains_in_threads = False
    saves_between_steps = True

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup
        self.num_steps, self.last_push = 0, StreamPosition()
        self.rows = {t.class_id: make_core_table(t.schema) for t in setup.tables}

    def open(self) -> None: ...

    def may_pull_ahead(self, *, steps: bool) -> bool:
        return False

    def fetcher(self) -> Callable[[KeysByClass], None] | None:
        return None

    def begin_run(self) -> None: ...

    def pull(self, keys: KeysByClass, *, blocks: bool, number: int | None = None) -> Pulled:
        return self.read(keys)

    def read(self, keys: KeysByClass) -> Pulled:
        pulled = {}
        for class_id, keys_K in keys.items():
            pulled[class_id] = np.empty((len(keys_K), self.rows[class_id].dim), np.float32)
            self.rows[class_id].lookup(keys_K, pulled[class_id], self.setup.cluster.pool)
        return Pulled(pulled, None, [], dict.fromkeys(keys, 0))

    def begin_step(self) -> None:
        self.num_steps += 1

    def abandon_step(self) -> None:
        self.num_steps -= 1

    def clip(self, tables: TableGradients, dense: DenseParameters) -> TableGradients:
        return clip_gradients(self.setup.clip, tables, dense.parameters.values())

    def step(self, step: WorkerStep) -> None:
        for class_id, part in step.tables.items():
            push, values = [(0, self.num_steps)], rule_values(part.values)
            pool = self.setup.cluster.pool
            self.rows[class_id].update(part.keys, part.gradients, push, values, pool)
        assert self.setup.optimizer is not None
        self.setup.optimizer.step()
        step.dense.take_gradients()
        self.last_push = StreamPosition(self.num_steps, step.position)

    def wait_for_step(self) -> None: ...

    def flush(self) -> None: ...

    def refresh(self) -> None: ...

    def has_stopped(self, reason: str = "") -> bool:
        return bool(reason)

    def begin_pass(self) -> PredecessorProgress:
        return PredecessorProgress()

    def num_batches(self, num_pushes: int) -> int:
        return num_pushes

    def end_pass(self) -> None: ...

    def finish(self) -> None: ...

    def resume(self, steps_before: int | None = None) -> None: ...

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def publish(self) -> None: ...

    def adopt(self) -> None: ...


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = tr.Table("t", dim=4, optimizer=tr.optim.Adam(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(self.table, features=["a"])
        self.top = nn.Linear(4, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(self.rows(batch).flatten(1)).flatten()


def batches(num: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "a": torch.randint(0, 20, (8,), generator=generator),
            "label": torch.randint(0, 2, (8,), generator=generator).float(),
        }
        for _ in range(num)
    ]


def by_fit(trainer: tr.Trainer) -> dict[str, float]:
    return trainer.fit(batches(10))


def by_prefetch(trainer: tr.Trainer) -> dict[str, float]:
    for batch in tr.prefetch(batches(10), trainer.model):
        trainer.loss(trainer.model(batch), batch["label"]).backward()
        trainer.optimizer.step()
    return {}


def by_plain_loop(trainer: tr.Trainer) -> dict[str, float]:
    for batch in batches(10):
        trainer.loss(trainer.model(batch), batch["label"]).backward()
        trainer.optimizer.step()
    return {}


def train(cluster: Cluster, loop: Callable[[tr.Trainer], dict[str, float]]) -> list[Any]:
    set_default(cluster)
    torch.manual_seed(1)
    model = Model()
    dense = torch.optim.Adam(model.parameters(), lr=0.1)
    loss = nn.functional.binary_cross_entropy_with_logits
    strategy = tr.Strategy("sync")
    trainer = tr.Trainer(
        model, dense, loss=loss, strategy=strategy, clip_norm=0.5, metrics=[tr.metrics.AUC()]
    )
    trained = loop(trainer)
    trainer.set_time(86400)
    assert trainer.optimizer.num_steps == trainer.optimizer.sequence == 10
    evaluated = trainer.evaluate(batches(5))
    with torch.no_grad():
        outputs = model(batches(1)[0]).tolist()
    figures = [{**by_name, "examples_per_s": 0} for by_name in (trained, evaluated)]
    return [*figures, outputs]


@pytest.mark.parametrize("loop", [by_fit, by_prefetch, by_plain_loop])
def test_a_mode_without_servers_equals_sync_of_one_worker(
    loop: Callable[[tr.Trainer], dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with embedded() as cluster:
        expected = [pytest.approx(values, abs=1e-5) for values in train(cluster, loop)]

    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail("this mode has no servers")

    monkeypatch.setattr(optimizer_module, "mode_class", lambda _: Alone)
    with embedded() as cluster:
        for name in ("pull", "push", "create_table", "create_blocks", "stream_position"):
            monkeypatch.setattr(WorkerClient, name, refuse)
        assert train(cluster, loop) == expected
