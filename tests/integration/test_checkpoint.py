"""Checkpoints are complete or absent, and load on any number of servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job, work_alone
from tests.programs import Template
from tests.tables import T_ROWS
from trireme import _core
from trireme.checkpoint.worker_side.server_operations import ServerOperations
from trireme.errors import BadRequest, ResourceExhausted, SchemaMismatch
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.storage.local import LocalStorage

NUM_KEYS = 2000
SAVE_AND_LOAD = """
import sys, torch, trireme as tr
with tr.init():
    rows = tr.nn.EmbeddingBag(tr.Table("t", dim=4, policy=tr.policy.ScorePolicy()), features="a")
    top = torch.nn.Linear(4, 1)
    model = torch.nn.Sequential(rows, torch.nn.Flatten(), top)
    sgd = torch.optim.SGD(top.parameters(), lr=0.1)
    trainer = tr.Trainer(model, sgd, loss=lambda out, _: out.sum(), progress=False)
    trainer.fit([{"a": torch.tensor([1, 2, 3]), "label": torch.ones(3)}] * 2)
    trainer.save("saved")
    trainer.load("saved")
print("pandas:", "pandas" in sys.modules)
"""


class Model(nn.Module):
    def __init__(self, dim: int = 3) -> None:
        super().__init__()
        table = tr.Table("t", dim=dim, optimizer=tr.optim.Adam(lr=0.05), seed=1)
        self.rows = tr.nn.EmbeddingBag(table, features=["a", "b"])
        self.head = nn.Linear(2 * dim, 1)
        self.norm = nn.BatchNorm1d(2 * dim)
        nn.init.constant_(self.head.weight, 0.1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.head(self.norm(self.rows(batch).flatten(1))).squeeze(1)


def batches(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = np.random.default_rng(seed)
    return [
        {
            "a": torch.from_numpy(generator.integers(0, NUM_KEYS, 64)),
            "b": torch.from_numpy(generator.integers(0, NUM_KEYS, 64)),
            "label": torch.from_numpy(generator.integers(0, 2, 64).astype(np.float32)),
        }
        for _ in range(count)
    ]


def make_trainer(
    cluster: Cluster,
    dim: int = 3,
    optimizer: Any = torch.optim.Adam,
    model: nn.Module | None = None,
) -> tr.Trainer:
    model = model or Model(dim)
    return tr.Trainer(
        model,
        optimizer(model.parameters(), lr=0.01),
        strategy=tr.Strategy("sync"),
        loss=nn.functional.binary_cross_entropy_with_logits,
        progress=False,
        cluster=cluster,
    )


def everything(cluster: Cluster, trainer: tr.Trainer) -> dict[str, np.ndarray]:
    """All weights, as a client sees them."""
    keys = _core.unique(np.arange(NUM_KEYS, dtype=np.uint64), cluster.pool)[0]
    pulled = cluster.client.pull({T_ROWS: keys})
    trainer.optimizer.refresh()
    weights = {name: t.detach().numpy().copy() for name, t in trainer.model.named_parameters()}
    buffers = {name: t.numpy().copy() for name, t in trainer.model.named_buffers()}
    return {"rows": pulled.rows[T_ROWS].numpy(), **weights, **buffers}


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train on 2 servers, save half-way, train on: what a run from the checkpoint must
    reproduce.
    """
    path = tmp_path_factory.mktemp("checkpoint") / "half"

    def work(cluster: Cluster) -> dict[str, Any]:
        trainer = make_trainer(cluster)
        trainer.fit(batches(20, 0))
        at_save = everything(cluster, trainer)
        trainer.save(path)
        trainer.fit(batches(20, 1))
        return {"path": path, "at_save": at_save, "at_end": everything(cluster, trainer)}

    with Job(2) as job:
        return job.run(1, work)[0]


@pytest.mark.parametrize("num_servers", [0, 1, 2, 3])
def test_a_run_resumes_from_a_checkpoint_on_any_number_of_servers(
    saved: dict[str, Any], num_servers: int
) -> None:
    def work(cluster: Cluster) -> None:
        trainer = make_trainer(cluster)
        trainer.load(saved["path"])
        assert trainer.optimizer.num_steps == 20
        assert trainer.optimizer.sequence == 20
        assert_equal(everything(cluster, trainer), saved["at_save"])
        trainer.fit(batches(20, 1))
        assert_equal(everything(cluster, trainer), saved["at_end"])

    work_alone(num_servers, work)


def test_loading_replaces_what_was_trained_before(saved: dict[str, Any]) -> None:
    with embedded(threads=2) as cluster:
        trainer = make_trainer(cluster)
        trainer.fit(batches(7, 5))
        trainer.load(saved["path"])
        assert_equal(everything(cluster, trainer), saved["at_save"])


def test_row_files_are_plain_arrow(saved: dict[str, Any]) -> None:
    files = sorted(saved["path"].glob("tables/0/????-????.arrow"))
    tables = [pa.ipc.open_file(file).read_all() for file in files]
    keys = np.concatenate([table["key"].to_numpy() for table in tables])
    assert len(files) == 2  # one per server
    assert len(np.unique(keys)) == len(keys) > 1000
    assert tables[0].schema.field("weights").type == pa.list_(pa.float32(), 3)
    assert tables[0].schema.field("state").type == pa.list_(pa.float32(), 6)


def test_saving_and_loading_import_no_pandas(tmp_path: Path, programs: Template) -> None:
    """Which pyarrow does wherever it makes a column of an array of NumPy, or the reverse."""
    (tmp_path / "script.py").write_text(SAVE_AND_LOAD)
    assert programs.run(tmp_path, ["script.py"]).splitlines()[-1] == "pandas: False"


def test_an_existing_folder_is_not_touched(saved: dict[str, Any]) -> None:
    before = {p: p.stat().st_mtime_ns for p in saved["path"].rglob("*")}
    with embedded() as cluster:
        trainer = make_trainer(cluster)
        with pytest.raises(BadRequest, match="expected a new folder"):
            trainer.save(saved["path"])
    assert {p: p.stat().st_mtime_ns for p in saved["path"].rglob("*")} == before


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with embedded() as cluster:
        trainer = make_trainer(cluster)
        trainer.fit(batches(2))
        monkeypatch.setattr("trireme.checkpoint.server_side.save.write_tensors", full_disk)
        with pytest.raises(ResourceExhausted, match=r"cannot write .*: No space left"):
            trainer.save(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_servers_do_not_bring_back_the_folder_of_a_save_that_was_given_up(tmp_path: Path) -> None:
    """Its worker was killed, and the next save has removed what was there of it."""
    gone = tmp_path / ".c.0.partial"
    plan = {"mode": "full", "time": 0, "budgets": {}, "version": 1, "since": 0, "removed_since": 0}
    with embedded() as cluster:
        make_trainer(cluster).fit(batches(2))
        operations = ServerOperations(cluster.client, LocalStorage(gone), None)
        for action in ("save", "try"):
            with pytest.raises(BadRequest, match=f"on server 0 the folder {gone} .* that all serv"):
                operations.run(action, prefix="", **plan)
    assert list(tmp_path.iterdir()) == []


def test_servers_write_below_their_root_only(tmp_path: Path) -> None:
    from tests.jobs import InProcessServer
    from trireme.job.connecting import connect

    server = InProcessServer(root=tmp_path / "allowed")
    with server.rpc, connect([server.endpoint], worker=0, num_workers=1) as cluster:
        trainer = make_trainer(cluster)
        with pytest.raises(BadRequest, match=r"a path under .*allowed, .*; --root or TRIREME_ROOT"):
            trainer.save(tmp_path / "elsewhere" / "new" / "c")
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(BadRequest, match=r"a path under .*allowed, .*; --root or TRIREME_ROOT"):
            trainer.fit(batches(2), checkpoints=tr.Checkpoints(tmp_path / "run", every_s=600))
        passes = [tr.Pass(day="20260101", number=1, open=lambda: batches(2))]
        with pytest.raises(BadRequest, match=r"a path under .*allowed, .*; --root or TRIREME_ROOT"):
            next(tr.train_passes(trainer, passes, publishing=tr.Publishing(path=str(tmp_path))))
        assert trainer.optimizer.num_steps == 0, "it has trained what it cannot save"
        trainer.save(tmp_path / "allowed" / "c")


def test_another_model_is_refused_with_both_sides(saved: dict[str, Any]) -> None:
    both = r"'dims': \[4\].*found.*'dims': \[3\].*tables=.* leaves it out.*A model that changes"
    with embedded() as cluster, pytest.raises(SchemaMismatch, match=both):
        make_trainer(cluster, dim=4).load(saved["path"])
    both = 'its optimizer is Adam, the model\'s is SGD; .*dense="match"'
    with embedded() as cluster, pytest.raises(SchemaMismatch, match=both):
        make_trainer(cluster, optimizer=torch.optim.SGD).load(saved["path"])


def test_parameters_of_other_names_are_refused_with_how_to_load_the_rest(
    saved: dict[str, Any],
) -> None:
    message = r'of parameter 0\.head\.\w+, found none of it; .*dense="match"'
    with embedded() as cluster:
        model = nn.Sequential(Model())
        trainer = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters(), lr=0.25),
            strategy=tr.Strategy("sync"),
            loss=nn.functional.binary_cross_entropy_with_logits,
            progress=False,
            cluster=cluster,
        )
        with pytest.raises(SchemaMismatch, match=message):
            trainer.load(saved["path"])


def test_a_checkpoint_without_a_table_of_the_model_changes_nothing(saved: dict[str, Any]) -> None:
    with embedded() as cluster:
        trainer = make_trainer(cluster)
        extra = tr.Table("extra", dim=2)
        cluster.client.create_table(extra.schema)
        trainer.fit(batches(5))
        before = everything(cluster, trainer)
        lacks = r"tables \['extra', 't'\], found \['t'\], without \['extra'\].*dense=\"match\""
        with pytest.raises(SchemaMismatch, match=lacks):
            trainer.load(saved["path"])
        assert_equal(everything(cluster, trainer), before)


class Wider(nn.Module):
    """Model with one feature more: a wider head, and another table beside."""

    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("t", dim=3, optimizer=tr.optim.Adam(lr=0.05), seed=1)
        self.rows = tr.nn.EmbeddingBag(table, features=["a", "b", "c"])
        self.bias = tr.nn.EmbeddingBag(tr.Table("bias", dim=1), features=["c"])
        self.head = nn.Linear(9, 1)
        self.norm = nn.BatchNorm1d(9)

    def forward(self, batch: Any) -> torch.Tensor:
        out = self.head(self.norm(self.rows(batch).flatten(1))).squeeze(1)
        return out + self.bias(batch).sum((1, 2))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_model_with_a_feature_more_starts_from_what_matches(
    saved: dict[str, Any], num_workers: int
) -> None:
    def work(cluster: Cluster) -> None:
        model = Wider()
        trainer = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters(), lr=0.25),
            strategy=tr.Strategy("sync"),
            loss=nn.functional.binary_cross_entropy_with_logits,
            progress=False,
            cluster=cluster,
        )
        wider = [{**batch, "c": batch["a"] + 1} for batch in batches(4, 3)]
        trainer.fit(wider)
        before = everything(cluster, trainer)
        assert sorted(trainer.load(saved["path"], dense="match")) == [
            "bias", "head.weight", "norm.bias", "norm.running_mean", "norm.running_var",
            "norm.weight",
        ]  # fmt: skip
        after = everything(cluster, trainer)
        np.testing.assert_array_equal(after["rows"], saved["at_save"]["rows"])
        np.testing.assert_array_equal(after["head.bias"], saved["at_save"]["head.bias"])
        np.testing.assert_array_equal(after["head.weight"], before["head.weight"])
        assert (trainer.optimizer.num_steps, trainer.optimizer.sequence) == (20, 0)
        assert trainer.optimizer.param_groups[0]["lr"] == 0.25
        trainer.fit(wider)  # no mark of the run before, or of the checkpoint's, holds a push back
        trained = everything(cluster, trainer)
        assert all(np.any(trained[name] != after[name]) for name in trained)

    with Job(2) as job:
        job.run(num_workers, work)


def test_rates_of_a_checkpoint_that_differ_from_the_script_are_told(
    saved: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    message = (
        "table 't' goes on with the checkpoint's {'lr': 0.05}, not with the script's {'lr': 0.5}"
    )
    with embedded() as cluster, caplog.at_level("INFO", "trireme.train"):
        trainer = make_trainer(cluster)
        trainer.load(saved["path"])
        assert "goes on with" not in caplog.text
        trainer.optimizer.param_groups[1]["lr"] = 0.5
        trainer.load(saved["path"])
        assert message in caplog.text
        assert trainer.optimizer.param_groups[1]["lr"] == 0.05


@pytest.mark.parametrize("mode", ["sync", "hybrid", "geo"])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "AdamW"])
def test_another_optimizer_begins_with_the_weights_and_without_the_state(
    saved: dict[str, Any], name: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It trains on as one whose model had these weights from the beginning."""

    def trained(dense: Any, weights: dict[str, Any]) -> dict[str, np.ndarray]:
        with embedded(threads=1) as cluster:
            model = Model()
            model.load_state_dict(weights, strict=False)
            trainer = tr.Trainer(
                model,
                getattr(torch.optim, name)(model.parameters(), lr=0.25),
                strategy=tr.Strategy(mode, **({"k": 3} if mode == "geo" else {})),  # type: ignore[arg-type]
                loss=nn.functional.binary_cross_entropy_with_logits,
                progress=False,
                cluster=cluster,
            )
            kept = trainer.load(saved["path"], dense=dense)
            assert bool(kept) == (dense == "skip")
            assert trainer.optimizer.param_groups[0]["lr"] == 0.25
            trainer.fit(batches(6, 3))
            return everything(cluster, trainer)

    weights = {n: torch.from_numpy(a) for n, a in saved["at_save"].items() if n != "rows"}
    with caplog.at_level("INFO", "trireme.train"):
        assert_equal(trained("match", {}), trained("skip", weights))
    assert f"load: {name} begins without Adam's state" in caplog.text


def test_a_strict_load_of_some_tables_refuses_another_optimizer(saved: dict[str, Any]) -> None:
    with embedded() as cluster:
        trainer = make_trainer(cluster, optimizer=torch.optim.SGD)
        with pytest.raises(SchemaMismatch, match="its optimizer is Adam, the model's is SGD"):
            trainer.load(saved["path"], tables=["t"])


def test_a_table_of_another_width_never_matches(saved: dict[str, Any]) -> None:
    with embedded() as cluster:
        trainer = make_trainer(cluster, dim=4)
        with pytest.raises(SchemaMismatch, match=r"'dims': \[4\].*found.*'dims': \[3\]"):
            trainer.load(saved["path"], dense="match")
        with pytest.raises(BadRequest, match="dense as one of strict, match, skip, found 'some'"):
            trainer.load(saved["path"], dense="some")  # type: ignore[arg-type]


class WithMore(Model):
    """Has a table more, which adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.more = tr.nn.EmbeddingBag(tr.Table("more", dim=1), features=["a"])

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) + 0 * self.more(batch).flatten()


@pytest.mark.parametrize(
    ("saved", "loaded", "says"),
    [
        (WithMore, Model, r"the model's tables alone, found \['more'\] too; .*dense=.match."),
        (Model, WithMore, "more"),
    ],
)
def test_a_checkpoint_of_other_tables_is_refused_before_anything_changes(
    saved: type[Model], loaded: type[Model], says: str, tmp_path: Path
) -> None:
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster, model=saved())
        trainer.fit(batches(3))
        trainer.save(tmp_path / "saved")
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster, model=loaded())
        trainer.fit(batches(2, seed=1))
        before = trainer.evaluate(batches(1))["loss"]
        with pytest.raises(SchemaMismatch, match=says):
            trainer.load(tmp_path / "saved")
        assert trainer.evaluate(batches(1))["loss"] == before
        trainer.load(tmp_path / "saved", dense="match")
        assert trainer.evaluate(batches(1))["loss"] != before
