"""Servers are killed and restarted under geo and bounded: every update counts once, and no stream
exceeds its bound or waits forever.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.integration.test_server_restart import killing
from tests.jobs import in_threads
from tests.long import pick
from tests.programs import Template
from tests.seeds import SEED
from tests.tables import T_ROWS
from trireme import _core
from trireme.job.cluster import Cluster

NUM_KEYS, DIM = 300, 2
NUM_BATCHES = pick(short=60, long=1000)
STRATEGIES = {
    "geo": tr.Strategy("geo", k=3, cache_bytes=1 << 15),  # rows leave it, too
    "bounded": tr.Strategy("bounded", staleness=2),
}


class Model(nn.Module):
    """The gradient of a row is the number of its occurrences, that of `top` the number of keys: so
    weights count both, in whatever order updates come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = tr.Table(
            "t",
            dim=DIM,
            optimizer=tr.optim.SGD(lr=1.0),
            initializer=tr.initializer.Constant(0.0),
        )
        self.rows = tr.nn.EmbeddingBag(self.table, features=["a"])
        self.top = nn.Parameter(torch.zeros(2))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.rows(batch).sum((1, 2)) + self.top.sum()


class Endless:
    """Batches of random keys, at least so many and until `is_done`; `counts` has those given."""

    def __init__(self, worker: int, is_done: threading.Event) -> None:
        self._random = np.random.default_rng([SEED, worker])
        self._is_done = is_done
        self.num_batches, self.counts = 0, np.zeros(NUM_KEYS)

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[Any]:
        del index, num_streams, epoch
        while self.num_batches < NUM_BATCHES or not self._is_done.is_set():
            keys = self._random.integers(0, NUM_KEYS, 20)
            self.num_batches += 1
            self.counts += np.bincount(keys, minlength=NUM_KEYS)
            yield {"a": torch.from_numpy(keys)}


def train(cluster: Cluster, data: Endless, strategy: tr.Strategy) -> np.ndarray:
    """Returns `top`."""
    model = Model()
    optimizer = tr.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model, strategy=strategy, cluster=cluster
    )
    for batch in tr.prefetch(data, model, cluster=cluster):
        model(batch).sum().backward()
        optimizer.step()
    cluster.client.coordinator.gather({}, [])
    optimizer.refresh()
    return model.top.detach().numpy().copy()


def histogram(cluster: Cluster, name: str) -> Counter[int]:
    total: Counter[int] = Counter()
    for server in cluster.client.stats():
        total.update({int(steps): count for steps, count in server[name].items()})
    return total


@pytest.mark.parametrize("mode", STRATEGIES)
def test_every_update_counts_once_whenever_servers_are_killed(
    programs: Template, tmp_path: Path, mode: str
) -> None:
    print(f"seed {SEED}")
    strategy = STRATEGIES[mode]
    with DurableServers(programs, 2, tmp_path) as servers:
        clusters = in_threads([lambda w=w: servers.join(w, 2) for w in (0, 1)])
        with killing(servers, Random(f"{SEED} {mode}")) as is_done:
            data = [Endless(worker, is_done) for worker in (0, 1)]
            tops = in_threads(
                [
                    lambda c=c, d=d: train(c, d, strategy)
                    for c, d in zip(clusters, data, strict=True)
                ]
            )
        counts = data[0].counts + data[1].counts
        keys = _core.unique(np.arange(NUM_KEYS, dtype=np.uint64), clusters[0].pool)[0]
        rows = clusters[0].client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()
        assert np.array_equal(rows[:, 1], -counts[keys.astype(np.int64)])
        for top in tops:
            assert np.array_equal(top, np.full(2, -counts.sum()))
        if mode == "bounded":
            num_pushes = data[0].num_batches + data[1].num_batches
            ahead = histogram(clusters[0], "ahead")
            assert max(ahead) <= strategy.staleness
            assert ahead.total() == histogram(clusters[0], "staleness").total() == 2 * num_pushes
        in_threads([cluster.close for cluster in clusters])


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_a_pull_that_waited_is_answered_after_a_restart(
    programs: Template, tmp_path: Path, has_snapshot: bool
) -> None:
    """Both of its servers are killed while stream 0 waits for stream 1."""
    log_bytes = 1 if has_snapshot else 1 << 40
    with DurableServers(programs, 2, tmp_path, log_bytes=log_bytes) as servers:
        clusters = in_threads([lambda w=w: servers.join(w, 2) for w in (0, 1)])
        may_go = threading.Event()

        class Waits(Endless):
            def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[Any]:
                for batch in super().stream(index, num_streams, epoch=epoch):
                    assert may_go.wait(60)
                    yield batch

        data = [Endless(0, may_go), Waits(1, may_go)]

        def kill() -> None:
            while clusters[0].client.stream_position().sequence < 2:
                pass
            for server in (0, 1):
                servers.kill(server)
            for server in (0, 1):
                servers.start(server)
            may_go.set()

        bounded = STRATEGIES["bounded"]
        runs = [lambda c=c, d=d: train(c, d, bounded) for c, d in zip(clusters, data, strict=True)]
        in_threads([*runs, kill])
        num_pushes = data[0].num_batches + data[1].num_batches
        assert histogram(clusters[0], "ahead").total() == 2 * num_pushes
        assert max(histogram(clusters[0], "ahead")) == bounded.staleness
        in_threads([cluster.close for cluster in clusters])
