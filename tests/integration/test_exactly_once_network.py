"""Every push is applied exactly once over a network that loses, repeats, delays and reorders
messages and cuts connections.

The rows count: `tr.optim.Count` adds 1 per update. So does the dense parameter: its gradient is
always 1 and SGD's rate is 1. All numbers are small integers, exact in float32.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job, in_threads
from tests.long import sampled
from tests.proxy import Faults, Proxy
from tests.tables import T_ROWS
from trireme import _core
from trireme.job.cluster import Cluster
from trireme.job.connecting import connect

NUM_SERVERS = 2
NUM_PASSES = 2
NUM_STEPS = 60  # in a pass
NUM_KEYS = 300
FEATURES = ["a", "b"]
STEPS_BETWEEN_CUTS = 10
TIMEOUT_S = 60.0


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = tr.Table(
            "t", dim=2, optimizer=tr.optim.Count(), initializer=tr.initializer.Constant(0.0)
        )
        self.rows = tr.nn.EmbeddingBag(table, features=FEATURES)
        self.pushes = nn.Parameter(torch.zeros(1))

    def forward(self, batch: tr.data.Batch) -> torch.Tensor:
        return self.rows(batch).sum() - self.pushes.sum()


class Network:
    """A bad connection to each server of a job."""

    def __init__(self, job: Job, seed: int, exit_stack: ExitStack) -> None:
        self.proxies = [
            exit_stack.enter_context(Proxy(endpoint, faults(seed + index)))
            for index, endpoint in enumerate(job.endpoints)
        ]
        self._lock = threading.Lock()
        self._random = np.random.default_rng(seed)

    def cut_one(self) -> None:
        with self._lock:
            proxy = self._random.choice(self.proxies)
        proxy.cut()

    def counts(self) -> Counter[str]:
        return sum((proxy.counts for proxy in self.proxies), Counter())

    def calm(self) -> None:
        for proxy in self.proxies:
            proxy.is_calm = True

    def join(self, worker: int, num_workers: int) -> Cluster:
        return connect(
            [proxy.endpoint for proxy in self.proxies],
            worker=worker,
            num_workers=num_workers,
            threads=1,
            timeout_s=TIMEOUT_S,
        )


def faults(seed: int) -> Faults:
    return Faults(
        seed=seed, lose_request=0.02, lose_reply=0.04, duplicate=0.15, replay=0.15, delay=0.15
    )


def batches(seed: int, worker: int) -> list[dict[str, torch.Tensor]]:
    """Of unequal numbers, so that in sync one worker leaves the pass before the other."""
    generator = np.random.default_rng([seed, worker])
    return [
        {name: torch.from_numpy(generator.integers(0, NUM_KEYS, 20)) for name in FEATURES}
        for _ in range(NUM_STEPS - 7 * worker)
    ]


class Stream:
    """One worker's batches; cuts a connection now and then, while it is in use."""

    def __init__(self, seed: int, network: Network) -> None:
        self._seed, self._network = seed, network

    def stream(self, index: int, num_streams: int, *, epoch: int) -> Iterator[dict]:
        del num_streams, epoch
        for number, batch in enumerate(batches(self._seed, index)):
            if number % STEPS_BETWEEN_CUTS == STEPS_BETWEEN_CUTS - 1:
                self._network.cut_one()
            yield batch


def train(cluster: Cluster, mode: str, stream: Stream) -> nn.Parameter:
    model = Counting()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = tr.DistributedOptimizer(sgd, model, strategy=tr.Strategy(mode), cluster=cluster)
    for _ in range(NUM_PASSES):
        for batch in tr.prefetch(stream, model, cluster=cluster):
            model(batch).backward()
            optimizer.step()
    cluster.client.coordinator.gather({}, [], purpose="the end of all streams")
    optimizer.refresh()
    return model.pushes


def counted(cluster: Cluster) -> dict[int, float]:
    keys = _core.unique(np.arange(NUM_KEYS, dtype=np.uint64), cluster.pool)[0]
    rows = cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()
    assert np.array_equal(rows[:, 0], rows[:, 1])
    return dict(zip(keys.tolist(), rows[:, 0].tolist(), strict=True))


def expected(seed: int, mode: str, num_workers: int) -> tuple[dict[int, float], int]:
    """Updates of each key, and of the dense parameter.

    In async every push updates its keys; in sync every step updates those of all workers, once.
    """
    keys_of_updates: list[set[int]] = []
    streams = [batches(seed, worker) for worker in range(num_workers)]
    for step in range(NUM_STEPS):
        pushed = [
            set(torch.cat(list(stream[step].values())).tolist())
            for stream in streams
            if step < len(stream)
        ]
        keys_of_updates += pushed if mode == "async" else [set.union(*pushed)]
    counts = Counter(key for keys in keys_of_updates for key in keys)
    by_key = {key: float(NUM_PASSES * counts[key]) for key in range(NUM_KEYS)}
    return by_key, NUM_PASSES * len(keys_of_updates)


@sampled(keep=3)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_every_count_is_right_over_a_bad_network(mode: str, num_workers: int, seed: int) -> None:
    print(f"seed {seed}")  # of the faults; with several connections timing plays a part as well
    with ExitStack() as exit_stack:
        job = exit_stack.enter_context(Job(NUM_SERVERS))
        network = Network(job, 1000 * seed, exit_stack)

        def work(worker: int) -> tuple[float, dict[int, float]]:
            with network.join(worker, num_workers) as cluster:
                pushes = train(cluster, mode, Stream(seed, network))
                return pushes.item(), counted(cluster)

        works: list[Callable[[], tuple[float, dict[int, float]]]] = [
            lambda worker=worker: work(worker) for worker in range(num_workers)
        ]
        results = in_threads(works)
        network.calm()
        suffered = network.counts()
    print(suffered)
    for fault in ("lose_request", "lose_reply", "duplicate", "replay", "delay"):
        assert suffered[fault] > 0
    keys, updates = expected(seed, mode, num_workers)
    for pushes, counts in results:
        assert counts == keys
        assert pushes == updates
