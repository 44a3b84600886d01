"""Limits in a server's configuration: how they are written, and the errors that name them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import InProcessServer
from tests.tables import T_ROWS
from trireme.errors import BadRequest, ResourceExhausted
from trireme.job.cluster import Cluster
from trireme.job.connecting import connect
from trireme.job.default import set_default
from trireme.rpc import Limits
from trireme.server.server_limits import CapacityLimits, ServerLimits, parse_limits


@contextmanager
def limited(text: str) -> Iterator[Cluster]:
    """A worker of a server with these limits, which afterwards still serves."""
    server = InProcessServer(limits=parse_limits(text))
    with server.rpc, connect([server.endpoint], worker=0, num_workers=1, timeout_s=30) as cluster:
        set_default(cluster)  # modules find it
        yield cluster
        cluster.client.servers.everywhere("ps.stats", {})


def test_limits_are_read_from_one_text() -> None:
    assert parse_limits("") == ServerLimits(CapacityLimits(), Limits())
    actual = parse_limits(
        " tables_max=8, table_bytes_max=1.5GiB,message_bytes_max=64 MiB,handshake_timeout_s=2.5"
    )
    assert actual.capacity == CapacityLimits(tables_max=8, table_bytes_max=3 << 29)
    assert actual.messages == Limits(message_bytes_max=64 << 20, handshake_timeout_s=2.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("table_max=3", "did you mean tables_max?"),
        ("qqq=3", "known are tables_max"),
        ("tables_max", "expected tables_max as a number"),
        ("tables_max=many", "such as 64 or 2GiB, found 'many'"),
        ("tables_max=1.5", "expected tables_max as a number"),
        ("tables_max=-1", "expected tables_max as a number"),
        ("tables_max=0", "tables_max must be positive, found 0"),
        ("requests_max=0", "requests_max must be positive, found 0"),
        ("tables_max=1,tables_max=2", "expected tables_max once"),
        ("message_bytes_max=1KiB", "header_bytes_max must be at most message_bytes_max"),
        ("message_bytes_max=99,header_bytes_max=99", "header_bytes_max must be at least 1024"),
        ("connections_max=4", "connections_max must be at least 5, found 4: a worker that saves"),
    ],
)
def test_wrong_limits_are_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_limits(text)
    assert words in str(error.value)


def test_one_table_too_many_is_refused() -> None:
    with limited("tables_max=2") as cluster:
        for name in ("a", "b", "a"):
            cluster.client.create_table(tr.Table(name, dim=2).schema)
        with pytest.raises(ResourceExhausted, match=r"tables_max is 2, found 3; --limits or"):
            cluster.client.create_table(tr.Table("c", dim=2).schema)


def test_a_sketch_beyond_the_limit_is_refused() -> None:
    def counted(sketch_bytes: int) -> tr.Table:
        admit = tr.policy.CountFilter(3, sketch_bytes=sketch_bytes)
        return tr.Table("t", dim=2, admit=admit)

    with limited("sketch_bytes_max=1MiB") as cluster:
        with pytest.raises(ResourceExhausted, match="sketch_bytes_max is 1048576"):
            cluster.client.create_table(counted(1 << 30).schema)
        cluster.client.create_table(counted(1 << 20).schema)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = tr.nn.EmbeddingBag(tr.Table("t", dim=64), features=["a"])
        self.out = nn.Linear(64, 1)

    def forward(self, batch: tr.data.Batch) -> torch.Tensor:
        return self.out(self.rows(batch).flatten(1)).squeeze(1)


def steps(cluster: Cluster, num: int) -> int:
    """Steps on new keys each; returns how many were applied before one was refused."""
    model = Model()
    adam = torch.optim.Adam(model.parameters())
    optimizer = tr.DistributedOptimizer(adam, model, strategy=tr.Strategy("async"), cluster=cluster)
    for number in range(num):
        keys = torch.arange(1000) + 1000 * number
        loss = model({"a": keys}).square().mean()
        loss.backward()
        optimizer.step()
    return num


def test_rows_stop_growing_at_their_limit_and_are_still_served() -> None:
    with limited("table_bytes_max=16MiB") as cluster:
        with pytest.raises(ResourceExhausted, match=r"table_bytes_max is 16777216, found \d+"):
            steps(cluster, 200)
        [reply] = cluster.client.servers.everywhere("ps.stats", {})
        held = reply.body["tables"]["t"]
        assert 0 < held["rows"] < 200_000
        assert held["bytes"] < 32 << 20
        pulled = cluster.client.pull({T_ROWS: np.arange(5, dtype=np.uint64)})
        assert pulled.rows[T_ROWS].shape == (5, 64)


@pytest.mark.parametrize("limit", ["blocks_max=1", "block_bytes_max=200"])
def test_dense_blocks_beyond_the_limit_are_refused(limit: str) -> None:
    name = limit.partition("=")[0]
    with limited(limit) as cluster, pytest.raises(ResourceExhausted, match=f"{name} is"):
        steps(cluster, 1)


def test_an_import_stops_at_the_limit() -> None:
    rows = {
        "key": np.arange(200_000, dtype=np.uint64),
        "weights": np.ones((200_000, 64), np.float32),
    }
    with limited("table_bytes_max=16MiB") as cluster:
        cluster.client.create_table(tr.Table("t", dim=64).schema)
        model = Model()
        trainer = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters()),
            strategy=tr.Strategy("async"),
            loss=nn.functional.binary_cross_entropy_with_logits,
            progress=False,
            cluster=cluster,
        )
        with pytest.raises(ResourceExhausted, match="table_bytes_max is 16777216"):
            tr.interchange.import_arrays(trainer, "t", rows)
        [reply] = cluster.client.servers.everywhere("ps.stats", {})
        assert reply.body["tables"]["t"]["rows"] == 0


def test_a_call_beyond_the_servers_limit_is_refused_by_name() -> None:
    limits = "message_bytes_max=64KiB,header_bytes_max=16KiB,total_bytes_max=128KiB"
    with limited(limits) as cluster:
        cluster.client.create_table(tr.Table("t", dim=2).schema)
        with pytest.raises(ResourceExhausted, match="the server's total_bytes_max is 131072"):
            cluster.client.pull({T_ROWS: np.arange(20_000, dtype=np.uint64)})
        assert (
            len(cluster.client.pull({T_ROWS: np.arange(9, dtype=np.uint64)}).rows[T_ROWS].numpy())
            == 9
        )
