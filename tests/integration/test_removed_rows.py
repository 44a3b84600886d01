"""Rows that a script removes by the values of a feature, or by their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job
from trireme.errors import BadRequest
from trireme.inference import Predictor
from trireme.inference.export import export_model
from trireme.interchange import import_arrays, import_parquet, remove_rows
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.protocol.routing import Keys
from trireme.server.row_tier import RowTier
from trireme.worker import expiry_calls

USERS = [f"user {i}" for i in range(40)]
ITEMS = list(range(30))


class Model(nn.Module):
    """One table of two features, and one whose items wait for their second occurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = tr.Table("ids", dim=2, salt=True, optimizer=tr.optim.Adagrad(lr=0.1))
        self.waiting = tr.Table("waiting", dim=2, admit=tr.policy.CountFilter(2))
        self.rows = tr.nn.EmbeddingBag(self.ids, features=["user", "item"])
        self.seen = tr.nn.EmbeddingBag(self.waiting, features=["seen"])

    def forward(self, batch: Any) -> torch.Tensor:
        return self.rows(batch).sum((1, 2)) + self.seen(batch).sum((1, 2))


def trainer_for(cluster: Cluster, mode: str = "async") -> tr.Trainer:
    loss = nn.functional.binary_cross_entropy_with_logits
    strategy = tr.Strategy(mode, **({"k": 2} if mode == "geo" else {}))
    return tr.Trainer(Model(), None, loss=loss, strategy=strategy, progress=False, cluster=cluster)


def batch_of(users: list[str], seen: int = 1) -> dict[str, Any]:
    items = [ITEMS[i % len(ITEMS)] for i in range(len(users))]
    labels = torch.ones(len(users))
    return {"user": users, "item": items, "seen": [seen] * len(users), "label": labels}


def rows_of(trainer: tr.Trainer, table: str = "ids") -> int:
    [declared] = [one for one in trainer.optimizer.tables if one.name == table]
    return len(tr.TableView(declared, cluster=trainer.cluster))


@pytest.mark.parametrize("mode", ["async", "sync", "geo"])
def test_every_server_removes_its_rows_once_for_all_workers(mode: str) -> None:
    def run(cluster: Cluster) -> tuple[int, int, int]:
        trainer = trainer_for(cluster, mode)
        trainer.fit([batch_of(USERS)])
        trainer.evaluate([batch_of(USERS)])  # behind the pushes of all workers
        before = rows_of(trainer)
        removed = remove_rows(trainer, "ids", [*USERS[:3], "nobody"], feature="user")
        return before, removed, rows_of(trainer)

    with Job(2) as job:
        assert job.run(2, run) == 2 * [(len(USERS) + len(ITEMS), 3, len(USERS) + len(ITEMS) - 3)]


def test_workers_that_name_different_values_or_rows_or_paths_are_refused(tmp_path: Path) -> None:
    def run(cluster: Cluster) -> tuple[int, int]:
        trainer = trainer_for(cluster, "sync")
        trainer.fit([batch_of(USERS)])
        before, number = rows_of(trainer), cluster.worker
        rows = {"key": [f"new {number}"], "weights": np.ones((1, 2), np.float32)}
        for call in (
            lambda: remove_rows(trainer, "ids", USERS[number], feature="user"),
            lambda: import_arrays(trainer, "ids", rows, feature="user"),
            lambda: import_parquet(trainer, "ids", tmp_path / f"{number}", feature="user"),
        ):
            with pytest.raises(BadRequest, match="expected the same arguments at all workers"):
                call()
        for path in ("0", "1"):
            trainer.save(tmp_path / path)
        with pytest.raises(BadRequest, match="load: expected one checkpoint for all workers"):
            trainer.load(tmp_path / f"{number}")
        return before, rows_of(trainer)

    with Job(2) as job:
        for before, after in job.run(2, run):
            assert before == after


def test_in_geo_a_row_that_is_made_again_begins_anew_as_in_sync() -> None:
    def run(cluster: Cluster, mode: str) -> torch.Tensor:
        trainer = trainer_for(cluster, mode)
        trainer.fit([batch_of(USERS[:4])], epochs=4)
        assert remove_rows(trainer, "ids", USERS[:1], feature="user") == 1
        trainer.fit([batch_of(USERS[:4])], epochs=4)
        return trainer.predict([batch_of(USERS[:4])])["output"]

    outputs = []
    for mode in ("sync", "geo"):
        with Job(1) as job:
            outputs += job.run(1, lambda cluster, mode=mode: run(cluster, mode))
    torch.testing.assert_close(*outputs)


def test_deltas_and_exports_tell_of_them(tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        trainer = trainer_for(cluster)
        trainer.fit([batch_of(USERS)])
        trainer.save(tmp_path / "full")
        example = batch_of(USERS[:4])
        export_model(trainer, tmp_path / "base", batch=example)
        assert remove_rows(trainer, "ids", USERS[1], feature="user") == 1
        table = trainer.optimizer.tables[0]
        assert remove_rows(trainer, table, np.array([2, 3]), feature="item") == 2
        assert remove_rows(trainer, "ids", USERS[1], feature="user") == 0
        num_left = rows_of(trainer)
        trainer.save(tmp_path / "delta", mode="delta")
        delta = export_model(trainer, tmp_path / "next", batch=example, follows=tmp_path / "base")
        assert delta.rows == 0
        predictor = Predictor(tmp_path / "base")
        missing = predictor.predict(example).num_missing
        predictor.apply(tmp_path / "next")
        assert predictor.predict(example).num_missing == missing + 3
        expected = trainer.predict([example])["output"]
        with pytest.raises(
            BadRequest, match="folders in it that have one: base, delta, full, next"
        ):
            trainer.load(tmp_path)
        trainer.load(tmp_path / "full")
        assert rows_of(trainer) == num_left + 3
        trainer.load(tmp_path / "delta")
        assert rows_of(trainer) == num_left
        torch.testing.assert_close(trainer.predict([example])["output"], expected)
        trainer.fit([batch_of(USERS[:2])])  # makes a row again
        assert rows_of(trainer) == num_left + 1


def test_counts_of_keys_without_a_row_go_too() -> None:
    with embedded(threads=2) as cluster:
        trainer = trainer_for(cluster)
        for remove, num_rows in ((False, 1), (True, 1), (False, 2)):
            trainer.fit([batch_of(USERS[:1], seen=5 + remove)])
            if remove:
                assert remove_rows(trainer, "waiting", 6, feature="seen") == 0
            trainer.fit([batch_of(USERS[:1], seen=5 + remove)])
            if remove:  # it has been seen once, not twice
                assert rows_of(trainer, "waiting") == 1
                trainer.fit([batch_of(USERS[:1], seen=6)])
                num_rows += 1
            assert rows_of(trainer, "waiting") == num_rows


def test_rows_on_ssd_and_more_keys_than_a_call_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry_calls, "REMOVED_KEYS", 5000)
    table = tr.Table("wide", dim=64, optimizer=tr.optim.SGD(lr=0.1))
    keys: Keys = np.arange(30_000, dtype=np.uint64)
    tier = RowTier(6 << 20, [tmp_path])
    with embedded(tier=tier) as cluster:
        model = tr.nn.EmbeddingBag(table, features=["key"])
        trainer = tr.Trainer(
            model, None, loss=lambda rows, batch: rows.sum(), label=None, progress=False,
            cluster=cluster,
        )  # fmt: skip
        trainer.fit([{"key": part} for part in np.array_split(keys.view(np.int64), 60)])
        [stats] = cluster.client.stats()
        assert stats["tables"]["wide"]["tier"]["rows"] > 10_000
        assert remove_rows(trainer, "wide", keys[10_000:]) == 20_000
        assert rows_of(trainer, "wide") == 10_000
        assert set(tr.TableView(table, cluster=cluster).top("time", 10_000).values) == set(
            range(10_000)
        )
    tier.close()


def test_what_is_no_key_is_refused_and_removes_nothing() -> None:
    with embedded(threads=2) as cluster:
        trainer = trainer_for(cluster)
        trainer.fit([batch_of(USERS)])
        before = rows_of(trainer)
        for table, values, feature, expected in (
            ("ids", [2, 3], None, r"keys of table 'ids', which salt spreads.*feature= says"),
            ("waiting", ["a"], None, r"keys of table 'waiting', integers, found \['a'\]"),
            ("waiting", [1.5], None, "no whole number"),
            ("ids", [2], "user", "expected strings as feature 'user', as in training"),
            ("ids", ["x"], "seen", "the features that read it, user, item"),
            ("none", [2], None, r"the name of a table among \['ids', 'waiting'\], found 'none'"),
        ):
            with pytest.raises(BadRequest, match=expected):
                remove_rows(trainer, table, values, feature=feature)
        assert remove_rows(trainer, "ids", []) == remove_rows(trainer, "waiting", [-1]) == 0
        assert rows_of(trainer) == before
