"""What modules of a stage may do, they may do at a compute worker, too, with the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trireme as tr
from tests.integration.compute_service import computing, stage_runner
from tests.jobs import Job
from trireme.job.connecting import connect
from trireme.train.compute import remote_stages, stage_call
from trireme.train.loop.scoring import Scorer

SIZES = (7, 5, 0, 9, 1, 300)
NUM_KEYS = 50


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs, labels, reduction="sum")


class Data:
    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        self.sizes = sizes

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[dict[str, Any]]:
        del index, num_streams
        generator = torch.Generator().manual_seed(epoch)
        for size in self.sizes:
            key = torch.randint(0, NUM_KEYS, (size,), generator=generator)
            yield {"key": key, "label": (key % 2).float()}


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = tr.Table("t", dim=4, optimizer=tr.optim.SGD(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(self.table, features=["key"])
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"x": self.linear(self.rows(batch).flatten(1)), "key": batch["key"]}


class Tower(nn.Module):
    """Calls a function of (itself, what it gets); `part` is for that function."""

    def __init__(self, function: Callable[[Any, Any], Any], part: nn.Module | None) -> None:
        super().__init__()
        self.linear, self.function, self.part = nn.Linear(4, 4), function, part

    def forward(self, values: Any) -> Any:
        return self.function(self, values)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, values: Any) -> Tensor:
        out: Tensor = self.out(values["x"]).squeeze(1)
        return out


class TowerAndHead(nn.Module):
    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower, self.head = tower, Head()

    def forward(self, values: Any) -> Tensor:
        out: Tensor = self.head(self.tower(values))
        return out


class Counting(nn.Module):
    """One buffer is changed in place, another one is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num", torch.zeros(1))
        self.register_buffer("sum", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num = self.num + 1
            self.sum += x.detach().sum()
        return x * (1 + 0.1 * self.num)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh())
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.reshape(-1, 2, 2))[0][:, -1] if len(x) else x


def checkpointed(use_reentrant: bool) -> Callable[[Any, Any], Any]:
    def function(tower: Any, values: Any) -> Any:
        def run(x: Tensor) -> Tensor:
            normed: Tensor = tower.part(tower.linear(x).tanh()) if len(x) > 1 else tower.linear(x)
            return tower.linear(normed).tanh()

        if not torch.is_grad_enabled():
            return {"x": run(values["x"])}
        return {"x": checkpoint(run, values["x"], use_reentrant=use_reentrant)}

    return function


def through_part(tower: Any, values: Any) -> Any:
    return {"x": tower.linear(values["x"]) + tower.part(values["x"])}


def one_as_two(tower: Any, values: Any) -> Any:
    x = tower.linear(values["x"])
    return {"x": x, "same": x, "key": values["key"], "received": values["x"]}


def expanded(tower: Any, values: Any) -> Any:
    return {"x": tower.linear(values["x"])[:, :1].expand(-1, 4), "sum": values["x"].sum()}


CASES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[], nn.Module] | None]] = {
    # Parts of forward are computed again in backward, with the weights and buffers of the batch.
    "checkpointed": (checkpointed(False), lambda: nn.BatchNorm1d(4)),
    "checkpointed_reentrant": (checkpointed(True), lambda: nn.BatchNorm1d(4)),
    "in_place": (lambda t, values: {"x": t.linear(values["x"].relu_())}, None),
    "buffers": (through_part, Counting),
    "shared_weight": (through_part, Shared),
    "recurrent": (through_part, Recurrent),
    "spectral_norm": (
        through_part,
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    ),
    "one_as_two": (one_as_two, None),
    "expanded": (expanded, None),
}


def made(case: str, is_last: bool) -> Callable[[], tr.Stages]:
    def make() -> tr.Stages:
        torch.manual_seed(0)
        function, part = CASES[case]
        tower = Tower(function, None if part is None else part())
        if is_last:
            return tr.Stages(cpu=Wide(), gpu=TowerAndHead(tower))
        return tr.Stages(cpu=Wide(), gpu=tower, cpu_2=Head())

    return make


def train(
    make: Callable[[], tr.Stages], address: str | None, data: Data, epochs: int = 2
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of training and evaluation, all weights and buffers, and how many graphs the worker
    knew of at the end of training.
    """
    heter = [] if address is None else [("gpu", address)]
    with (
        Job(1) as job,
        connect(
            job.endpoints, num_workers=1, threads=1, heter=heter, devices={"gpu": "cpu"}
        ) as cluster,
    ):
        model = make()
        trainer = tr.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.02),
            loss=loss,
            strategy=tr.Strategy("sync"),
            progress=False,
            cluster=cluster,
        )
        losses = [trainer.fit(data, epochs=epochs)["loss"]]
        kept = 0
        if isinstance(trainer.remote, remote_stages.RemoteStages):
            kept = len(trainer.remote.graphs._kept)
        losses.append(trainer.evaluate(data)["loss"])
        state = {name: value.clone() for name, value in model.named_buffers()}
        state |= {name: value.detach().clone() for name, value in model.named_parameters()}
        keys = np.arange(NUM_KEYS, dtype=np.uint64)
        first: Any = model["cpu"]
        state["rows"] = cluster.client.pull({first.table.class_id: keys}).rows[first.table.class_id]
        return losses, state, kept


@pytest.mark.parametrize("is_last", [False, True], ids=["middle", "last"])
@pytest.mark.parametrize("case", CASES)
def test_a_stage_computes_the_same_at_a_compute_worker(case: str, is_last: bool) -> None:
    make = made(case, is_last)
    losses, state, _ = train(make, None, Data())
    with computing(stage_runner(make(), Scorer(loss, "label"))) as (address, _):
        remote_losses, remote_state, kept = train(make, address, Data())
    assert remote_losses == losses
    assert remote_state.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(remote_state[name], value), name
    assert kept == 0


class Ignoring(Head):
    """Does not depend on what it gets for batches of one example."""

    def forward(self, values: Any) -> Tensor:
        return self.out.bias if len(values["x"]) == 1 else super().forward(values)


def test_graphs_that_no_backward_asks_for_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_call, "TOKENS_MAX", 3)
    tower, head = Tower(lambda t, values: {"x": t.linear(values["x"])}, None), Ignoring()

    def make() -> tr.Stages:
        return tr.Stages(cpu=Wide(), gpu=tower, cpu_2=head)

    runner = stage_runner(make(), Scorer(loss, "label"))
    with computing(runner) as (address, _):
        *_, kept = train(make, address, Data((2, *[1] * 10)), epochs=1)
        assert kept == 3
        assert len(runner.graphs) == 0


class Meeting(Head):
    """Waits in forward until the other job's head is there, too."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def forward(self, values: Any) -> Tensor:
        if self.training:
            self.barrier.wait(60)
        return super().forward(values)


def test_two_jobs_that_ask_one_compute_worker_get_the_gradients_of_their_own_graphs() -> None:
    """Their workers have the same numbers: graphs must not be taken for the other's."""
    barrier = threading.Barrier(2)
    results: dict[float, tuple[list[float], dict[str, Tensor], int]] = {}

    def make(factor: float, head: Head) -> tr.Stages:
        generator = torch.Generator().manual_seed(0)
        tower = Tower(lambda t, values: {"x": t.linear(values["x"])}, None)
        stages = tr.Stages(cpu=Wide(), gpu=tower, cpu_2=head)
        with torch.no_grad():
            for parameter in stages.parameters():
                parameter.copy_(factor * torch.rand(parameter.shape, generator=generator))
        return stages

    def run(factor: float, address: str) -> None:
        head = Meeting(barrier)
        results[factor] = train(lambda: make(factor, head), address, Data((8,) * 6), 1)

    runner = stage_runner(make(1.0, Meeting(barrier)), Scorer(loss, "label"))
    with computing(runner) as (address, _):
        jobs = [threading.Thread(target=run, args=(factor, address)) for factor in (1.0, -0.5)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join(120)
    for factor, (losses, state, _) in results.items():
        alone_losses, alone, _ = train(lambda f=factor: make(f, Head()), None, Data((8,) * 6), 1)
        assert losses == alone_losses
        for name, value in alone.items():
            assert torch.equal(state[name], value), name
    assert len(results) == 2
