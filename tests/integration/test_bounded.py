"""Mode bounded(s): no push is applied more than s steps ahead of the slowest worker."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job
from tests.tables import T_ROWS
from trireme.errors import DeadlineExceeded
from trireme.job.cluster import Cluster
from trireme.server.server_stats import stats_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = tr.Table("t", dim=2, optimizer=tr.optim.Count())
        self.rows = tr.nn.EmbeddingBag(self.table, features=["a"])
        self.top = nn.Linear(2, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(self.rows(batch).flatten(1)).squeeze(1)


class Delayed:
    """A dataset whose batches come after seeded delays; `slow` times longer for stream 0."""

    def __init__(self, lengths: tuple[int, ...], seed: int, slow: float) -> None:
        self.lengths, self.seed, self.slow = lengths, seed, slow

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        del num_streams
        rng = random.Random(f"{self.seed} {index} {epoch}")
        for _ in range(self.lengths[index]):
            delay_s = rng.expovariate(1 / 0.0005) * (self.slow if index == 0 else 1)
            threading.Event().wait(min(delay_s, 0.02))
            yield {
                "a": torch.tensor([1, 2, 3]),
                "label": torch.tensor([0.0, 1.0, 0.0]),
            }


def fit(cluster: Cluster, strategy: tr.Strategy, data: Delayed, threads: int = 1) -> dict[str, Any]:
    model = Model()
    trainer = tr.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=strategy,
        threads=threads,
        progress=False,
        cluster=cluster,
    )
    trainer.fit(data, epochs=2)
    keys = np.array([1], np.uint64)
    cluster.client.coordinator.gather({}, [])
    count = float(cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()[0, 0])
    return {"count": count, "staleness": trainer.staleness()}


def histograms(job: Job, name: str) -> Counter[int]:
    total: Counter[int] = Counter()
    for server in job.servers:
        for steps, count in stats_of(server.state)[name].items():
            total[int(steps)] += count
    return total


@pytest.mark.parametrize(("staleness", "threads"), [(1, 1), (2, 1), (4, 1), (3, 2)])
def test_measured_lead_and_staleness_stay_within_the_bound(staleness: int, threads: int) -> None:
    seed = 10 * staleness + threads
    print(f"seed {seed}")
    lengths = (30, 40, 25)
    data = Delayed(lengths, seed, slow=8)
    with Job(2) as job:
        strategy = tr.Strategy("bounded", staleness=staleness)
        results = job.run(3, lambda cluster: fit(cluster, strategy, data, threads))
        ahead, stale = histograms(job, "ahead"), histograms(job, "staleness")
    initial = results[0]["count"] - 2 * sum(lengths)
    assert abs(initial) < 1  # every push of the two epochs was applied once
    assert ahead.total() == stale.total() == 2 * 2 * sum(lengths)
    assert max(ahead) <= staleness
    assert all(result["staleness"] == stale for result in results)
    # Others: from this pull's admission to theirs; and this worker's pushes in flight.
    assert max(stale) <= 2 * (2 * staleness - 1) + threads - 1


def test_the_same_delays_make_async_staler() -> None:
    data = Delayed((30, 120, 120), 5, slow=8)
    with Job(1) as job:
        job.run(3, lambda cluster: fit(cluster, tr.Strategy("async"), data))
        assert max(histograms(job, "staleness")) > 2


@pytest.mark.parametrize("lengths", [(0, 20), (20, 0), (1, 30)])
def test_streams_with_less_data_or_none_delay_no_other(lengths: tuple[int, int]) -> None:
    data = Delayed(lengths, 1, slow=1)
    with Job(2) as job:
        job.run(2, lambda cluster: fit(cluster, tr.Strategy("bounded", staleness=1), data))
        assert histograms(job, "staleness").total() == 2 * 2 * sum(lengths)


def test_a_plain_loop_that_steps_every_other_batch_keeps_the_bound() -> None:
    data = Delayed((16, 24), 2, slow=4)

    def train(cluster: Cluster) -> int:
        model = Model()
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model,
            strategy=tr.Strategy("bounded", staleness=1),
            cluster=cluster,
        )
        for number, batch in enumerate(tr.prefetch(data, model, cluster=cluster)):
            nn.functional.mse_loss(model(batch), batch["label"]).backward()
            if number % 2 == 1:
                optimizer.step()
        return optimizer.num_steps

    with Job(1) as job:
        assert job.run(2, train) == [8, 12]
        ahead = histograms(job, "ahead")
    assert max(ahead) == 1


def test_a_stalled_stream_is_named_to_waiting_workers() -> None:
    over = threading.Event()

    def loop(optimizer: tr.DistributedOptimizer, cluster: Cluster) -> None:
        for batch in tr.prefetch(Delayed((9, 0), 0, 0), optimizer.model, cluster=cluster):
            nn.functional.mse_loss(optimizer.model(batch), batch["label"]).backward()
            optimizer.step()

    def train(cluster: Cluster) -> str:
        model = Model()
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model,
            strategy=tr.Strategy("bounded", staleness=2),
            cluster=cluster,
        )
        optimizer.begin_pass()
        if cluster.worker == 1:
            assert over.wait(60)
            optimizer.finish()
            return ""
        try:
            with pytest.raises(DeadlineExceeded) as raised:
                loop(optimizer, cluster)
        finally:
            over.set()
        assert optimizer.num_steps == 2
        optimizer.finish()
        return str(raised.value)

    with Job(1) as job:
        message = job.run(2, train, timeout_s=3.0)[0]
    assert "step 3 of stream 0 may be 2 ahead, it waits for streams 1 (at step 0)" in message
