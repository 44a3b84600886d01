"""Training loops of every form, on embedded tables and on servers."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trireme as tr
from tests.jobs import Job, in_threads
from trireme import cluster as clusters
from trireme.cluster import Cluster, embedded
from trireme.data.batch import Ragged
from trireme.errors import BadRequest, DeadlineExceeded, SchemaMismatch
from trireme.ps.client import Step

NUM_KEYS = 200
WEIGHTS = np.random.default_rng(11).normal(size=NUM_KEYS)


class Examples(Dataset[dict[str, Any]]):
    """A map-style dataset of a planted model: logit = w[a] + w[b]."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.ids = generator.integers(0, NUM_KEYS, (count, 2))
        probability = 1 / (1 + np.exp(-2 * WEIGHTS[self.ids].sum(1)))
        self.labels = (generator.random(count) < probability).astype(np.float32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        a, b = self.ids[i]
        return {"a": int(a), "b": int(b), "label": self.labels[i]}


OFFSETS = torch.arange(51)  # one id per example


class Share:
    """A dataset of which each worker brings its own part."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def stream(self, worker: int, num_workers: int, *, epoch: int = 0) -> Any:
        return iter(self.batches)


class Linear(nn.Module):
    """One weight per id and a bias."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        table = tr.Table(
            "w", dim=1, optimizer=tr.optim.SGD(lr=lr), initializer=tr.initializer.Constant(0.0)
        )
        self.rows = tr.nn.EmbeddingBag(table, features=["a", "b"])
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.rows(batch).sum((1, 2)) + self.bias


def loader(count: int = 4000, seed: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(Examples(count, seed), batch_size=50, **options)


def trainer_for(cluster: Cluster, mode: str = "async", threads: int = 1) -> tr.Trainer:
    model = Linear(lr=20.0)
    return tr.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=tr.Strategy(mode),
        loss=nn.functional.binary_cross_entropy_with_logits,
        metrics=[tr.metrics.AUC(), tr.metrics.LogLoss()],
        threads=threads,
        progress=False,
        cluster=cluster,
    )


@pytest.mark.parametrize(("mode", "threads"), [("sync", 1), ("async", 1), ("async", 3)])
def test_training_learns_and_every_worker_reports_the_same_figures(mode: str, threads: int) -> None:
    def work(cluster: Cluster) -> tuple[dict[str, float], dict[str, float]]:
        trainer = trainer_for(cluster, mode, threads)
        fitted = trainer.fit(loader(), epochs=2)
        return fitted, trainer.evaluate(loader(2000, seed=1))

    with Job(2) as job:
        results = job.run(2, work)
    for fitted, evaluated in results:
        assert fitted["examples"] == 4000
        assert evaluated["examples"] == 2000
        assert evaluated["auc"] > 0.85
        assert evaluated["loss"] == pytest.approx(evaluated["log_loss"], abs=1e-5)
    assert results[0][1]["auc"] == results[1][1]["auc"]


def test_evaluation_is_the_same_on_any_number_of_workers(tmp_path: Any) -> None:
    with embedded() as cluster:
        trainer = trainer_for(cluster)
        trainer.fit(loader())
        trainer.save(tmp_path / "c")
        expected = trainer.evaluate(loader(2000, seed=1))["auc"]

    def work(cluster: Cluster) -> float:
        trainer = trainer_for(cluster)
        trainer.load(tmp_path / "c")
        return trainer.evaluate(loader(2000, seed=1))["auc"]

    for num_workers in (1, 2, 3):
        with Job(1) as job:
            assert job.run(num_workers, work) == [expected] * num_workers


def test_evaluation_changes_nothing() -> None:
    with embedded() as cluster:
        trainer = trainer_for(cluster)
        trainer.fit(loader(500))
        before = cluster.client.stats()[0]
        first = trainer.evaluate(loader(2000, seed=1))
        assert trainer.evaluate(loader(2000, seed=1))["auc"] == first["auc"]
        after = cluster.client.stats()[0]
        assert after["tables"] == before["tables"]
        assert after["pushes"] == before["pushes"]
        assert cluster.pending.entries == []


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_a_dataloader_with_four_processes_feeds_a_trainer() -> None:
    with embedded() as cluster:
        trainer = trainer_for(cluster)
        fitted = trainer.fit(loader(1000, num_workers=4))
        assert fitted["examples"] == 1000


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

        def note(step: Step, *args: Any, **options: Any) -> None:
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


def test_an_error_in_the_data_reaches_the_training_thread_and_ends_its_threads() -> None:
    def broken() -> Any:
        yield from loader(200)
        raise OSError("the disk is gone")

    with embedded() as cluster:
        with pytest.raises(OSError, match="the disk is gone"):
            trainer_for(cluster).fit(broken())
        assert not cluster.is_prefetching


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


def test_an_older_optimizer_is_told_that_there_is_a_newer_one() -> None:
    with embedded() as cluster:
        older, newer = trainer_for(cluster), trainer_for(cluster)
        newer.fit(loader(500))
        with pytest.raises(BadRequest, match="found an older one"):
            older.fit(loader(500))
        later = trainer_for(cluster)
        later.fit(loader(500))
        assert cluster.client.stream_position().sequence == 20


def test_after_a_push_that_failed_no_other_batch_takes_its_name(
    default_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Linear()
    dense = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = tr.DistributedOptimizer(dense, model, cluster=default_cluster)

    def step() -> None:
        model({"a": torch.tensor([3]), "b": torch.tensor([5])}).sum().backward()
        optimizer.step()

    def late(*args: Any, **options: Any) -> None:
        raise DeadlineExceeded("the second server is slow")

    step()
    monkeypatch.setattr(default_cluster.client, "push", late)
    with pytest.raises(DeadlineExceeded):
        step()
    monkeypatch.undo()
    with pytest.raises(BadRequest, match="expected push 2 to be repeated"):
        step()
    optimizer.resume()
    step()


def test_no_data_has_no_loss_and_an_iterator_no_second_epoch() -> None:
    with embedded() as cluster:
        trainer = trainer_for(cluster)
        trainer.fit(loader(500))
        assert math.isnan(trainer.evaluate([])["loss"])
        with pytest.raises(BadRequest, match="found generator, an iterator"):
            trainer.fit((batch for batch in loader(500)), epochs=2)


def test_evaluation_leaves_every_part_of_the_model_in_its_mode() -> None:
    with embedded() as cluster:
        trainer = trainer_for(cluster)
        trainer.model.rows.eval()
        trainer.evaluate(loader(100))
        assert trainer.model.training
        assert not trainer.model.rows.training


def test_workers_may_not_shuffle_each_in_its_own_order() -> None:
    def work(cluster: Cluster) -> dict[str, float]:
        trainer = trainer_for(cluster)
        with pytest.raises(BadRequest, match="expected the same order on all workers"):
            trainer.fit(loader(1000, shuffle=True))
        return trainer.fit(loader(1000, shuffle=True, generator=torch.Generator().manual_seed(1)))

    with Job(1) as job:
        assert [figures["examples"] for figures in job.run(2, work)] == [1000, 1000]


def test_a_save_that_is_refused_is_refused_to_every_worker(tmp_path: Any) -> None:
    def work(cluster: Cluster) -> str:
        trainer = trainer_for(cluster)
        with pytest.raises(BadRequest) as refused:
            trainer.save(tmp_path)
        return str(refused.value)

    with Job(1) as job:
        messages = job.run(2, work)
    assert all("exist" in message for message in messages)
    assert "worker 0 failed" in messages[1]


def test_a_worker_that_has_finished_waits_for_one_that_is_alive_and_has_more() -> None:
    def slow(batches: Any) -> Any:
        for batch in batches:
            threading.Event().wait(0.4)  # more data, no synchronisation
            yield batch

    def work(cluster: Cluster) -> float:
        batches = list(loader(400))
        mine = batches[:2] if cluster.worker == 0 else slow(batches)
        return trainer_for(cluster).fit(Share(mine))["examples"]

    with Job(1) as job:
        assert job.run(2, work, timeout_s=1.5) == [500, 500]


def plain_loop(cluster: Cluster, batches: Any) -> Linear:
    """No prefetch: rows are pulled inside forward, through the default cluster."""
    model = Linear()
    optimizer = tr.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        strategy=tr.Strategy("sync"),
        cluster=cluster,
    )
    for batch in batches:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
        loss.backward()
        optimizer.step()
    return model


def rows_of(cluster: Cluster, model: Linear) -> np.ndarray:
    model.eval()
    ids = torch.arange(NUM_KEYS)
    with torch.no_grad():
        return model.rows({"a": ids, "b": ids})[:, 0, 0].numpy()


@pytest.fixture
def default_cluster() -> Any:
    with embedded() as cluster:
        clusters.set_default(cluster)
        yield cluster


def test_a_plain_loop_equals_torch(default_cluster: Cluster) -> None:
    batches = list(loader(1000))
    model = plain_loop(default_cluster, batches)
    rows = nn.Embedding(NUM_KEYS, 1)
    nn.init.zeros_(rows.weight)
    bias = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD(
        [{"params": [bias], "lr": 0.1}, {"params": rows.parameters(), "lr": 0.5}]
    )
    for batch in batches:
        optimizer.zero_grad()
        logits = (rows(batch["a"]) + rows(batch["b"])).squeeze(1) + bias
        nn.functional.binary_cross_entropy_with_logits(logits, batch["label"]).backward()
        optimizer.step()
    found = rows_of(default_cluster, model)
    np.testing.assert_allclose(found, rows.weight.detach()[:, 0].numpy(), atol=1e-6)
    np.testing.assert_allclose(model.bias.detach(), bias.detach(), atol=1e-6)


def test_gradient_accumulation_sums_the_rows_of_both_forwards(default_cluster: Cluster) -> None:
    first, second = list(loader(100))
    model = Linear()
    optimizer = tr.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, cluster=default_cluster
    )
    for batch in (first, second):
        model(batch).sum().backward()
    optimizer.step()
    expected = np.zeros(NUM_KEYS)
    for batch in (first, second):
        for name in ("a", "b"):
            np.add.at(expected, batch[name].numpy(), -0.5)
    np.testing.assert_allclose(rows_of(default_cluster, model), expected, atol=1e-5)


def test_a_scheduler_drives_the_rates_of_tables_and_dense_parameters(
    default_cluster: Cluster,
) -> None:
    model = Linear(lr=1.0)
    optimizer = tr.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model, cluster=default_cluster
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    batch = {"a": torch.tensor([3]), "b": torch.tensor([5])}
    for _ in range(3):
        model(batch).sum().backward()
        optimizer.step()
        scheduler.step()
    assert rows_of(default_cluster, model)[3] == -1.75
    assert model.bias.item() == -1.75


def test_a_scheduler_may_note_values_of_its_own_in_the_groups(default_cluster: Cluster) -> None:
    model = Linear()
    dense = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    optimizer = tr.DistributedOptimizer(dense, model, cluster=default_cluster)
    notes = ("max_lr", "min_lr", "initial_lr")
    for group in optimizer.param_groups:
        group.update(dict.fromkeys(notes, 1.0))
    model({"a": torch.tensor([3]), "b": torch.tensor([5])}).sum().backward()
    optimizer.step()
    assert model.bias.item() == -1.0


def test_wrong_use_gets_a_typed_error(default_cluster: Cluster) -> None:
    model = Linear()
    dense = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = tr.DistributedOptimizer(dense, model, cluster=default_cluster)
    with pytest.raises(BadRequest, match="a closure cannot run"):
        optimizer.step(lambda: 0.0)
    extra = nn.Sequential(Linear(), nn.Linear(2, 2))
    with pytest.raises(BadRequest, match=r"found 1\.weight in no group"):
        tr.DistributedOptimizer(
            torch.optim.SGD(extra[0].parameters(), lr=1.0), extra, cluster=default_cluster
        )
    stranger = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(BadRequest, match="1 parameters that are not the model's"):
        tr.DistributedOptimizer(stranger, model, cluster=default_cluster)
    with pytest.raises(BadRequest, match="expected threads >= 1, found 0"):
        trainer_for(default_cluster, threads=0)
    with pytest.raises(BadRequest, match="expected threads=1 in sync, found 2"):
        trainer_for(default_cluster, "sync", threads=2)
    with pytest.raises(BadRequest, match="expected epochs >= 1, found 0"):
        trainer_for(default_cluster).fit(loader(100), epochs=0)


def test_workers_that_disagree_on_the_strategy_are_told_both_sides() -> None:
    with Job(1) as job:
        one, two = job.join(0, 2), job.join(1, 2)
        one.client.agree("strategy", "Strategy('sync')")
        with pytest.raises(SchemaMismatch, match=r"is \"Strategy\('sync'\)\" for this job"):
            two.client.agree("strategy", "Strategy('async')")
        one.abandon()
        two.abandon()


def test_two_clusters_live_in_one_process() -> None:
    def train(steps: int) -> tuple[int, float]:
        with embedded(threads=1) as cluster:
            trainer = trainer_for(cluster)
            trainer.fit(loader(50 * steps))
            stats = cluster.client.stats()[0]
            return stats["pushes"], trainer.evaluate(loader(500, seed=1))["loss"]

    alone = [train(10), train(40)]
    together = in_threads([lambda: train(10), lambda: train(40)])
    assert [pushes for pushes, _ in together] == [10, 40]
    np.testing.assert_allclose(
        [loss for _, loss in together], [loss for _, loss in alone], rtol=0.1
    )


def test_the_first_worker_starts_the_dense_parameters_of_all() -> None:
    def work(cluster: Cluster) -> float:
        model = Linear()
        nn.init.constant_(model.bias, 7.0 + cluster.worker)
        tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, cluster=cluster)
        return model.bias.item()

    with Job(2) as job:
        assert job.run(2, work) == [7.0, 7.0]
