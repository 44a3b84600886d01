"""Steps of several batches, Trainer(accumulate=), equal steps of the union of the batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration import test_device_passes as passes
from tests.integration import test_predecessor as restarts
from tests.integration import test_sync as exact
from tests.jobs import Job
from tests.ranks import run_ranks
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded

STEP = 4  # batches
Batches = list[dict[str, torch.Tensor]]


def joined(batches: Batches, size: int = STEP) -> Batches:
    """As many batches in one; the last has what is left."""
    groups = [batches[start : start + size] for start in range(0, len(batches), size)]
    return [{name: torch.cat([b[name] for b in group]) for name in group[0]} for group in groups]


def uneven(num_batches: int = 30) -> Batches:
    """Of sizes 1 to 5."""
    return [
        {name: values[: 1 + number % 5] for name, values in batch.items()}
        for number, batch in enumerate(exact.stream_batches(0)[:num_batches])
    ]


def train(
    cluster: Cluster, data: Batches, rule: str, strategy: tr.Strategy, size: int, **options: Any
) -> dict[str, Any]:
    """All weights and the figures after two epochs."""
    one = exact.RULES[rule]
    model = exact.Model(one)
    trainer = tr.Trainer(
        model,
        one.dense(model.parameters(), **one.options),
        loss=nn.functional.mse_loss,
        strategy=strategy,
        accumulate=size,
        progress=False,
        cluster=cluster,
        **options,
    )
    figures = trainer.fit(data, epochs=2)
    cluster.client.coordinator.gather({}, [])
    trainer.optimizer.refresh()
    keys = exact.keys_in_bucket_order()
    rows = cluster.client.pull({exact.T_ROWS: keys}).rows[exact.T_ROWS].numpy()
    weights = {"rows": rows[np.argsort(keys)], **model.dense_weights()}
    return {"weights": weights, "loss": figures["loss"], "steps": trainer.optimizer.num_steps}


def assert_alike(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["steps"] == expected["steps"]
    for name, values in expected["weights"].items():
        np.testing.assert_allclose(actual["weights"][name], values, atol=exact.ATOL, rtol=0)


@pytest.mark.parametrize("rule", exact.RULES)
@pytest.mark.parametrize("mode", restarts.STRATEGIES)
def test_a_step_of_several_batches_is_that_of_their_union(mode: str, rule: str) -> None:
    data, strategy = uneven(), restarts.STRATEGIES[mode]
    clips = {"clip_value": 0.05} if mode in ("geo", "hybrid") else {"clip_norm": 0.5}

    def run(work: Callable[[Cluster], dict[str, Any]]) -> dict[str, Any]:
        if mode == "collective":
            return run_ranks(1, work)[0]
        with Job(2) as job, job.join(0, 1) as cluster:
            return work(cluster)

    expected = run(lambda cluster: train(cluster, joined(data), rule, strategy, 1, **clips))
    actual = run(lambda cluster: train(cluster, data, rule, strategy, STEP, **clips))
    assert_alike(actual, expected)
    assert actual["steps"] == 16  # of two epochs, each with 7 steps of four and one of two


def test_workers_of_unequal_streams_make_the_steps_of_their_unions_with_the_bits_of_sync() -> None:
    def work(size: int, strategy: tr.Strategy) -> Callable[[Cluster], dict[str, Any]]:
        def of_worker(cluster: Cluster) -> dict[str, Any]:
            own = uneven(22 if cluster.worker else 13)
            data = exact.OwnBatches(own if size > 1 else joined(own, 3))
            return train(cluster, data, "adagrad", strategy, size, clip_norm=0.5)

        return of_worker

    with Job(2) as job:
        expected = job.run(2, work(1, tr.Strategy("sync")))
    with Job(2) as job:
        actual = job.run(2, work(3, tr.Strategy("sync")))
    ranks = run_ranks(2, work(3, tr.Strategy("collective")))
    for one, of_rank, same in zip(actual, ranks, expected, strict=True):
        assert_alike(one, same)
        exact.assert_same_bits([one["weights"], of_rank["weights"]])


def test_one_worker_has_the_bits_of_sync_with_a_worker_for_each_batch() -> None:
    """Where a batch's share of the examples is a power of two, so that no weight is rounded."""
    data = [{n: v[:4] for n, v in batch.items()} for batch in exact.stream_batches(0)[:20]]
    sync = tr.Strategy("sync")
    with Job(1) as job:
        expected = job.run(2, lambda cluster: train(cluster, data, "adam", sync, 1))
    with Job(1) as job, job.join(0, 1) as cluster:
        actual = train(cluster, data, "adam", sync, 2)
    exact.assert_same_bits([expected[0]["weights"], actual["weights"]])
    assert actual["steps"] == expected[0]["steps"] == 20


@pytest.mark.parametrize("window", [False, True])
def test_passes_and_windows_on_a_device_have_the_bits_of_sync(window: bool) -> None:
    def contents(on_device: bool) -> dict[str, np.ndarray]:
        with embedded() as cluster:
            set_default(cluster)
            trainer = passes.trainer(passes.RULES["adam"](), accumulate=3)
            data = [batch for seed in range(4) for batch in passes.data(seed)]
            place = trainer.in_window(2, "1MiB") if window else trainer.on_device(data)
            with place if on_device else nullcontext():
                trainer.fit(data, epochs=2)
            assert trainer.optimizer.num_steps == 12
            return passes.contents(cluster)

    passes.assert_equal(contents(on_device=True), contents(on_device=False))


@restarts.MODES
@pytest.mark.parametrize("kill_at", [1, 5, 9, 14])
def test_a_restarted_worker_goes_on_after_the_last_step(mode: str, kill_at: int) -> None:
    def fit(cluster: Cluster, kill_at: int = 0) -> None:
        model = restarts.Model(kill_at)
        restarts.make_trainer(cluster, model, mode, accumulate=3).fit(data, epochs=2)

    data = restarts.batches()
    steps = joined(data, 3)  # a step counts a key once
    with Job(2) as job:
        restarts.die(job, lambda cluster: fit(cluster, kill_at))
        with job.join(0, 1) as cluster:
            fit(cluster)
            assert restarts.counts(cluster) == restarts.times(2, steps)


def test_callbacks_and_checkpoints_see_steps(default_cluster: Cluster, tmp_path: Any) -> None:
    class Steps(tr.Callback):
        def step(self, fit: Any) -> None:
            seen.append(fit.step)

    seen: list[int] = []
    trainer = restarts.make_trainer(
        default_cluster, restarts.Model(), "sync", accumulate=3, callbacks=[Steps()]
    )
    trainer.fit(restarts.batches(), checkpoints=tr.Checkpoints(tmp_path, every_steps=2))
    assert seen == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 2  # after step 2, and at the end


def test_what_does_not_add_up_is_refused(default_cluster: Cluster) -> None:
    def make(rule: tr.optim.Rule | None = None, **options: Any) -> tr.Trainer:
        table = tr.Table("t", dim=1, optimizer=rule or tr.optim.SGD(lr=0.1))
        model = tr.nn.EmbeddingBag(table, features=["a"])
        return tr.Trainer(
            model, None, loss=nn.functional.mse_loss, cluster=default_cluster, **options
        )

    with pytest.raises(BadRequest, match="expected accumulate as an integer >= 1, found 0"):
        make(accumulate=0)
    with pytest.raises(BadRequest, match="expected threads=1 with accumulate=2, found 2"):
        make(accumulate=2, threads=2)
    scaled = tr.optim.FleetSGD(lr=0.1)
    with pytest.raises(BadRequest, match="expected scale='loss' for table 't' with accumulate=2"):
        make(scaled, accumulate=2)
