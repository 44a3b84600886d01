"""Every push is applied exactly once, whatever is lost, repeated, reordered or re-planned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

import trireme as tr
from tests.jobs import Job, work_alone
from tests.tables import T_ROWS, clear, restore
from trireme import _core
from trireme.errors import Fenced, NotReady
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.optim import values_of_group
from trireme.protocol.routing import BucketMap
from trireme.rpc import Call, Reply
from trireme.worker.gradients import PushHeader, TableGradient
from trireme.worker.passes import PassNote, begin_pass, leave
from trireme.worker.pull import FollowingPull
from trireme.worker.transport import Transport

TABLE = tr.Table("t", dim=2, optimizer=tr.optim.Count(), initializer=tr.initializer.Constant(0.0))
NUM_KEYS = 500
VALUES = values_of_group(TABLE.optimizer.group(), 1)


def some_keys(cluster: Cluster, seed: int) -> np.ndarray:
    keys = np.random.default_rng(seed).choice(NUM_KEYS, 50, replace=False).astype(np.uint64)
    return _core.unique(keys, cluster.pool)[0]


def all_keys(cluster: Cluster) -> np.ndarray:
    return _core.unique(np.arange(NUM_KEYS, dtype=np.uint64), cluster.pool)[0]


def push(
    cluster: Cluster,
    sequence: int,
    keys: np.ndarray,
    *,
    step: int = 0,
    following: FollowingPull | None = None,
) -> None:
    gradient = TableGradient(keys, torch.zeros(len(keys), 2), VALUES)
    header = PushHeader(sequence, step, [], examples=1)
    cluster.client.push(header, {T_ROWS: gradient}, staged=step > 0, following=following)


def counts(cluster: Cluster) -> dict[int, float]:
    keys = all_keys(cluster)
    rows = cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()
    assert np.array_equal(rows[:, 0], rows[:, 1])
    return dict(zip(keys.tolist(), rows[:, 0].tolist(), strict=True))


def expected(pushed: list[np.ndarray]) -> dict[int, float]:
    wanted = dict.fromkeys(range(NUM_KEYS), 0.0)
    for keys in pushed:
        for key in keys.tolist():
            wanted[key] += 1
    return wanted


@pytest.mark.parametrize("num_servers", [0, 1, 3])
def test_repeated_pushes_count_once(num_servers: int) -> None:
    def work(cluster: Cluster) -> None:
        cluster.client.create_table(TABLE.schema)
        pushed = []
        for sequence in range(1, 21):
            keys = some_keys(cluster, sequence)
            pushed.append(keys)
            for _ in range(1 + sequence % 3):
                push(cluster, sequence, keys)
            if sequence > 3:
                push(cluster, sequence - 2, pushed[sequence - 3])
        assert counts(cluster) == expected(pushed)

    work_alone(num_servers, work)


@pytest.mark.parametrize("num_servers", [0, 1, 3])
def test_a_pull_that_follows_a_push_has_it(num_servers: int) -> None:
    def work(cluster: Cluster) -> None:
        cluster.client.create_table(TABLE.schema)
        keys, pushed = all_keys(cluster), []
        for sequence in range(1, 21):
            pushed.append(some_keys(cluster, sequence))
            following = FollowingPull({T_ROWS: keys}, blocks=False, time=0)
            for _ in range(1 + sequence % 2):
                push(cluster, sequence, pushed[-1], following=following)
            assert following.pulled is not None
            rows = following.pulled.rows[T_ROWS][:, 0].tolist()
            assert dict(zip(keys.tolist(), rows, strict=True)) == expected(pushed)
            assert following.pulled.push_counts == [sequence] * max(1, num_servers)

    work_alone(num_servers, work)


@pytest.mark.parametrize("what", ["comes first", "is refused"])
def test_a_push_counts_whatever_happens_to_the_pull_that_follows_it(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Reordering:
        """A way to the servers by which pulls arrive before the push."""

        def __init__(self, way: Transport) -> None:
            self.way = way
            self.num_calls = 0

        def call_all(self, calls: Sequence[Call], *, timeout_s: float) -> list[Reply]:
            self.num_calls += 1
            return self.way.call_all(calls[::-1], timeout_s=timeout_s)[::-1]

        def close(self) -> None:
            self.way.close()

    with Job(2) as job, job.join(0, 1) as cluster:
        cluster.client.create_table(TABLE.schema)
        pushes = cluster.client.servers.pushes
        class_id = T_ROWS if what == "comes first" else T_ROWS._replace(table="unknown")
        way = Reordering(pushes.transport)
        if what == "comes first":
            pushes.transport = way
        pushed = []
        for sequence in (1, 2, 3):
            pushed.append(some_keys(cluster, sequence))
            following = FollowingPull({class_id: pushed[0]}, blocks=False, time=0)
            with caplog.at_level("DEBUG", "trireme.worker"):
                push(cluster, sequence, pushed[-1], following=following)
            assert following.pulled is None
            assert counts(cluster) == expected(pushed)
        if what == "comes first":
            assert way.num_calls == 3
            reason = "NOT_READY: pull: expected push 3 of stream 0 to be applied, found 2"
        else:
            reason = "UNKNOWN_TABLE: "
        assert f"a pull behind push 3 is made later: {reason}" in caplog.messages[-1]


def test_a_gap_in_a_stream_is_refused_and_nothing_is_applied() -> None:
    with embedded(threads=1, timeout_s=0.3) as cluster:
        cluster.client.create_table(TABLE.schema)
        push(cluster, 1, some_keys(cluster, 1))
        before = counts(cluster)
        with pytest.raises(tr.errors.DeadlineExceeded, match="expected sequence 2 next, found 3"):
            push(cluster, 3, some_keys(cluster, 3))
        assert counts(cluster) == before


def test_a_successor_replays_the_last_batch_and_fences_its_predecessor() -> None:
    with Job(2) as job:
        first = job.join(0, 1)
        first.client.create_table(TABLE.schema)
        pushed = [some_keys(first, sequence) for sequence in (1, 2, 3)]
        for sequence, keys in enumerate(pushed, 1):
            push(first, sequence, keys)
        # The predecessor died between two servers: the last push reached only one of them.
        last = some_keys(first, 4)
        pushed.append(last)
        reached, missed = job.servers[0].state, job.servers[1].state
        push_to_one(first, 4, last, server=0)
        assert (reached.streams[0].last, missed.streams[0].last) == (4, 3)

        with job.join(0, 1) as successor:
            at = successor.client.stream_position()
            assert at.sequence == 3
            push(successor, at.sequence + 1, last)
            assert counts(successor) == expected(pushed)
            with pytest.raises(Fenced, match="incarnation 2 has taken over"):
                push(first, 5, last)
            assert counts(successor) == expected(pushed)
        first.abandon()


def push_to_one(cluster: Cluster, sequence: int, keys: np.ndarray, *, server: int) -> None:
    """A push that reaches one server only."""
    real = cluster.client.servers.pushes.transport
    endpoint = cluster.client.servers.map.servers[server]

    class OnlyOne:
        def call_all(self, calls, *, timeout_s):
            mine = [call for call in calls if call.endpoint == endpoint]
            return real.call_all(mine, timeout_s=timeout_s) * len(calls)

        def close(self) -> None:
            real.close()

    cluster.client.servers.pushes.transport = OnlyOne()
    push(cluster, sequence, keys)
    cluster.client.servers.pushes.transport = real


def move_buckets(job: Job, buckets: np.ndarray, source: int, target: int) -> None:
    """What a coordinator does to move buckets, step by step: rows and marks, then the map."""
    servers = job.servers
    old = servers[0].coordinator.facts.bucket_map
    owners = old.buckets.copy()
    owners[buckets] = target
    moved = BucketMap(old.version + 1, old.servers, owners, old.blocks)
    for bucket in buckets.tolist():
        content = servers[source].state.tables["t"].rows.snapshot(bucket)
        restore(servers[target].state.tables["t"].rows, bucket, content)
        clear(servers[source].state.tables["t"].rows, bucket)
    servers[0].coordinator.facts.bucket_map = moved
    for index, server in enumerate(servers):
        server.state.assignment.adopt(server.state.assignment.job, moved, index)


def test_a_push_planned_with_an_old_map_is_resent_and_counts_once() -> None:
    with Job(2) as job, job.join(0, 1) as cluster:
        cluster.client.create_table(TABLE.schema)
        generator = np.random.default_rng(5)
        pushed = []
        for sequence in range(1, 31):
            keys = some_keys(cluster, sequence)
            pushed.append(keys)
            if sequence % 3 == 0:
                # One server has applied the push before the map changed under it.
                push_to_one(cluster, sequence, keys, server=0)
                source = sequence % 2
                owned = cluster.client.servers.map.owned_by(source)
                move_buckets(job, generator.choice(owned, 700, replace=False), source, 1 - source)
            push(cluster, sequence, keys)
        assert counts(cluster) == expected(pushed)
        assert cluster.client.servers.map.version == 11


def test_sync_steps_staged_again_by_a_successor_count_once() -> None:
    with Job(2) as job:
        first = job.join(0, 1)
        first.client.create_table(TABLE.schema)
        first_step = begin_pass(first.client, PassNote()).first_step
        keys = [some_keys(first, sequence) for sequence in (1, 2)]
        push(first, 1, keys[0], step=first_step)
        first.client.pull({}, staged=first_step)
        push_to_one(first, 2, keys[1], server=0)  # died while staging step 2

        with job.join(0, 1) as successor:
            assert begin_pass(successor.client, PassNote()).first_step == first_step
            at = successor.client.stream_position()
            assert at.sequence == 1
            push(successor, 2, keys[1], step=first_step + 1)
            successor.client.pull({}, staged=first_step + 1)
            assert counts(successor) == expected(keys)
            leave(successor.client, first_step + 2)
        first.abandon()


def test_not_ready_says_what_is_missing() -> None:
    with Job(1) as job, job.join(0, 2, timeout_s=3.0) as cluster:
        del job
        with pytest.raises(
            (NotReady, tr.errors.DeadlineExceeded), match=r"waits for workers \[1\]"
        ):
            cluster.client.coordinator.gather({}, [])
