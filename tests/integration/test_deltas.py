"""Deltas of exports: a Predictor follows the training and never mixes two versions."""

from __future__ import annotations

import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job
from trireme import _core
from trireme.errors import BadRequest, Corruption, Unavailable
from trireme.inference import Predictor
from trireme.inference import predictor as predictors
from trireme.inference.export import export_model
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.server.state import ServerState

NUM_KEYS = 2000


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("t", dim=4, optimizer=tr.optim.Adagrad(lr=0.5), salt=True, seed=5)
        self.rows = tr.nn.EmbeddingBag(table, features=["a", "b"])
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.rows(batch).flatten(1)))
        return logits.squeeze(1)


def batch_of(seed: int, num: int = 64) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    ids = {name: torch.from_numpy(rng.integers(0, NUM_KEYS, num)) for name in ("a", "b")}
    return {**ids, "label": torch.from_numpy(rng.integers(0, 2, num).astype(np.float32))}


def trainer_of(cluster: Cluster) -> tr.Trainer:
    torch.manual_seed(1)
    model = Model()
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.05),
        loss=nn.functional.binary_cross_entropy_with_logits,
        progress=False,
        cluster=cluster,
    )


EXAMPLES = batch_of(999, 500)


def answers(trainer: tr.Trainer) -> torch.Tensor:
    """Of the trained model itself, in evaluation."""
    model = trainer.model.eval()
    plan = tr.nn.Planner(model, pool=trainer.cluster.pool).plan(EXAMPLES)
    pulled = trainer.cluster.client.pull(plan.keys())
    batch = tr.data.Batch(dict(EXAMPLES))
    plan.attach(batch, pulled.rows, train=False)
    with torch.no_grad():
        actual: torch.Tensor = model(batch)
    model.train()
    return actual


def check(predictor: Predictor, trainer: tr.Trainer) -> None:
    actual = predictor.predict(EXAMPLES).outputs["output"]
    torch.testing.assert_close(actual, answers(trainer), atol=1e-5, rtol=0)


def follow(cluster: Cluster, folder: Path) -> None:
    trainer = trainer_of(cluster)
    trainer.fit([batch_of(0)])
    export_model(trainer, folder / "base", batch=EXAMPLES)
    predictor, follows = Predictor(folder / "base"), folder / "base"
    check(predictor, trainer)
    for i in range(1, 4):
        trainer.fit([batch_of(i, 8)])
        report = export_model(trainer, folder / f"d{i}", batch=EXAMPLES, follows=follows)
        follows = folder / f"d{i}"
        assert 0 < report.rows <= 16
        before = predictor.version
        predictor.apply(folder / f"d{i}")
        assert predictor.version == report.version > before
        check(predictor, trainer)
    again = Predictor(folder / "base")
    for i in range(1, 4):
        again.apply(folder / f"d{i}")
    check(again, trainer)


def test_a_predictor_follows_the_training_delta_by_delta(tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        follow(cluster, tmp_path)


def test_two_servers_write_one_delta(tmp_path: Path) -> None:
    with Job(2) as job:
        job.run(1, lambda cluster: follow(cluster, tmp_path))


def test_many_deltas_are_merged_and_removed_keys_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictors, "DELTAS_MAX", 2)

    def run(cluster: Cluster) -> None:
        trainer = trainer_of(cluster)
        trainer.fit([batch_of(i) for i in range(10)])
        export_model(trainer, tmp_path / "base", batch=EXAMPLES, dtype="float32")
        predictor, follows = Predictor(tmp_path / "base"), tmp_path / "base"
        missing = predictor.predict(EXAMPLES).num_missing
        for i in range(5):
            trainer.fit([batch_of(100 + i, 8)])
            if i == 2:
                remove(
                    job.servers[0].state,
                    tr.nn.Planner(trainer.model, pool=cluster.pool).plan(batch_of(0)),
                )
            export_model(trainer, tmp_path / f"d{i}", batch=EXAMPLES, follows=follows)
            follows = tmp_path / f"d{i}"
            predictor.apply(follows)
            check(predictor, trainer)
        assert predictor.predict(EXAMPLES).num_missing > missing

    with Job(1) as job:
        job.run(1, run)


def remove(state: ServerState, plan: tr.nn.BatchPlan) -> None:
    """Take the rows of a batch out of the table, as expiry does."""
    [part] = plan.tables
    assert state.tables["t"].rows.erase(part.keys, _core.Pool(1)) > 50


def test_what_is_published_is_whole_though_the_coordinator_does_not_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Job(2) as job, job.join(0, 1) as cluster:
        trainer, servers = trainer_of(cluster), cluster.client.servers
        save, ask = partial(export_model, trainer, batch=EXAMPLES), servers.ask

        def unheard(method: str, body: dict[str, Any], **options: Any) -> Any:
            if method == "coord.published":
                raise Unavailable("coord.published: not reached")
            return ask(method, body, **options)

        trainer.fit([batch_of(0)])
        save(tmp_path / "base")
        trainer.save(tmp_path / "saved", mode="base")
        trainer.fit([batch_of(1, 8)])
        monkeypatch.setattr(servers, "ask", unheard)
        with pytest.raises(Unavailable, match=r"coord\.published"):
            save(tmp_path / "d1", follows=tmp_path / "base")
        with pytest.raises(Unavailable, match=r"coord\.published"):
            trainer.save(tmp_path / "s1", mode="delta")
        monkeypatch.undo()
        at_s1 = answers(trainer)
        of_d1, later = Predictor(tmp_path / "base"), Predictor(tmp_path / "base")
        of_d1.apply(tmp_path / "d1")
        check(of_d1, trainer)
        trainer.fit([batch_of(2, 8)])
        with pytest.raises(BadRequest, match="write a base"):
            save(tmp_path / "d2", follows=tmp_path / "d1")
        save(tmp_path / "d2", follows=tmp_path / "base")
        trainer.save(tmp_path / "s2", mode="delta")
        later.apply(tmp_path / "d2")
        check(later, trainer)
        for delta, expected in (("s2", answers(trainer)), ("s1", at_s1)):
            trainer.load(tmp_path / "saved")
            trainer.load(tmp_path / delta)
            torch.testing.assert_close(answers(trainer), expected, atol=0, rtol=0)


def test_deltas_that_do_not_follow_are_refused(tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        trainer = trainer_of(cluster)
        save = partial(export_model, trainer)
        trainer.fit([batch_of(0)])
        with pytest.raises(BadRequest, match=r"expected .*manifest.json, found none"):
            save(tmp_path / "d", batch=EXAMPLES, follows=tmp_path / "x")
        save(tmp_path / "other", batch=EXAMPLES)
        save(tmp_path / "base", batch=EXAMPLES)
        save(tmp_path / "d1", batch=EXAMPLES, follows=tmp_path / "base")
        save(tmp_path / "d2", batch=EXAMPLES, follows=tmp_path / "d1")
        with pytest.raises(BadRequest, match="expected dtype float32 in a delta"):
            save(tmp_path / "d3", batch=EXAMPLES, follows=tmp_path / "d2", dtype="int8")
        with pytest.raises(BadRequest, match="a delta that follows the last export of this run"):
            save(tmp_path / "d3", batch=EXAMPLES, follows=tmp_path / "base")
        save(tmp_path / "e1", batch=EXAMPLES, follows=tmp_path / "other")
        part = trainer.model.rows
        with pytest.raises(BadRequest, match="expected a model as of export"):
            save(tmp_path / "d3", batch=EXAMPLES, model=part, follows=tmp_path / "e1")
    assert not (tmp_path / "d3").exists()
    predictor = Predictor(tmp_path / "base")
    expected = predictor.predict(EXAMPLES).outputs["output"]
    for name, words in (
        ("other", "expected a delta, found the base"),
        ("d2", "expected a delta that follows version"),
        ("e1", "expected a delta that follows version"),
        ("none", "expected .*manifest.json, found none"),
    ):
        with pytest.raises(BadRequest, match=words):
            predictor.apply(tmp_path / name)
    with pytest.raises(BadRequest, match="expected a base, found the delta"):
        Predictor(tmp_path / "d1")
    torch.testing.assert_close(predictor.predict(EXAMPLES).outputs["output"], expected)
    predictor.apply(tmp_path / "d1")
    predictor.apply(tmp_path / "d2")


def test_after_a_load_deltas_follow_the_exports_of_the_checkpoint(tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        trainer = trainer_of(cluster)
        trainer.fit([batch_of(0)])
        export_model(trainer, tmp_path / "base", batch=EXAMPLES)
        trainer.fit([batch_of(1, 8)])
        trainer.save(tmp_path / "checkpoint")
        trainer.fit([batch_of(2)])
        export_model(trainer, tmp_path / "lost", batch=EXAMPLES, follows=tmp_path / "base")
    with embedded(threads=2) as cluster:
        trainer = trainer_of(cluster)
        trainer.load(tmp_path / "checkpoint")
        trainer.fit([batch_of(3, 8)])
        save = partial(export_model, trainer)
        with pytest.raises(BadRequest, match=r"a load forgets the exports .* after its checkpoint"):
            save(tmp_path / "d", batch=EXAMPLES, follows=tmp_path / "lost")
        report = save(tmp_path / "d", batch=EXAMPLES, follows=tmp_path / "base")
        assert 16 < report.rows <= 32
        predictor = Predictor(tmp_path / "base")
        predictor.apply(tmp_path / "d")
        check(predictor, trainer)


def test_readers_never_see_half_of_a_delta(tmp_path: Path) -> None:
    """Rows and the dense part are the version's number; readers see their product alone."""
    table = tr.Table(
        "t", dim=1, optimizer=tr.optim.SGD(lr=1.0), initializer=tr.initializer.Constant(0.0)
    )

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = tr.nn.EmbeddingBag(table, features=["a"])
            self.factor = nn.Parameter(torch.zeros(1))

        def forward(self, batch: Any) -> torch.Tensor:
            rows: torch.Tensor = self.rows(batch)
            return torch.cat([rows.flatten(1), self.factor.expand(rows.shape[0], 1)], 1)

    model = Square()
    ids = {"a": torch.arange(3000)}
    with embedded(threads=2) as cluster:
        trainer = tr.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0 / 3000),
            loss=lambda both, _: -both.sum(),
            label=None,
            progress=False,
            cluster=cluster,
        )
        trainer.fit([ids])
        export_model(trainer, tmp_path / "0", batch=ids)
        for i in range(1, 7):
            trainer.fit([ids])
            export_model(trainer, tmp_path / str(i), batch=ids, follows=tmp_path / str(i - 1))
    predictor = Predictor(tmp_path / "0", threads=1)
    done = threading.Event()
    wrong: list[Any] = []
    seen = set[int]()

    def read() -> None:
        while not done.is_set():
            prediction = predictor.predict(ids)
            values = prediction.outputs["output"].round().unique()
            seen.add(prediction.version)
            if len(values) != 1:
                wrong.append((prediction.version, values))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(1, 7):
        predictor.apply(tmp_path / str(i))
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert seen
    final = predictor.predict(ids).outputs["output"]
    torch.testing.assert_close(final, torch.full((3000, 2), 7.0), atol=1e-3, rtol=0)


def test_checkpoints_and_exports_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Deltas of checkpoints and for inference in turn, each with a chain of its own."""
    with embedded(threads=2) as cluster:
        trainer = trainer_of(cluster)
        trainer.fit([batch_of(0)])
        trainer.save(tmp_path / "full")
        export_model(trainer, tmp_path / "base", batch=EXAMPLES)
        predictor, follows = Predictor(tmp_path / "base"), tmp_path / "base"
        for i in range(1, 3):
            trainer.fit([batch_of(i, 8)])
            trainer.save(tmp_path / f"delta{i}", mode="delta")
            export_model(trainer, tmp_path / f"d{i}", batch=EXAMPLES, follows=follows)
            follows = tmp_path / f"d{i}"
            predictor.apply(follows)
            check(predictor, trainer)
        expected = answers(trainer)
    with embedded(threads=2) as cluster:
        trainer = trainer_of(cluster)
        for name in ("full", "delta1", "delta2"):
            trainer.load(tmp_path / name)
        torch.testing.assert_close(answers(trainer), expected, atol=0, rtol=0)


def test_damaged_deltas_are_refused_by_name_and_change_nothing(tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        trainer = trainer_of(cluster)
        trainer.fit([batch_of(0)])
        export_model(trainer, tmp_path / "base", batch=EXAMPLES)
        trainer.fit([batch_of(1)])
        export_model(trainer, tmp_path / "d", batch=EXAMPLES, follows=tmp_path / "base")
    predictor = Predictor(tmp_path / "base")
    expected = predictor.predict(EXAMPLES).outputs["output"]
    files = [path for path in (tmp_path / "d").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors", ".rows"}
    for file in files:
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        for damaged in (flipped, whole[: len(whole) // 2], b""):
            file.write_bytes(damaged)
            with pytest.raises(Corruption, match=re.escape(str(file))):
                predictor.apply(tmp_path / "d")
        file.write_bytes(whole)
    assert torch.equal(predictor.predict(EXAMPLES).outputs["output"], expected)
    predictor.apply(tmp_path / "d")
