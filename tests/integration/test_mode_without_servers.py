"""A mode without pulls and pushes: the protocol of a mode is all that the training code asks for.

Its worker trains the tables of a server in its own process. So the job saves, loads, shrinks and
exports them as those of any server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import trireme as tr
from trireme.data.batch import Batch
from trireme.dense.optimizers import group_values, optimizer_spec
from trireme.errors import BadRequest
from trireme.inference import Predictor
from trireme.inference.export import export_model
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.protocol.wire import Push, TablePush
from trireme.rpc import Request
from trireme.train import optimizer as optimizer_module
from trireme.train.clipping import clip_gradients
from trireme.train.loop.scoring import Compute, Scored
from trireme.train.modes.base import BeginPull, Mode
from trireme.train.modes.on_servers.worker_trained_dense import WorkerTrainedDense
from trireme.train.modes.setup import TableGradients, TrainingSetup, WorkerStep
from trireme.train.predecessor import PredecessorProgress
from trireme.worker.client import StreamPosition, WorkerClient
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import KeysByClass
from trireme.worker.pull import Pulled
from trireme.worker.transport import LOCAL


class Alone(Mode):
    """A process that pushes to its own server without a call, and has its own dense optimizer."""

    trains_in_threads = False
    saves_between_steps = True

    def __init__(self, setup: TrainingSetup) -> None:
        assert setup.cluster.server is not None
        self.server, self.setup = setup.cluster.server, setup
        self.num_computed = 0
        self.num_steps, self.last_push = 0, StreamPosition()
        self.client, dense = setup.cluster.client, setup.replica.dense
        self.dense = WorkerTrainedDense(self.client, dense, setup.optimizer)

    def open(self) -> None:
        for table in self.setup.tables:
            self.client.create_table(table.schema)
        optimizer = self.setup.optimizer
        assert optimizer is not None
        groups = [group_values(group, optimizer.defaults) for group in optimizer.param_groups]
        self.client.create_blocks(optimizer_spec(optimizer), groups, self.setup.replica.dense)

    def pull_ahead(self, *, steps: bool) -> BeginPull | None:
        return None

    def begin_run(self) -> None: ...

    def pull(self, keys: KeysByClass, *, blocks: bool, number: int | None = None) -> Pulled:
        return self.read(keys)

    def read(self, keys: KeysByClass) -> Pulled:
        pulled = {}
        for class_id, keys_K in keys.items():
            pool = self.setup.cluster.pool
            rows_KD, _ = self.server.tables[class_id.table].read(
                class_id.row_class, keys_K, 0, pool
            )
            pulled[class_id] = torch.from_numpy(rows_KD)
        return Pulled(pulled, None, [], dict.fromkeys(keys, 0))

    def compute(self, model: nn.Module, batch: Batch, locally: Compute) -> Scored:
        self.num_computed += 1
        return locally(model, batch)

    def begin_step(self) -> int:
        return self.num_steps + 1

    def clip(self, tables: TableGradients, dense: DenseParameters) -> TableGradients:
        return clip_gradients(self.setup.clip, tables, dense.parameters.values())

    def step(self, step: WorkerStep) -> None:
        push = Push(
            stream=0,
            sequence=self.last_push.sequence + 1,
            incarnation=self.client.incarnation,
            step=0,
            staged=False,
            computed_at=0,
            examples=step.examples,
            position=step.position,
            time=0,
            map_version=self.client.servers.map.version,
            tables=[
                TablePush(c.table, part.keys, part.gradients.numpy(), part.values, part.columns)
                for c, part in step.tables.items()
            ],
            blocks=None,
        )
        body, arrays = push.to_wire()
        self.server.push(push, Request(0, "ps.push", body, arrays, LOCAL, LOCAL, "", math.inf))
        assert self.setup.optimizer is not None
        self.setup.optimizer.step()
        step.dense.take_gradients()
        self.last_push = StreamPosition(push.sequence, push.position)

    def wait_for_step(self) -> None: ...

    def flush(self) -> None: ...

    def refresh(self) -> None: ...

    def has_stopped(self, reason: str = "") -> bool:
        return bool(reason)

    def begin_pass(self) -> PredecessorProgress:
        return PredecessorProgress()

    def end_pass(self) -> None: ...

    def finish(self) -> None: ...

    def resume(self, steps_before: int | None = None) -> None:
        self.last_push = self.client.stream_position()

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def publish(self) -> None:
        self.dense.publish(weights=True)

    def adopt(self) -> None:
        self.dense.adopt()


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


def make_trainer(cluster: Cluster) -> tr.Trainer:
    set_default(cluster)
    torch.manual_seed(1)
    model = Model()
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.1),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=tr.Strategy("sync"),
        clip_norm=0.5,
        metrics=[tr.metrics.AUC()],
    )


def outputs(trainer: tr.Trainer) -> list[float]:
    with torch.no_grad():
        answer: list[float] = trainer.model(batches(1)[0]).tolist()
    return answer


def train(trainer: tr.Trainer, loop: Callable[[tr.Trainer], dict[str, float]]) -> list[Any]:
    trained = loop(trainer)
    trainer.set_time(86400)
    assert trainer.optimizer.num_steps == trainer.optimizer.sequence == 10
    evaluated = trainer.evaluate(batches(5))
    figures = [{**by_name, "examples_per_s": 0} for by_name in (trained, evaluated)]
    return [*figures, outputs(trainer)]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A job of one process whose mode neither pulls nor pushes."""

    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail("this mode does not ask servers for rows")

    with embedded() as cluster:
        monkeypatch.setattr(optimizer_module, "mode_class", lambda _: Alone)
        for name in ("pull", "push"):
            monkeypatch.setattr(WorkerClient, name, refuse)
        yield cluster


@pytest.mark.parametrize("loop", [by_fit, by_prefetch, by_plain_loop])
def test_it_equals_sync_of_one_worker(
    loop: Callable[[tr.Trainer], dict[str, float]], request: pytest.FixtureRequest
) -> None:
    with embedded() as cluster:
        expected = train(make_trainer(cluster), loop)
    trainer = make_trainer(request.getfixturevalue("alone"))
    actual = train(trainer, loop)
    assert actual == [pytest.approx(values, abs=1e-5) for values in expected]
    assert isinstance(trainer.optimizer.mode, Alone)
    assert trainer.optimizer.mode.num_computed == (10 if loop is by_fit else 0)


def test_its_rows_are_saved_loaded_shrunk_and_exported(tmp_path: Path, alone: Cluster) -> None:
    trainer = make_trainer(alone)
    saved = train(trainer, by_fit)[-1]
    trainer.save(tmp_path / "checkpoint")
    export_model(trainer, tmp_path / "model", batch=batches(1)[0])
    trainer.fit(batches(5))
    assert outputs(trainer) != saved
    trainer.load(tmp_path / "checkpoint")
    assert (outputs(trainer), trainer.optimizer.num_steps) == (saved, 10)
    assert trainer.shrink()["t"] == {"expired": 0, "evicted": 0}
    predicted = Predictor(tmp_path / "model").predict(batches(1)[0]).outputs["output"]
    assert predicted.tolist() == pytest.approx(saved, abs=1e-6)


def test_sync_continues_from_its_checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with embedded() as cluster:
        trainer = make_trainer(cluster)
        trainer.fit(batches(10))
        trainer.fit(batches(5))
        expected = outputs(trainer)
    trainer = make_trainer(request.getfixturevalue("alone"))
    trainer.fit(batches(10))
    trainer.save(tmp_path / "checkpoint")
    request.getfixturevalue("monkeypatch").undo()
    with embedded() as cluster:
        trainer = make_trainer(cluster)
        trainer.load(tmp_path / "checkpoint")
        trainer.fit(batches(5))
        assert outputs(trainer) == pytest.approx(expected, abs=1e-5)


def test_a_delta_follows_its_base_alone(tmp_path: Path, alone: Cluster) -> None:
    trainer = make_trainer(alone)
    trainer.fit(batches(3))
    trainer.save(tmp_path / "base", mode="base")
    trainer.fit(batches(3))
    trainer.save(tmp_path / "delta", mode="delta")
    trainer.load(tmp_path / "base")
    trainer.fit(batches(1))
    with pytest.raises(BadRequest, match="delta"):
        trainer.load(tmp_path / "delta")
