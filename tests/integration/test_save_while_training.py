"""Checkpoints while four workers push at full speed: all rows belong to one moment, buckets agree
with their marks, and a resumed run loses and repeats nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import trireme as tr
from tests.jobs import InProcessServer, Job, in_threads
from tests.long import pick
from tests.seeds import SEED
from tests.tables import T_ROWS
from trireme import _core
from trireme.checkpoint.worker_side.load import load_checkpoint
from trireme.checkpoint.worker_side.save import save_checkpoint
from trireme.job.cluster import Cluster
from trireme.optim import rule_values, values_of_group
from trireme.rows.wide_rows import RowLayout
from trireme.worker.gradients import PushHeader, TableGradient

NUM_WORKERS, NUM_KEYS, BATCH, DIM = 4, 1500, 150, 3
NUM_SAVES = pick(short=8, long=200)
RULE = tr.optim.Adagrad(lr=0.5)
TABLE = tr.Table("t", dim=DIM, optimizer=RULE, initializer=tr.initializer.Constant(0.0))
# A row's accumulators count its updates, because every gradient is 1.


def keys_of(stream: int, sequence: int) -> np.ndarray:
    rng = np.random.default_rng([SEED, stream, sequence])
    return rng.choice(NUM_KEYS, BATCH, replace=False).astype(np.uint64)


def push(cluster: Cluster, sequence: int) -> None:
    keys = _core.unique(keys_of(cluster.worker, sequence), cluster.pool)[0]
    values = values_of_group(RULE.group(), sequence)
    gradient = TableGradient(keys, torch.ones(len(keys), DIM), values)
    position = (sequence, 10 * sequence)
    cluster.client.push(PushHeader(sequence, 0, [], BATCH, position), {T_ROWS: gradient})


class Bucket(NamedTuple):
    keys: np.ndarray
    weights: np.ndarray
    state: np.ndarray
    marks: dict[int, int]


def buckets(server: InProcessServer) -> list[Bucket]:
    """All that a server holds."""
    table, actual = server.state.tables["t"], []
    layout = RowLayout.of(table.schema, table.rows)
    for number in server.state.assignment.owned_buckets().tolist():
        content = table.rows.snapshot(number)
        marks = dict(content.marks)
        actual.append(
            Bucket(content.keys, layout.weights(content.rows), layout.state(content.rows), marks)
        )
    return actual


class Expected:
    """What rows are after so many updates, and how many they have had where a stream stands."""

    def __init__(self, lasts: list[int]) -> None:
        key = np.zeros(1, np.uint64)
        with Job(1) as job, job.join(0, 1) as cluster:
            cluster.client.create_table(TABLE.schema)
            rows, pool = job.servers[0].state.tables["t"].rows, cluster.pool
            one, weights = np.ones((1, DIM), np.float32), np.zeros((1, DIM), np.float32)
            after = [weights.copy()]
            for number in range(1, 1 + sum(lasts)):
                values = rule_values(values_of_group(RULE.group(), number))
                rows.update(key, one, [(0, number)], values, pool)
                rows.lookup(key, weights, pool)
                after.append(weights.copy())
        self.weights_after = np.concatenate(after)
        self.counts = [np.zeros((last + 1, NUM_KEYS), np.int64) for last in lasts]
        for stream, counts in enumerate(self.counts):
            for sequence in range(1, len(counts)):
                counts[sequence, keys_of(stream, sequence).astype(np.int64)] = 1
            counts.cumsum(axis=0, out=counts)

    def check(self, bucket: Bucket, owned: np.ndarray) -> None:
        """owned: all keys of the bucket that are ever pushed."""
        wanted = sum(
            self.counts[stream][bucket.marks.get(stream, 0), owned] for stream in range(NUM_WORKERS)
        )
        assert dict(zip(bucket.keys.tolist(), bucket.state[:, 0].tolist(), strict=True)) == {
            key: count for key, count in zip(owned.tolist(), wanted.tolist(), strict=True) if count
        }
        assert np.array_equal(bucket.state, bucket.state[:, :1].repeat(DIM, 1))
        updates = bucket.state[:, 0].astype(np.int64)
        assert np.array_equal(bucket.weights, self.weights_after[updates])


def owned_keys() -> list[np.ndarray]:
    """Per bucket, those that are pushed."""
    keys = np.arange(NUM_KEYS, dtype=np.uint64)
    owners = np.empty(NUM_KEYS, np.uint16)
    _core.buckets(keys, owners)
    return [np.flatnonzero(owners == bucket) for bucket in range(4096)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[int], Expected]:
    """Checkpoints taken under way on two servers, how many batches each worker pushed, and what
    comes of them.
    """
    folder, done = tmp_path_factory.mktemp("saved"), threading.Event()

    def train(cluster: Cluster) -> int:
        cluster.client.create_table(TABLE.schema)
        sequence = 0
        while not done.is_set():
            sequence += 1
            push(cluster, sequence)
        return sequence

    def save(cluster: Cluster) -> int:
        try:
            for number in range(NUM_SAVES):
                save_checkpoint(cluster.client, folder / str(number), extra={}, tensors={})
        finally:
            done.set()
        return 0

    print(f"seed {SEED}")
    with Job(2) as job:
        clusters = [job.join(worker, NUM_WORKERS) for worker in range(NUM_WORKERS)]
        clusters[0].client.create_table(TABLE.schema)
        work: list[Callable[[], int]] = [lambda worker=worker: train(worker) for worker in clusters]
        lasts = in_threads([*work, lambda: save(clusters[0])])[:NUM_WORKERS]
        for cluster in clusters:
            cluster.close()
    return [folder / str(number) for number in range(NUM_SAVES)], lasts, Expected(lasts)


def test_no_checkpoint_is_torn(saved: tuple[list[Path], list[int], Expected]) -> None:
    paths, _, expected = saved
    owned = owned_keys()
    num_unequal = 0
    with Job(1) as job, job.join(0, 1) as cluster:
        cluster.client.create_table(TABLE.schema)
        for path in paths:
            load_checkpoint(cluster.client, path)
            actual = buckets(job.servers[0])
            for bucket, keys in zip(actual, owned, strict=True):
                expected.check(bucket, keys)
            num_unequal += len({tuple(sorted(bucket.marks.items())) for bucket in actual}) > 1
    print(f"{len(paths)} checkpoints, {num_unequal} of them with buckets of several moments")
    assert num_unequal, "nothing was pushed while saving: this shows nothing"


def test_a_run_resumes_from_each_checkpoint_without_loss_or_repetition(
    saved: tuple[list[Path], list[int], Expected],
) -> None:
    paths, lasts, expected = saved
    owned = owned_keys()
    for path in paths[:: len(paths) // 2]:
        with Job(3) as job:

            def go_on(cluster: Cluster, path: Path = path) -> None:
                cluster.client.create_table(TABLE.schema)
                cluster.client.coordinator.gather({}, [])
                if cluster.worker == 0:
                    load_checkpoint(cluster.client, path)
                cluster.client.coordinator.gather({}, [])
                at = cluster.client.stream_position()
                assert at.position == (at.sequence, 10 * at.sequence) or at.sequence == 0
                for sequence in range(at.sequence + 1, lasts[cluster.worker] + 1):
                    push(cluster, sequence)

            job.run(NUM_WORKERS, go_on)
            for server in job.servers:
                numbers = server.state.assignment.owned_buckets().tolist()
                for number, bucket in zip(numbers, buckets(server), strict=True):
                    assert bucket.marks == dict(enumerate(lasts))
                    expected.check(bucket, owned[number])
