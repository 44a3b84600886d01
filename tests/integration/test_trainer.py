"""Training loops of every form, with embedded tables and with servers."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.planted_model import (
    NUM_KEYS,
    Linear,
    loader,
    rows_of,
    trainer_for,
)
from tests.jobs import Job, in_threads
from tests.own_batches import OwnBatches
from trireme.errors import BadRequest, DataError, DeadlineExceeded, SchemaMismatch, Superseded
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.nn.session import session_of


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
        assert session_of(cluster).pending.entries == []


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_a_dataloader_with_four_processes_feeds_a_trainer() -> None:
    with embedded() as cluster:
        trainer = trainer_for(cluster)
        fitted = trainer.fit(loader(1000, num_workers=4))
        assert fitted["examples"] == 1000


def test_an_error_in_the_data_reaches_the_training_thread_and_ends_its_threads() -> None:
    def broken() -> Any:
        yield from loader(200)
        raise OSError("the disk is gone")

    with embedded() as cluster:
        with pytest.raises(OSError, match="the disk is gone"):
            trainer_for(cluster).fit(broken())
        assert not session_of(cluster).is_prefetching


def test_an_older_optimizer_is_refused_once_there_is_a_newer_one() -> None:
    with embedded() as cluster:
        older, newer = trainer_for(cluster), trainer_for(cluster)
        newer.fit(loader(500))
        with pytest.raises(Superseded, match="found them dropped"):
            older.fit(loader(500))
        later = trainer_for(cluster)
        later.fit(loader(500))
        assert cluster.client.stream_position().sequence == 10  # it has begun anew


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_a_refused_older_trainer_leaves_the_newest_as_it_was(mode: str, tmp_path: Path) -> None:
    strategy = tr.Strategy("geo", k=3) if mode == "geo" else tr.Strategy(mode)
    with embedded() as cluster:
        older, newer = (
            tr.Trainer(
                tr.nn.EmbeddingBag(
                    tr.Table(name, dim=1, optimizer=tr.optim.SGD(lr=1.0)), features=["a"]
                ),
                None,
                loss=lambda rows, _: rows.sum(),
                label=None,
                strategy=strategy,
                progress=False,
                cluster=cluster,
            )
            for name in ("older", "newer")
        )
        batches = [{"a": torch.tensor([1, 2])}] * 4
        newer.fit(batches)
        newer.save(tmp_path / "saved")
        for use in (
            lambda: older.fit(batches),
            lambda: older.load(tmp_path / "saved"),
            older.optimizer.begin_pass,
            older.optimizer.step,
        ):
            with pytest.raises(BadRequest, match="expected the newest optimizer"):
                use()
        newer.fit(batches)
        assert cluster.client.stream_position().sequence == newer.optimizer.sequence


def test_after_a_failed_push_no_other_batch_reuses_its_sequence(
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
    optimizer.mode.resume()
    step()


def test_no_data_has_no_loss_and_an_iterator_no_second_epoch() -> None:
    with embedded() as cluster:
        trainer = trainer_for(cluster)
        trainer.fit(loader(500))
        assert math.isnan(trainer.evaluate([])["loss"])
        with pytest.raises(DataError, match="train: expected examples, found none"):
            trainer.fit([])
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
    assert all("expected a new folder" in message for message in messages)
    assert "worker 0 failed" in messages[1]


def test_a_finished_worker_waits_for_one_that_still_trains() -> None:
    def slow(batches: Any) -> Any:
        for batch in batches:
            threading.Event().wait(0.4)  # more data, no synchronisation
            yield batch

    def work(cluster: Cluster) -> float:
        batches = list(loader(400))
        mine = batches[:2] if cluster.worker == 0 else slow(batches)
        return trainer_for(cluster).fit(OwnBatches(mine))["examples"]

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
    actual = rows_of(default_cluster, model)
    np.testing.assert_allclose(actual, rows.weight.detach()[:, 0].numpy(), atol=1e-6)
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
    extra = nn.Sequential(Linear(), nn.Linear(2, 2))
    with pytest.raises(BadRequest, match=r"found 1\.weight in no group"):
        tr.DistributedOptimizer(
            torch.optim.SGD(extra[0].parameters(), lr=1.0), extra, cluster=default_cluster
        )
    stranger = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(BadRequest, match="1 parameters that are not the model's"):
        tr.DistributedOptimizer(stranger, model, cluster=default_cluster)
    with pytest.raises(BadRequest, match="expected threads as an integer >= 1, found 0"):
        trainer_for(default_cluster, threads=0)
    with pytest.raises(BadRequest, match="expected threads=1 in sync, found 2"):
        trainer_for(default_cluster, "sync", threads=2)
    wrong: list[tuple[Any, str]] = [(0, "0"), (1.5, "1.5"), ("2", "'2'")]
    for epochs, shown in wrong:
        with pytest.raises(BadRequest, match=f"expected epochs as an integer >= 1, found {shown}"):
            trainer_for(default_cluster).fit(loader(100), epochs=epochs)
    for data in (None, 5):
        with pytest.raises(BadRequest, match=r"found (NoneType|int), which cannot be iterated"):
            trainer_for(default_cluster).fit(data)
    losses: list[tuple[Any, str]] = [(nn.MSELoss, "the class MSELoss"), (None, "None")]
    for loss, shown in losses:
        with pytest.raises(BadRequest, match=f"expected loss as a function .*, found {shown}"):
            tr.Trainer(model, None, loss=loss, cluster=default_cluster)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    each = nn.MSELoss(reduction="none")
    with pytest.raises(BadRequest, match=r"expected the loss as a tensor of one number, .* shape"):
        tr.Trainer(model, sgd, loss=each, cluster=default_cluster).fit(loader(100))


def test_several_labels_and_metrics_of_one_name_say_how_else(default_cluster: Cluster) -> None:
    labels: Any = ["click", "buy"]
    with pytest.raises(BadRequest, match=r"expected label as a column's name, or None: loss gets"):
        tr.Trainer(Linear(), None, loss=nn.MSELoss(), label=labels, cluster=default_cluster)
    metrics = [tr.metrics.AUC(label=label, output=label) for label in labels]
    with pytest.raises(BadRequest, match=r"\['auc', 'auc'\]; name= says another, as in tr\.met"):
        tr.Trainer(Linear(), None, loss=nn.MSELoss(), metrics=metrics, cluster=default_cluster)


def test_workers_with_different_strategies_get_an_error_with_both() -> None:
    with Job(1) as job:
        one, two = job.join(0, 2), job.join(1, 2)
        one.client.coordinator.agree("strategy", "Strategy('sync')")
        with pytest.raises(SchemaMismatch, match=r"is \"Strategy\('sync'\)\" for this job"):
            two.client.coordinator.agree("strategy", "Strategy('async')")
        one.abandon()
        two.abandon()


def test_two_clusters_work_in_one_process() -> None:
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
