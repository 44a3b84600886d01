"""Tables whose features have different dims, in whole jobs: trained, saved, moved, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job
from tests.long import sampled
from tests.own_batches import OwnBatches
from trireme.commands import cli
from trireme.data import Batch, Ragged
from trireme.errors import DataError
from trireme.inference import Predictor
from trireme.inference.export import export_model
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.policy import CtrCommonAccessor, ShowClick

DIMS = {"user": 8, "ad": 3, "site": 8, "hour": 1}
NUM_IDS = 40
NUM_STEPS = 12
BATCH_SIZES = (6, 9)  # of the two workers
LR = 0.1


def batch_of(worker: int, step: int) -> Batch:
    """Bags of 0 to 3 ids, equal ids in several features."""
    rng = np.random.default_rng([worker, step])
    num = BATCH_SIZES[worker]
    columns: dict[str, Any] = {}
    for name in DIMS:
        sizes = rng.integers(0, 4, num)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
        values = torch.from_numpy(rng.integers(0, NUM_IDS, int(sizes.sum())))
        columns[name] = Ragged(values, offsets)
    columns["label"] = torch.from_numpy(rng.integers(0, 2, num).astype(np.float32))
    columns["show"] = torch.ones(num)
    return Batch(columns)


def batches_of(worker: int, num_steps: int = NUM_STEPS) -> OwnBatches:
    return OwnBatches([batch_of(worker, step) for step in range(num_steps)])


class Model(nn.Module):
    """linear: its gradients do not depend on weights, nor its rows on the order of steps."""

    def __init__(self, optimizer: tr.optim.Rule, *, linear: bool = False, **options: Any) -> None:
        super().__init__()
        table = tr.Table("t", dims=DIMS, salt=True, seed=3, optimizer=optimizer, **options)
        self.rows = tr.nn.EmbeddingBag(table, features=list(DIMS))
        self.head = nn.Sequential(nn.Linear(sum(self.rows.dims), 4), nn.Tanh(), nn.Linear(4, 1))
        if linear:
            self.head = nn.Linear(sum(self.rows.dims), 1).requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.head.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)

    def forward(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.rows(batch))
        return logits.squeeze(1)


class Plain(nn.Module):
    """The same with an nn.EmbeddingBag for each feature."""

    def __init__(self, like: Model, initial: dict[str, torch.Tensor]) -> None:
        super().__init__()
        bags = {
            name: nn.EmbeddingBag.from_pretrained(
                rows.clone(), freeze=False, mode="sum", include_last_offset=True
            )
            for name, rows in initial.items()
        }
        self.bags, self.head = nn.ModuleDict(bags), like.head

    def forward(self, batch: Any) -> torch.Tensor:
        parts = [bag(batch[name].values, batch[name].offsets) for name, bag in self.bags.items()]
        logits: torch.Tensor = self.head(torch.cat(parts, 1))
        return logits.squeeze(1)


def rows_in(cluster: Cluster, model: nn.Module) -> dict[str, torch.Tensor]:
    """Feature -> the weights of all its ids, as this worker sees them."""
    ids = torch.arange(NUM_IDS)
    modules = {name: tr.nn.Embedding(model.rows.table, features=name) for name in DIMS}
    planner = tr.nn.Planner(*modules.values(), pool=cluster.pool)
    batch = Batch(dict.fromkeys(DIMS, ids))
    plan = planner.plan(batch, train=False)
    for table in planner.tables:
        cluster.client.create_table(table.schema)
    pulled = cluster.client.pull(plan.keys())
    plan.attach(batch, pulled.rows, train=False)
    return {name: module.eval()(batch).clone() for name, module in modules.items()}


def loss_of(model: nn.Module, batch: Batch, *, linear: bool) -> torch.Tensor:
    logits = model(batch)
    if linear:
        return (logits * (batch["label"] - 0.5)).mean()
    return nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])


def plain_torch(initial: dict[str, torch.Tensor], *, linear: bool) -> dict[str, torch.Tensor]:
    """One process; sync: on the union of the batches; else on each worker's in turn."""
    model = Plain(Model(tr.optim.SGD(lr=LR), linear=linear), initial)
    if linear:
        optimizer: Any = torch.optim.SGD(model.bags.parameters(), lr=LR)
    else:
        optimizer = torch.optim.Adagrad(model.parameters(), lr=LR, eps=1e-10)
    for step in range(NUM_STEPS):
        batches = [batch_of(worker, step) for worker in range(len(BATCH_SIZES))]
        if linear:
            loss = sum(loss_of(model, batch, linear=True) for batch in batches)
        else:
            sizes = [batch.num_examples for batch in batches]
            losses = [loss_of(model, batch, linear=False) for batch in batches]
            loss = sum(a * n for a, n in zip(losses, sizes, strict=True)) / sum(sizes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: bag.weight.detach() for name, bag in model.bags.items()}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_jobs_equal_an_embedding_bag_per_feature(mode: str) -> None:
    """Two workers, two servers, batches planned and pulled ahead."""
    linear = mode == "async"
    rule = tr.optim.SGD(lr=LR) if linear else tr.optim.Adagrad(lr=LR, eps=1e-10)

    def work(cluster: Cluster) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        model = Model(rule, linear=linear)
        dense = None if linear else torch.optim.Adagrad(model.parameters(), lr=LR, eps=1e-10)
        strategy = tr.Strategy(mode)
        optimizer = tr.DistributedOptimizer(dense, model, cluster=cluster, strategy=strategy)
        initial = rows_in(cluster, model)
        cluster.client.coordinator.gather({}, [], purpose="read what is there")
        for batch in tr.prefetch(batches_of(cluster.client.worker), model, cluster=cluster):
            loss_of(model, batch, linear=linear).backward()
            optimizer.step(examples=batch.num_examples)
        optimizer.flush()
        cluster.client.coordinator.gather({}, [], purpose="finish")
        return initial, rows_in(cluster, model)

    with Job(2) as job:
        (initial, actual), (_, others) = job.run(2, work)
        state = job.servers[0].state
        assert set(state.tables["t"].rows.dims) == {8, 3, 1}
    expected = plain_torch(initial, linear=linear)
    for name in DIMS:
        assert actual[name].shape == (NUM_IDS, DIMS[name])
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=1e-5)
        torch.testing.assert_close(others[name], actual[name], rtol=0, atol=0)
        assert not torch.equal(actual[name], initial[name])


def heads() -> dict[str, Any]:
    """Rows that begin as heads, of 16 bits, and are read with their shows and clicks."""
    shown = ShowClick("show", "label")
    policy = CtrCommonAccessor(
        show_click=shown, embedx_threshold=1.0, base_threshold=0.0, delta_threshold=0.0
    )
    return {"policy": policy, "dtype": "bfloat16"}


KINDS = {"plain": dict, "heads": heads}


def trainer_of(cluster: Cluster, kind: str) -> tr.Trainer:
    torch.manual_seed(1)
    model = Model(tr.optim.Adam(lr=0.05), **KINDS[kind]())
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.05),
        loss=nn.functional.binary_cross_entropy_with_logits,
        label="label",
        strategy=tr.Strategy("sync"),
        progress=False,
        cluster=cluster,
    )


def content(job: Job) -> dict[int, tuple[int, bytes]]:
    """Key -> row class and wide row, of all servers."""
    rows = {}
    for server in job.servers:
        table = server.state.tables["t"].rows
        for bucket in server.state.assignment.owned_buckets().tolist():
            content = table.snapshot(bucket)
            for key, row_class, row in zip(
                content.keys, content.classes, content.rows, strict=True
            ):
                rows[int(key)] = (int(row_class), row.tobytes())
    return rows


def answers(trainer: tr.Trainer) -> float:
    return trainer.evaluate(batches_of(0))["loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_and_deltas_load_on_other_numbers_of_servers(kind: str, tmp_path: Path) -> None:
    def save(cluster: Cluster) -> float:
        trainer = trainer_of(cluster, kind)
        trainer.fit(batches_of(cluster.client.worker, 3))
        trainer.save(tmp_path / "full")
        trainer.fit(batches_of(cluster.client.worker, 6))
        trainer.save(tmp_path / "delta", mode="delta")
        return answers(trainer)

    def load(cluster: Cluster) -> float:
        trainer = trainer_of(cluster, kind)
        for name in ("full", "delta"):
            trainer.load(tmp_path / name)
        return answers(trainer)

    with Job(2) as job:
        expected, _ = job.run(2, save)
        rows = content(job)
    assert {row_class for row_class, _ in rows.values()} >= {0, 1, 2}
    for num_servers in (1, 3):
        with Job(num_servers) as job:
            actual = job.run(1, load)
            assert content(job) == rows
            assert actual == [expected]


@sampled(keep=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_predictor_answers_as_the_model(kind: str, dtype: str, tmp_path: Path) -> None:
    """A base of two servers' rows, and a delta on top; keys that are unknown among them."""

    def work(cluster: Cluster) -> None:
        trainer = trainer_of(cluster, kind)
        model, example = trainer.model, batch_of(1, 0)
        predictor = None
        for step, name in enumerate(("base", "delta")):
            trainer.fit([batch_of(0, i) for i in range(4 * step + 1)])
            if predictor is None:
                base = export_model(trainer, tmp_path / name, batch=example, dtype=dtype)
                predictor = Predictor(tmp_path / name)
            else:
                export_model(trainer, tmp_path / name, batch=example, follows=tmp_path / "base")
                predictor.apply(tmp_path / name)
            atol = 1e-5 if dtype == "float32" else 5e-3
            for other in (batch_of(1, 0), batch_of(0, 1), batch_of(1, 50)):
                prediction = predictor.predict(other)
                expected = answer_of(trainer, other)
                torch.testing.assert_close(
                    prediction.outputs["output"], expected, atol=atol, rtol=0
                )
                assert prediction.num_missing > 0 or name == "delta"
            model.train()
        assert list(base.row_errors) == ["t"]
        parts = {(part.name, part.dim): part for part in predictor.manifest.tables}
        assert list(parts) == [("t", 8), ("t", 3), ("t", 1)]
        if kind == "plain":
            assert sum(part.rows for part in parts.values()) == base.rows

    with Job(2) as job:
        job.run(1, work)


def answer_of(trainer: tr.Trainer, batch: Batch) -> torch.Tensor:
    """Of the trained model itself, in evaluation."""
    model = trainer.model.eval()
    plan = tr.nn.Planner(model, pool=trainer.cluster.pool).plan(batch, train=False)
    pulled = trainer.cluster.client.pull(plan.keys())
    with torch.no_grad():
        lookups = plan.lookups(plan.leaves(pulled.rows, train=False))
        answer: torch.Tensor = model(Batch(dict(batch.items()), None, lookups))
    return answer


@pytest.mark.parametrize("kind", KINDS)
def test_parquet_has_rows_of_their_dims_and_brings_them_back(kind: str, tmp_path: Path) -> None:
    def export(cluster: Cluster) -> float:
        trainer = trainer_of(cluster, kind)
        trainer.fit(batches_of(0))
        tr.interchange.export_parquet(trainer, tmp_path / "rows", state=True)
        return answers(trainer)

    def load(cluster: Cluster) -> float:
        trainer = trainer_of(cluster, kind)
        trainer.fit(batches_of(0, 2))
        tr.interchange.import_parquet(trainer, "t", tmp_path / "rows" / "t", replace=True)
        return answers(trainer)

    with Job(2) as job:
        job.run(1, export)
        before = {key: row_class for key, (row_class, _) in content(job).items()}
    stored = pq.read_table(tmp_path / "rows" / "t")
    lengths = {
        key: len(row) for key, row in zip(*stored.select([0, 1]).to_pydict().values(), strict=True)
    }
    assert lengths == {key: (8, 3, 1, 1)[number] for key, number in before.items()}
    assert {8, 3, 1} == set(lengths.values())
    with Job(3) as job:
        job.run(1, load)
        after = {key: row_class for key, (row_class, _) in content(job).items()}
    if kind == "heads":  # a row of one weight may be either, and is a head until its next push
        before = {key: 3 if number == 2 else number for key, number in before.items()}
    assert after == before


def test_arrays_come_in_as_rows_of_their_dim() -> None:
    """What another system learned of one feature; its keys are salted."""
    with embedded(threads=2) as cluster:
        trainer = trainer_of(cluster, "plain")
        ids, vectors = np.arange(5), np.arange(15, dtype=np.float32).reshape(5, 3)
        keys = tr.nn.keys_of("ad", ids)
        tr.interchange.import_arrays(trainer, "t", {"key": keys, "weights": vectors})
        actual = rows_in(cluster, trainer.model)["ad"]
        np.testing.assert_array_equal(actual[:5], vectors)
        with pytest.raises(tr.errors.BadRequest, match=r"shape \(5, 8\), found \(5, 4\)"):
            tr.interchange.import_arrays(
                trainer, "t", {"key": keys, "weights": np.ones((5, 4), np.float32)}
            )


@pytest.mark.parametrize(
    "rule",
    [
        tr.optim.Adagrad(lr=0.1, initial_accumulator_value=0.3),
        tr.optim.Adagrad(lr=0.1, initial_accumulator_value=0.3, shared=True),
        tr.optim.Adam(lr=0.1, bias_correction="row"),
        tr.optim.FleetAdagrad(lr=0.1, shared=False),
        tr.optim.FleetAdam(lr=0.1),
        tr.optim.FleetSharedAdam(lr=0.1),
    ],
    ids=str,
)
def test_imported_rows_are_trained_as_those_of_a_table_of_their_dim(rule: tr.optim.Rule) -> None:
    """Their state begins as it does there, also where the widest class is not the first."""
    dims = {"narrow": 3, "wide": 8, "number": 1}

    def trained(cluster: Cluster, name: str, features: dict[str, int]) -> dict[str, torch.Tensor]:
        model = nn.ModuleDict()
        table = tr.Table(name, dims=features, salt=True, optimizer=rule)
        for feature in features:
            model[feature] = tr.nn.EmbeddingBag(table, features=[feature])
        model.forward = lambda batch: sum(  # type: ignore[assignment]
            (rows(batch) ** 2).sum() for rows in model.values()
        )
        trainer = tr.Trainer(
            model, None, loss=lambda x, _: x, label=None, cluster=cluster, progress=False
        )
        for feature, dim in features.items():
            weights = np.random.default_rng(dim).normal(size=(4, dim)).astype(np.float32)
            columns = {"key": np.arange(4), "weights": weights}
            tr.interchange.import_arrays(trainer, name, columns, feature=feature)
        batch = {feature: torch.arange(4) for feature in features}
        trainer.fit([batch, batch])
        return {feature: model[feature].eval()(batch).detach() for feature in features}

    with embedded(threads=2) as cluster:
        together = trained(cluster, "t", dims)
        for feature, dim in dims.items():
            alone = trained(cluster, feature, {feature: dim})
            assert torch.equal(together[feature], alone[feature])


def test_imported_rows_have_the_dim_of_their_feature(tmp_path: Path) -> None:
    """With another training would read other weights than a Predictor."""
    model = tr.nn.EmbeddingBag(tr.Table("t", dims={"a": 3, "b": 8}, salt=True), features=["a", "b"])
    with embedded(threads=1) as cluster:
        trainer = tr.Trainer(model, None, loss=lambda x, _: x, label=None, cluster=cluster)
        for dim, feature in ((8, "a"), (3, "b")):
            rows = {"key": [5, 6], "weights": [[1.0] * dim] * 2}
            pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
            arrays = {"key": np.array([5, 6]), "weights": np.ones((2, dim), np.float32)}
            with pytest.raises(DataError, match=rf"expected {11 - dim} weights, found {dim}"):
                tr.interchange.import_arrays(trainer, "t", arrays, feature=feature)
            with pytest.raises(DataError, match=rf"expected {11 - dim} weights, found {dim}"):
                tr.interchange.import_parquet(trainer, "t", tmp_path, feature=feature)
        [stats] = cluster.client.stats()
        assert stats["tables"]["t"]["rows"] == 0


def test_an_export_of_fleets_adam_comes_back(tmp_path: Path) -> None:
    """Its state has first moments, which may be negative, where a narrower row has squares."""
    dims = {"narrow": 3, "wide": 8}
    table = tr.Table("t", dims=dims, salt=True, optimizer=tr.optim.FleetAdam(lr=0.1))
    model = tr.nn.EmbeddingBag(table, features=list(dims))
    with embedded(threads=2) as cluster:
        trainer = tr.Trainer(
            model, None, loss=lambda x, _: -x.sum(), label=None, cluster=cluster, progress=False
        )
        batch = {feature: torch.arange(4) for feature in dims}
        trainer.fit([batch, batch])
        tr.interchange.export_parquet(trainer, tmp_path / "rows", state=True)
        before = pq.read_table(tmp_path / "rows" / "t").sort_by("key")
        tr.interchange.import_parquet(trainer, "t", tmp_path / "rows" / "t", replace=True)
        tr.interchange.export_parquet(trainer, tmp_path / "again", state=True)
        assert pq.read_table(tmp_path / "again" / "t").sort_by("key") == before


def test_columns_that_a_row_lacks_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """inspect counts the numbers that there are, and shows a row of its length."""

    def work(cluster: Cluster) -> None:
        trainer = trainer_of(cluster, "plain")
        trainer.fit(batches_of(0, 2))
        trainer.save(tmp_path / "full")
        export_model(trainer, tmp_path / "export", batch=batch_of(0, 0))

    with Job(1) as job:
        job.run(1, work)
        dims = [(8, 3, 1)[row_class] for row_class, _ in content(job).values()]
    key = int(tr.nn.keys_of("ad", batch_of(0, 0)["ad"].values[:1])[0])
    assert cli.main(["inspect", str(tmp_path / "full"), "--key", str(key)]) == 0
    text = capsys.readouterr().out
    assert "weights (3): " in text
    assert "state (6): " in text  # Adam's
    assert cli.main(["inspect", str(tmp_path / "full")]) == 0
    lines = {
        words[0]: words for line in capsys.readouterr().out.splitlines() if (words := line.split())
    }
    assert (lines["weights"][1], lines["state"][1]) == (f"{sum(dims):,}", f"{2 * sum(dims):,}")
    assert cli.main(["inspect", str(tmp_path / "export"), "--key", str(key)]) == 0
    text = capsys.readouterr().out
    assert f"table t, dim 8, key {key}: no row" in text
    assert f"table t, dim 3, key {key}\n  weights (3): " in text
