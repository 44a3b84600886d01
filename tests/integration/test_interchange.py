"""Tables from and for other systems: Fleet's text, Parquet, arrays; complete or not at all, on any
number of servers.
"""

from __future__ import annotations

import gzip
import threading
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job
from tests.s3_server import put, s3_server
from tests.tables import T_ROWS
from trireme import _core
from trireme.errors import BadRequest, DataError
from trireme.fleet import saving
from trireme.fleet.calls import FleetJob
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded

NUM_KEYS = 500
DAY = 86_400
RULES: dict[str, Any] = {
    "sgd": tr.optim.FleetSGD(),
    "adagrad": tr.optim.FleetAdagrad(),
    "std_adagrad": tr.optim.FleetAdagrad(shared=False),
    "adagrad_v2": tr.optim.FleetAdagradV2(),
    "adam": tr.optim.FleetAdam(lr=0.01),
    "shared_adam": tr.optim.FleetSharedAdam(lr=0.01),
}


class Model(nn.Module):
    def __init__(self, rule: Any, policy: Any = None) -> None:
        super().__init__()
        policy = policy or tr.policy.SparseAccessor(embedx_threshold=None)
        table = tr.Table("t", dim=4, optimizer=rule, absent="zeros", policy=policy)
        self.rows = tr.nn.EmbeddingBag(table, features=["a", "b"])
        self.mlp = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 1))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.mlp(self.rows(batch).flatten(1)).squeeze(1)


def make_trainer(cluster: Cluster, rule: str = "adagrad", policy: Any = None) -> tr.Trainer:
    model = Model(RULES.get(rule) or tr.optim.Adagrad(lr=0.1), policy)
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        strategy=tr.Strategy("sync"),
        loss=nn.functional.binary_cross_entropy_with_logits,
        progress=False,
        cluster=cluster,
    )


def batches(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(seed)
    return [
        {
            **{name: torch.from_numpy(rng.integers(0, NUM_KEYS, 64)) for name in "ab"},
            "label": torch.from_numpy(rng.integers(0, 2, 64).astype(np.float32)),
        }
        for _ in range(count)
    ]


def everything(cluster: Cluster, trainer: tr.Trainer) -> dict[str, np.ndarray]:
    """All weights, as a client sees them."""
    keys = _core.unique(np.arange(NUM_KEYS, dtype=np.uint64), cluster.pool)[0]
    pulled = cluster.client.pull({T_ROWS: keys})
    trainer.optimizer.refresh()
    weights = {name: t.detach().numpy().copy() for name, t in trainer.model.named_parameters()}
    return {
        "rows": pulled.rows[T_ROWS].numpy(),
        "missing": np.array(pulled.missing[T_ROWS]),
        **weights,
    }


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


# ---- Fleet's text ----


@pytest.mark.parametrize(
    ("rule", "accessor"),
    [*((rule, "SparseAccessor") for rule in RULES), ("std_adagrad", "CtrDoubleAccessor")],
)
def test_a_run_resumes_from_its_own_export(tmp_path, rule, accessor):
    """Out and in again: rows with state, dense parameters with moments; training continues as if
    nothing had happened.
    """
    with embedded(threads=2) as cluster:
        trainer = make_trainer(cluster, rule)
        trainer.fit(batches(8))
        counts = tr.interchange.export_fleet(
            trainer, tmp_path / "x", accessor=accessor, shard_num=3
        )
        at_export = everything(cluster, trainer)
        assert counts == {"t": NUM_KEYS - at_export["missing"]}
        trainer.fit(batches(8, 1))
        at_end = everything(cluster, trainer)
    assert tr.interchange.is_fleet(tmp_path / "x")
    assert sorted(p.name for p in (tmp_path / "x" / "000").iterdir()) == [
        f"part-000-{shard:05d}" for shard in range(3)
    ]
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster, rule)
        trainer.fit(batches(3, 2))  # is replaced
        assert (
            tr.interchange.import_fleet(trainer, tmp_path / "x", accessor=accessor, dense_steps=8)
            == counts
        )
        assert_equal(everything(cluster, trainer), at_export)
        trainer.fit(batches(8, 1))
        assert_equal(everything(cluster, trainer), at_end)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_servers_share_the_work(tmp_path, num_servers):
    def export(cluster: Cluster) -> dict[str, np.ndarray]:
        trainer = make_trainer(cluster)
        trainer.fit(batches(10))
        tr.interchange.export_fleet(trainer, tmp_path / "x", shard_num=20, compress=True)
        return everything(cluster, trainer)

    def load(cluster: Cluster) -> None:
        trainer = make_trainer(cluster)
        tr.interchange.import_fleet(trainer, tmp_path / "x")
        assert_equal(everything(cluster, trainer), expected)

    with Job(2) as job:
        expected = job.run(1, export)[0]
    for shard in range(20):  # more than the servers read at once
        with gzip.open(tmp_path / "x" / "000" / f"part-000-{shard:05d}.gz", "rt") as lines:
            keys = [int(line.split()[0]) for line in lines]
        assert keys
        assert {key % 20 for key in keys} == {shard}
    with Job(num_servers) as job:
        job.run(1, load)


def write_rows(folder: Path, *files: str) -> Path:
    (folder / "000").mkdir(parents=True)
    for number, text in enumerate(files):
        (folder / "000" / f"part-000-{number:05d}").write_text(text)
    return folder


GOOD = "1 7 0 0.5 3 1 0.25 1.5 1 2 3 0.125\n"  # slot 7, unseen 0, delta .5, 3 shows, 1 click


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("x 0 0 0 0 0 0 0", "a key, found 'x'"),
        ("5 0 0 0 0 0 0", "7 or 11 numbers behind the key, found 6"),
        ("5 0 0 0 0 0 0 0 1 1 1 1 9", "the end of the line, found '9'"),
        ("5 0 0 0 0 nan 0 0", "a finite number, found 'nan'"),
        ("5 0.5 0 0 0 0 0 0", "a slot as a whole number from -1 .*, found 0.5"),
        ("5 -2 0 0 0 0 0 0", "a slot as a whole number from -1 .*, found -2"),
        ("5 0 1.5 0 0 0 0 0", "unseen days as a whole number .*, found 1.5"),
        (
            "5 0 2 0 0 0 0 0",
            r"0 unseen days where time in seconds \(--time\) is not given, found 2",
        ),
        ("5 0 0 0 -1 0 0 0", "shows >= 0, found -1"),
        ("5 0 0 0 0 -1 0 0", "clicks >= 0, found -1"),
        ("5 0 0 0 0 0 0 -1", "sums of squares and powers >= 0 in its head_state, found -1"),
        ("5 0 0 0 0 0 0 0 1 1 1 -2", "sums of squares and powers >= 0 in its tail_state, found -2"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_loaded(tmp_path, line, what):
    folder = write_rows(tmp_path / "x", GOOD, f"2{GOOD[1:]}3{GOOD[1:]}{line}\n4{GOOD[1:]}")
    with embedded(threads=2) as cluster:
        trainer = make_trainer(cluster)
        trainer.fit(batches(2))
        before = everything(cluster, trainer)
        with pytest.raises(DataError, match=f"000/part-000-00001:3: expected {what}"):
            tr.interchange.import_fleet(trainer, folder, dense={})
        assert_equal(everything(cluster, trainer), before)
        tr.interchange.import_fleet(trainer, write_rows(tmp_path / "y", GOOD), dense={})


def test_a_key_that_comes_twice_is_refused(tmp_path):
    folder = write_rows(tmp_path / "x", GOOD, GOOD)
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        places = "000/part-000-00000:1 and .*000/part-000-00001:1"
        with pytest.raises(DataError, match=f"{places}: expected distinct keys, found 1 twice"):
            tr.interchange.import_fleet(trainer, folder, dense={})
        assert everything(cluster, trainer)["missing"] == NUM_KEYS


def test_statistics_come_with_their_day(tmp_path):
    """A row that was last pushed 3 days before the save has shows that have faded since."""
    folder = write_rows(tmp_path / "x", f"{GOOD}2 7 3 0.5 3 1 0.25 1.5 1 2 3 0.125\n")
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        tr.interchange.import_fleet(trainer, folder, dense={}, time=10 * DAY + 5)
        tr.interchange.export_parquet(trainer, tmp_path / "p", state=True)
        rows = pq.read_table(tmp_path / "p" / "t").sort_by("key").to_pydict()
        assert rows["key"] == [1, 2]
        assert rows["weights"] == [[0.25, 1, 2, 3]] * 2
        assert rows["feature"] == [7, 7]
        assert rows["time"] == [10 * DAY + 5, 7 * DAY + 5]
        assert rows["show"] == [3.0, pytest.approx(3 * 0.98**-3, rel=1e-12)]
        assert rows["click"] == [1.0, pytest.approx(0.98**-3, rel=1e-12)]
        assert rows["delta_score"] == [0.5, 0.5]
        tr.interchange.export_fleet(trainer, tmp_path / "y", dense={}, shard_num=1, time=12 * DAY)
    lines = (tmp_path / "y" / "000" / "part-000-00000").read_text().splitlines()
    faded = {int(line.split()[0]): list(map(float, line.split()[1:])) for line in lines}
    assert faded[1][:2] == [7, 2]
    assert faded[2][:2] == [7, 5]
    assert faded[1][3] == pytest.approx(3 * 0.98**2, rel=1e-12)
    assert faded[2][4] == pytest.approx(0.98**2, rel=1e-12)


def test_names_that_do_not_fit_are_refused(tmp_path):
    folder = write_rows(tmp_path / "x", GOOD)
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        with pytest.raises(DataError, match=r"cannot list .*x/001"):
            tr.interchange.import_fleet(trainer, folder)
        (folder / "001").mkdir()
        (folder / "001" / "part-000").write_text("0 0 0\n" * 50)
        with pytest.raises(DataError, match="expected 51 elements in all, found 50"):
            tr.interchange.import_fleet(trainer, folder)
        with pytest.raises(BadRequest, match=r"expected each of .* once as a value of dense="):
            tr.interchange.import_fleet(trainer, folder, dense={"linear_0.w_0": "mlp.0.weight"})
        with pytest.raises(BadRequest, match=r"tables: expected names among \['t'\]"):
            tr.interchange.import_fleet(trainer, folder, tables={"u": 0})
        with pytest.raises(DataError, match=r"expected files named part-.*, found .*001/part-000"):
            tr.interchange.import_fleet(trainer, folder, tables={"t": 1}, dense={})
        with pytest.raises(BadRequest, match="expected accessor SparseAccessor, "):
            tr.interchange.import_fleet(trainer, folder, dense={}, accessor="CtrDymfAccessor")
        (folder / "001" / "part-000").write_text("0\n" * 51)
        with pytest.raises(
            DataError, match="expected a weight and 2 numbers of Adam in each line, found 1"
        ):
            tr.interchange.import_fleet(trainer, folder)
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster, "torch's")
        with pytest.raises(BadRequest, match=r"expected one of Fleet's rules, .* found 'adagrad'"):
            tr.interchange.import_fleet(trainer, folder, dense={})


# ---- Parquet and arrays ----


def columns(num_rows: int = 300, seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "key": rng.choice(NUM_KEYS, num_rows, replace=False).astype(np.uint64),
        "weights": rng.standard_normal((num_rows, 4)).astype(np.float32),
        "show": rng.integers(1, 100, num_rows).astype(np.float64),
        "time": rng.integers(1, 10 * DAY, num_rows).astype(np.uint32),
    }


def rows_by_key(cluster: Cluster, keys: np.ndarray) -> np.ndarray:
    distinct = _core.unique(keys, cluster.pool)[0]
    pulled = cluster.client.pull({T_ROWS: distinct}).rows[T_ROWS].numpy()
    order = np.argsort(distinct)
    return pulled[order][np.searchsorted(distinct[order], keys)]


@pytest.mark.parametrize("source", ["arrays", "file", "folder", "renamed"])
@pytest.mark.parametrize("num_servers", [1, 2])
def test_rows_of_another_system_come_in(tmp_path, num_servers, source):
    arrays = columns()
    written = {**arrays, "weights": list(arrays["weights"])}
    names: dict[str, str] = {}
    if source == "renamed":
        names = {"key": "id", "weights": "embedding"}
        written = {names.get(name, name): values for name, values in written.items()}
        written["id"] = written["id"].view(np.int64)
        written["embedding"] = pa.array(written["embedding"], pa.list_(pa.float64(), 4))
        written["other"] = np.zeros(300)
    table = pa.table(written)
    pq.write_table(table.slice(0, 100), tmp_path / "a.parquet")
    pq.write_table(table.slice(100), tmp_path / "b.parquet")
    pq.write_table(table, tmp_path.parent / f"{tmp_path.name}.parquet")

    def work(cluster: Cluster) -> None:
        trainer = make_trainer(cluster)
        trainer.fit(batches(3))
        before = everything(cluster, trainer)

        def bring(**options: Any) -> int:
            if source == "arrays":
                return tr.interchange.import_arrays(trainer, "t", arrays, **options)
            file = tmp_path.parent / f"{tmp_path.name}.parquet"
            path = file if source == "file" else tmp_path
            return tr.interchange.import_parquet(trainer, "t", path, columns=names, **options)

        assert bring() == 300
        np.testing.assert_array_equal(rows_by_key(cluster, arrays["key"]), arrays["weights"])
        others = np.setdiff1d(np.arange(NUM_KEYS, dtype=np.uint64), arrays["key"])
        old = before["rows"][
            np.argsort(_core.unique(np.arange(NUM_KEYS, dtype=np.uint64), cluster.pool)[0])
        ]
        np.testing.assert_array_equal(rows_by_key(cluster, others), old[others])
        trainer.fit(batches(3, 1))  # with state that lets them learn
        assert (rows_by_key(cluster, arrays["key"]) != arrays["weights"]).any(1).sum() > 100
        assert bring(replace=True) == 300
        assert everything(cluster, trainer)["missing"] == NUM_KEYS - 300

    with Job(num_servers) as job:
        job.run(1, work)


def test_a_worker_that_is_slow_before_an_import_does_not_end_it(monkeypatch):
    """It pulls dense weights before all workers meet, not while rows come in."""
    is_prepared, has_pulled = threading.Event(), threading.Event()

    def work(cluster: Cluster) -> int:
        trainer = make_trainer(cluster)
        finish, refresh = cluster.client.servers.finish, trainer.optimizer.refresh

        def finish_late(*args: Any, **options: Any) -> bool:
            is_prepared.set()
            has_pulled.wait(1.0)
            return finish(*args, **options)

        def refresh_late() -> None:
            is_prepared.wait(1.0)
            refresh()
            has_pulled.set()

        if cluster.worker == 0:
            monkeypatch.setattr(cluster.client.servers, "finish", finish_late)
        else:
            monkeypatch.setattr(trainer.optimizer, "refresh", refresh_late)
        return tr.interchange.import_arrays(trainer, "t", columns())

    with Job(1) as job:
        assert job.run(2, work) == [300, 300]


def test_parquet_survives_with_state(tmp_path):
    """Export, import on another number of servers, and train on with the same bits."""

    def export(cluster: Cluster) -> dict[str, np.ndarray]:
        trainer = make_trainer(cluster, "adam")
        tr.interchange.import_arrays(trainer, "t", columns())
        trainer.fit(batches(5))
        assert tr.interchange.export_parquet(trainer, tmp_path / "p", state=True) == {
            "t": NUM_KEYS - int(everything(cluster, trainer)["missing"])
        }
        tr.interchange.export_fleet(trainer, tmp_path / "f", shard_num=1)
        trainer.fit(batches(5, 1))
        return everything(cluster, trainer)

    def load(cluster: Cluster) -> None:
        trainer = make_trainer(cluster, "adam")
        tr.interchange.import_fleet(trainer, tmp_path / "f", dense_steps=5)
        tr.interchange.import_parquet(trainer, "t", tmp_path / "p" / "t", replace=True)
        trainer.fit(batches(5, 1))
        assert_equal(everything(cluster, trainer), expected)

    with Job(2) as job:
        expected = job.run(1, export)[0]
    with Job(1) as job:
        job.run(1, load)


def test_rows_go_to_an_object_store_and_come_back(tmp_path):
    with s3_server() as options, embedded(threads=2) as cluster:
        trainer = make_trainer(cluster)
        tr.interchange.import_arrays(trainer, "t", columns())
        place = "s3://bucket/exports/1"
        assert tr.interchange.export_parquet(trainer, place, storage_options=options) == {"t": 300}
        tr.interchange.import_arrays(trainer, "t", columns(200, seed=2), replace=True)
        rows = f"{place}/t"
        assert (
            tr.interchange.import_parquet(trainer, "t", rows, replace=True, storage_options=options)
            == 300
        )
        arrays = columns()
        np.testing.assert_array_equal(rows_by_key(cluster, arrays["key"]), arrays["weights"])
        with pytest.raises(BadRequest, match=f"expected a new folder, found {place} existing"):
            tr.interchange.export_parquet(trainer, place, storage_options=options)
        fsspec.filesystem("s3", **options).rm(place, recursive=True)
        other = columns(200, seed=2)
        tr.interchange.import_arrays(trainer, "t", other, replace=True)
        assert tr.interchange.export_parquet(trainer, place, storage_options=options) == {"t": 200}
        tr.interchange.import_parquet(trainer, "t", rows, replace=True, storage_options=options)
        np.testing.assert_array_equal(rows_by_key(cluster, other["key"]), other["weights"])
        tr.interchange.export_fleet(trainer, tmp_path / "f", dense={}, shard_num=2)
        text = (tmp_path / "f" / "000" / "part-000-00001").read_bytes()
        rest = (tmp_path / "f" / "000" / "part-000-00000").read_bytes()
        put(options, "fleet/000/part-000-00001.gz", gzip.compress(text))
        put(options, "fleet/000/part-000-00000", rest)
        actual = tr.interchange.import_fleet(
            trainer, "s3://bucket/fleet", dense={}, storage_options=options, time=10 * DAY
        )
        assert actual == {"t": 200}


def test_fleets_names_for_it(tmp_path, monkeypatch):
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        tr.interchange.import_arrays(trainer, "t", columns())
        job = FleetJob()
        monkeypatch.setattr(saving, "job", job)
        job.infer_from_dataset(trainer, batches(1))
        saving.save_persistables(dirname=str(tmp_path / "f"), format="fleet", shard_num=2)
        tr.interchange.import_arrays(trainer, "t", columns(100, seed=3), replace=True)
        saving.load_model(str(tmp_path / "f"))
        assert everything(cluster, trainer)["missing"] == NUM_KEYS - 300
        saving.save_persistables(dirname=str(tmp_path / "c"))
        saving.load_model(str(tmp_path / "c"))
        with pytest.raises(BadRequest, match=r"expected a model saved by Fleet, .*\['time'\]"):
            saving.load_model(str(tmp_path / "c"), time=5)
        with pytest.raises(
            BadRequest, match="expected format 'trireme' without options, or 'fleet'"
        ):
            saving.save_persistables(dirname=str(tmp_path / "d"), format="paddle")


def test_an_empty_table_is_exported_too(tmp_path):
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        assert tr.interchange.export_parquet(trainer, tmp_path / "p") == {"t": 0}
        assert tr.interchange.export_fleet(trainer, tmp_path / "f", shard_num=2) == {"t": 0}
        assert tr.interchange.import_parquet(trainer, "t", tmp_path / "p" / "t") == 0
        assert tr.interchange.import_fleet(trainer, tmp_path / "f") == {"t": 0}


# ---- rows with a head alone ----


def test_rows_without_a_tail_stay_heads(tmp_path):
    """In text and in Parquet they have their head alone; a push that lifts the score over the
    threshold gives them a tail.
    """
    heads = "".join(f"{key} 7 0 0.5 1 0 0.25 1.5\n" for key in range(2, 12))
    folder = write_rows(tmp_path / "x", GOOD + heads)
    policy = tr.policy.SparseAccessor(embedx_threshold=3.0)
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster, policy=policy)
        assert tr.interchange.import_fleet(trainer, folder, dense={}) == {"t": 11}
        keys = np.arange(1, 12, dtype=np.uint64)
        expected = np.array([[0.25, 1, 2, 3]] + [[0.25, 0, 0, 0]] * 10, np.float32)
        np.testing.assert_array_equal(rows_by_key(cluster, keys), expected)
        tr.interchange.export_fleet(trainer, tmp_path / "y", dense={}, shard_num=1)
        text = (tmp_path / "y" / "000" / "part-000-00000").read_text()
        assert sorted(text.splitlines()) == sorted((GOOD + heads).splitlines())
        tr.interchange.export_parquet(trainer, tmp_path / "p", state=True)
        lengths = {
            key: len(weights)
            for key, weights in zip(
                *pq.read_table(tmp_path / "p" / "t", columns=["key", "weights"])
                .to_pydict()
                .values(),
                strict=True,
            )
        }
        assert lengths == {1: 4, **dict.fromkeys(range(2, 12), 1)}
        assert tr.interchange.import_parquet(trainer, "t", tmp_path / "p" / "t", replace=True) == 11
        tr.interchange.export_fleet(trainer, tmp_path / "z", dense={}, shard_num=1)
        again = (tmp_path / "z" / "000" / "part-000-00000").read_text()
        assert sorted(again.splitlines()) == sorted((GOOD + heads).splitlines())


def test_a_table_of_whole_rows_begins_the_tails_that_are_missing(tmp_path):
    folder = write_rows(tmp_path / "x", "2 7 0 0.5 1 0 0.25 1.5\n")
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        tr.interchange.import_fleet(trainer, folder, dense={})
        [row] = rows_by_key(cluster, np.array([2], np.uint64))
        assert row[0] == 0.25
        assert len(set(row[1:].tolist())) == 3
        assert np.abs(row[1:]).max() <= 0.05


def test_exported_parquet_is_read_by_others(tmp_path):
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        tr.interchange.import_arrays(trainer, "t", columns())
        tr.interchange.export_parquet(trainer, tmp_path / "p")
    files = str(tmp_path / "p" / "t" / "*.parquet")
    expected = {
        int(k): w.tolist() for k, w in zip(columns()["key"], columns()["weights"], strict=True)
    }
    frame = polars.read_parquet(files)
    assert dict(zip(frame["key"].to_list(), frame["weights"].to_list(), strict=True)) == expected
    actual = duckdb.sql(f"select key, weights, \"show\" from '{files}'").fetchall()
    assert {key: list(weights) for key, weights, _ in actual} == expected


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"key": np.zeros(300, np.uint64)}, "distinct keys, found 0 in rows 0 and 1"),
        ({"key": np.zeros(300, bool)}, "column 'key' of uint64, found bool"),
        ({"key": np.zeros(299, np.uint64)}, "columns of one length"),
        ({"key": np.zeros(300)}, "column 'key' of uint64, found float64"),
        ({"weights": np.zeros((300, 3), np.float32)}, r"column 'weights' of shape .*4\), found"),
        ({"weights": np.zeros(300)}, r"column 'weights' of rank 2, found shape \(300,\)"),
        ({"weights": np.full((300, 4), np.nan)}, r"row of key \d+: expected finite weights"),
        ({"weights": np.full((300, 4), 1e300)}, "expected finite weights"),
        ({"show": np.full(300, -1.0)}, "expected finite show >= 0"),
        (
            {"state": np.full((300, 3), -1, np.float32)},
            r"row of key \d+: .* state with finite sums",
        ),
        ({"state": np.zeros((300, 9), np.float32)}, r"column 'state' of shape"),
        ({"color": np.zeros(300)}, "expected columns of .*, found 'color'"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, what):
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        with pytest.raises(BadRequest, match=what):
            tr.interchange.import_arrays(trainer, "t", {**columns(), **change})
        with pytest.raises(BadRequest, match="expected columns key and weights"):
            tr.interchange.import_arrays(trainer, "t", {"key": columns()["key"]})
        with pytest.raises(
            BadRequest, match=r"expected the name of a table among \['t'\], found 'u'"
        ):
            tr.interchange.import_arrays(trainer, "u", columns())
        assert everything(cluster, trainer)["missing"] == NUM_KEYS


def test_a_table_without_a_score_policy_has_no_place_for_shows(tmp_path):
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster, policy=tr.policy.Policy())
        with pytest.raises(BadRequest, match=r"no ScorePolicy, .* columns \['show'\]"):
            tr.interchange.import_arrays(trainer, "t", columns())
        with pytest.raises(BadRequest, match="expected a table with a ScorePolicy, found 't'"):
            tr.interchange.export_fleet(trainer, tmp_path / "x", shard_num=1)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"key": None}, r"expected columns \['key'\]"),
        ({"key": [1, 2, 1]}, r"row 0 and .*x\.parquet: row 2: expected distinct keys, found 1"),
        ({"key": [True, False, True]}, "column 'key' of uint64, found bool"),
        ({"weights": [[1.0] * 4] * 2 + [[1.0] * 5]}, r"column 'weights' of shape \(3, 4\)"),
        ({"weights": [[1.0] * 4] * 2 + [[1.0] * 3]}, "row 2: expected 4 weights, found 3"),
        ({"weights": [[1.0] * 4, None, [1.0] * 4]}, "no nulls in column 'weights'"),
        ({"weights": [1.0, 2.0, 3.0]}, "expected lists in column 'weights'"),
        ({"weights": [[1.0] * 4, [1.0] * 4, [float("inf")] * 4]}, "row 2: expected finite"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, change, what):
    good = {"key": [1, 2, 3], "weights": [[1.0] * 4] * 3}
    table = {name: values for name, values in {**good, **change}.items() if values is not None}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        with pytest.raises(BadRequest, match=rf"x\.parquet.*{what}"):
            tr.interchange.import_parquet(trainer, "t", tmp_path / "x.parquet")
        with pytest.raises(DataError, match=r"nothing\.parquet: cannot read it"):
            tr.interchange.import_parquet(trainer, "t", tmp_path / "nothing.parquet")
        assert everything(cluster, trainer)["missing"] == NUM_KEYS
