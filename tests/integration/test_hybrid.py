"""Mode hybrid: dense weights have the same bits on all workers after every step."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration import test_sync as exact
from tests.jobs import Job
from tests.own_batches import OwnBatches
from trireme.errors import BadRequest, TriremeError
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.strategy import Strategy
from trireme.train.modes.worker_group import WorkerGroup, _check

HYBRID = Strategy("hybrid")
# Rows that stay as they are, so that what the dense part should be is known.
FROZEN_ROWS = exact.Rule(
    tr.optim.SGD(lr=0.0),
    torch.optim.Adam,
    lambda parameters, **_: torch.optim.SGD(parameters, lr=0.0),  # type: ignore[arg-type]
    {"lr": 0.01},
)


def weights_of(model: nn.Module) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def steps_of(cluster: Cluster, lengths: Sequence[int], rule: exact.Rule) -> list[bytes]:
    """The dense weights after each step of this worker, and when all workers have ended."""
    model = exact.Model(rule)
    dense = rule.dense(model.parameters(), **rule.options)
    optimizer = tr.DistributedOptimizer(dense, model, strategy=HYBRID, cluster=cluster)
    seen = []
    source = OwnBatches(exact.stream_batches(cluster.worker % 2)[: lengths[cluster.worker]])
    for batch in tr.prefetch(source, model, cluster=cluster):
        nn.functional.mse_loss(model(batch), batch["label"]).backward()
        optimizer.step(examples=batch.num_examples)
        seen.append(weights_of(model))
    return [*seen, weights_of(model)]


@pytest.mark.parametrize("lengths", [(20, 20), (9, 20, 14), (0, 12), (12, 0)])
def test_weights_are_equal_bit_for_bit_after_every_step(lengths: tuple[int, ...]) -> None:
    with Job(2) as job:
        results = job.run(
            len(lengths), lambda cluster: steps_of(cluster, lengths, exact.RULES["adagrad"])
        )
    longest = max(results, key=len)
    assert len(set(longest)) == max(lengths)
    for result, length in zip(results, lengths, strict=True):
        assert result[:length] == longest[:length]
        assert result[-1] == longest[-1]


def test_streams_of_unequal_batches_and_lengths_equal_one_process_on_their_union() -> None:
    def train(cluster: Cluster) -> exact.Weights:
        return exact.train(cluster, FROZEN_ROWS, [cluster.worker], strategy=HYBRID)

    with Job(2) as job:
        results = job.run(2, train)
    before, after = exact.plain_torch(FROZEN_ROWS)
    for part, values in after.items():
        assert np.array_equal(results[0][part], results[1][part])
        np.testing.assert_allclose(results[0][part], values, atol=exact.ATOL, err_msg=part)
        if part != "rows":
            assert np.abs(values - before[part]).max() >= 100 * exact.ATOL


class Gated(nn.Module):
    """The two branches of a batch are of different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3)])

    def forward(self, batch: Any) -> torch.Tensor:
        return self.branches[int(batch["which"][0])](batch["x"]).squeeze(1)


def test_a_parameter_without_gradient_everywhere_is_passed_over_as_torch_does() -> None:
    def train(cluster: Cluster) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Gated()
        optimizer = tr.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5),
            model,
            strategy=HYBRID,
            cluster=cluster,
        )
        before = [p.detach().clone() for p in model.parameters()]
        batch = {"which": torch.tensor([cluster.worker]), "x": torch.ones(1, 1)}
        model(batch).sum().backward()
        optimizer.step(examples=1)
        return [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]

    with Job(1) as job:
        first, second = job.run(2, train)
    assert [bool(change.abs().sum() > 0) for change in first] == [True, True, False]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def trainer_of(cluster: Cluster, strategy: Strategy) -> tr.Trainer:
    model = exact.Model(FROZEN_ROWS)
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.mse_loss,
        strategy=strategy,
        progress=False,
        cluster=cluster,
    )


@pytest.mark.parametrize("second", ["hybrid", "sync"])
def test_a_checkpoint_resumes_in_hybrid_and_in_sync(tmp_path: Path, second: str) -> None:
    batches = exact.stream_batches(0)[:30]
    path = tmp_path / "saved"
    with embedded(threads=1) as cluster:
        trainer = trainer_of(cluster, HYBRID)
        trainer.fit(OwnBatches(batches[:20]))
        trainer.save(path)
        trainer.fit(OwnBatches(batches[20:]))
        expected = weights_of(trainer.model)
    with embedded(threads=1) as cluster:
        trainer = trainer_of(cluster, Strategy(second))
        trainer.load(path)
        trainer.fit(OwnBatches(batches[20:]))
        actual = np.frombuffer(weights_of(trainer.model), np.float32)
    np.testing.assert_allclose(actual, np.frombuffer(expected, np.float32), atol=1e-5)


def test_a_checkpoint_of_two_workers_is_resumed_by_two(tmp_path: Path) -> None:
    lists = [exact.stream_batches(0)[:20], exact.stream_batches(1)[:8]]

    def first(cluster: Cluster) -> bytes:
        trainer = trainer_of(cluster, HYBRID)
        every = tr.Checkpoints(tmp_path, every_steps=5)
        trainer.fit(OwnBatches(lists[cluster.worker]), checkpoints=every)
        return weights_of(trainer.model)

    def second(cluster: Cluster) -> bytes:
        trainer = trainer_of(cluster, HYBRID)
        assert trainer.resume(tmp_path) is not None
        return weights_of(trainer.model)

    with Job(2) as job:
        saved = job.run(2, first)
    with Job(1) as job:
        assert job.run(2, second) == saved
    assert saved[0] == saved[1]


def test_parameters_left_out_of_a_load_keep_their_trained_weights(tmp_path: Path) -> None:
    batches = exact.stream_batches(0)[:10]
    with embedded(threads=1) as cluster:
        trainer = trainer_of(cluster, HYBRID)
        trainer.save(tmp_path / "start")
        trainer.fit(OwnBatches(batches))
        trained = weights_of(trainer.model)
        trainer.load(tmp_path / "start", dense="skip")
        assert weights_of(trainer.model) == trained
        trainer.load(tmp_path / "start")
        assert weights_of(trainer.model) != trained


def test_a_missing_worker_is_named_at_the_deadline() -> None:
    def train(cluster: Cluster) -> None:
        model = exact.Model(exact.RULES["sgd"])
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, strategy=HYBRID, cluster=cluster
        )
        if cluster.worker == 1:
            with cluster.client.script.section():  # as prefetch: meetings have names in the script
                optimizer.begin_pass()
            cluster.abandon()
            return
        for batch in tr.prefetch(OwnBatches(exact.stream_batches(0)), model, cluster=cluster):
            nn.functional.mse_loss(model(batch), batch["label"]).backward()
            optimizer.step(examples=8)

    with Job(1) as job, pytest.raises(TriremeError, match="hybrid: all-reduce of 2 workers"):
        job.run(2, train, timeout_s=3.0)


def test_a_group_whose_sum_has_not_ended_is_dropped_without_waiting() -> None:
    dropped = threading.Event()

    def train(cluster: Cluster) -> None:
        group = WorkerGroup(cluster, torch.device("cpu"), "hybrid", find_silent=lambda: [1])
        if cluster.worker == 1:
            assert dropped.wait(30)  # the sum itself gives up after 90 s
            return
        with pytest.raises(TriremeError, match="silent: workers"):
            group.sum(torch.ones(4))
        del group
        gc.collect()
        dropped.set()

    with Job(1) as job:
        job.run(2, train, timeout_s=3.0)


def test_a_network_that_others_reach_needs_the_users_consent() -> None:
    with embedded(threads=1) as cluster:
        _check("127.0.0.1", torch.device("cpu"), cluster, "hybrid")
        with pytest.raises(BadRequest, match=r"expected insecure=True to all-reduce over 10\.0\.0"):
            _check("10.0.0.7", torch.device("cpu"), cluster, "hybrid")
        cluster.insecure = True
        _check("10.0.0.7", torch.device("cpu"), cluster, "hybrid")


def test_a_step_without_examples_is_refused() -> None:
    def train(cluster: Cluster) -> None:
        model = nn.Linear(1, 1)
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, strategy=HYBRID, cluster=cluster
        )
        with pytest.raises(BadRequest, match=r"found 0; give step\(examples=...\)"):
            optimizer.step()

    with Job(1) as job:
        job.run(2, train)


class _Counting(nn.Module):
    """A row and the dense weight tell how many of their steps were made."""

    def __init__(self) -> None:
        super().__init__()
        rule, zero = tr.optim.SGD(lr=1.0), tr.initializer.Constant(0.0)
        table = tr.Table("ids", dim=1, optimizer=rule, initializer=zero)
        self.ids = tr.nn.EmbeddingBag(table, features=["id"])
        self.steps = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.ids(batch).flatten(1).squeeze(1) + self.steps


class _Streams:
    """Worker 0 has 12 batches of its own ids, worker 1 has 5."""

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        for number in range((12, 5)[index]):
            yield {"id": torch.tensor([100 * index + number])}


def test_a_checkpoint_within_an_epoch_has_the_dense_steps_that_its_rows_have(
    tmp_path: Path,
) -> None:
    def make(cluster: Cluster, strategy: Strategy) -> tr.Trainer:
        model = _Counting()
        return tr.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            loss=lambda outputs, _: -outputs.mean(),
            label=None,
            strategy=strategy,
            cluster=cluster,
            progress=False,
        )

    def fit(cluster: Cluster) -> list[float]:
        trainer = make(cluster, HYBRID)
        trainer.fit(_Streams(), checkpoints=tr.Checkpoints(tmp_path, every_steps=3, keep=9))
        return trainer.model.steps.tolist()

    with Job(2) as job:
        assert job.run(2, fit) == [[12.0], [12.0]]
    ids = [*range(12), *range(100, 105)]
    for number in range(1, 5):
        num_steps = 3 * number
        with embedded(threads=1) as cluster:
            trainer = make(cluster, Strategy("async"))
            trainer.load(tmp_path / str(number))
            rows = tr.TableView(trainer.model.ids.table, "id", ids, cluster=cluster)[ids]
            made = rows.flatten().tolist()
        assert trainer.model.steps.tolist() == [num_steps]
        assert made == [i % 100 < num_steps for i in ids]
