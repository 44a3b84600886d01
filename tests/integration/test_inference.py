"""Exports: a Predictor answers as the trained model does."""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests import zoo_trainers
from tests.jobs import Job
from trireme.errors import BadRequest, Corruption, DataError
from trireme.inference import Predictor, predictor, row_layers
from trireme.inference.dense_program import load_program
from trireme.inference.export import export_model
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.policy import CountFilter, CtrCommonAccessor, ShowClick

NAMES = tuple(zoo_trainers.SMALL)


@dataclass
class Exported:
    """A trained model, its trainer still there, and what has been written of it."""

    name: str
    trainer: tr.Trainer
    schema: tr.data.Schema
    folder: Path

    def examples(self, num: int, seed: int) -> tr.data.Batch:
        """Some of their keys are unknown."""
        return zoo_trainers.examples(self.name, num, seed, schema=self.schema, keys=1000)

    def answers(self, batch: tr.data.Batch) -> torch.Tensor:
        """Of the trained model itself, in evaluation."""
        model = self.trainer.model.eval()
        planner = tr.nn.Planner(model, pool=self.trainer.cluster.pool)
        plan = planner.plan(batch, train=False)
        pulled = self.trainer.optimizer.pull_rows(plan.keys(), training=False)
        plan.attach(batch, pulled.rows, train=False)
        with torch.no_grad():
            actual: torch.Tensor = model(batch)
        batch.lookups = {}
        model.train()
        return actual


def export(name: str, cluster: Cluster, folder: Path, **options: Any) -> Exported:
    recipe = zoo_trainers.recipe_of(name)
    trainer = zoo_trainers.trainer_of(name, cluster, recipe)
    zoo_trainers.train(name, trainer, recipe.schema)
    example = zoo_trainers.examples(name, 16, 99, schema=recipe.schema)
    export_model(trainer, folder, batch=example, **options)
    return Exported(name, trainer, recipe.schema, folder)


def check(exported: Exported, predictor: Predictor, *, atol: float = 1e-5) -> None:
    for num in (1, 2, 7, 40):
        batch = exported.examples(num, 100 + num)
        prediction = predictor.predict(batch)
        expected = exported.answers(batch)
        torch.testing.assert_close(prediction.outputs["output"], expected, atol=atol, rtol=0)
        assert 0 < prediction.num_missing < prediction.num_keys
        assert prediction.version == predictor.version


@pytest.mark.parametrize("name", NAMES)
def test_a_predictor_answers_as_the_trained_model(name: str, tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        exported = export(name, cluster, tmp_path / "export")
        check(exported, Predictor(exported.folder))


@pytest.mark.parametrize("name", ["deepfm", "din"])
def test_two_servers_write_one_export(name: str, tmp_path: Path) -> None:
    def run(cluster: Cluster) -> None:
        exported = export(name, cluster, tmp_path / "export")
        check(exported, Predictor(exported.folder, verify=False))

    with Job(2) as job:
        job.run(1, run)
    assert len(list((tmp_path / "export/tables/0").iterdir())) == 2


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_smaller_rows_answer_within_the_error_that_is_reported(dtype: str, tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        exported = export("deepfm", cluster, tmp_path / "whole")
        example = exported.examples(200, 99)
        report = export_model(exported.trainer, tmp_path / "s", batch=example, dtype=dtype)
        predictor = Predictor(tmp_path / "s")
        actual = predictor.predict(example).outputs["output"]
        difference = (actual - exported.answers(example)).abs()
    [(largest, rms)] = report.row_errors.values()
    assert 0 < rms < largest < {"float16": 2e-4, "int8": 2e-3}[dtype]
    assert 0 < report.rms_error < report.max_error < 0.01
    assert float(difference.max()) <= report.max_error + 1e-6
    sizes = [
        sum(file.stat().st_size for file in folder.rglob("*.rows"))
        for folder in (tmp_path / "whole", tmp_path / "s")
    ]
    assert sizes[1] < sizes[0]


def test_a_submodule_is_exported_alone(tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        exported = export("two_tower", cluster, tmp_path / "whole")
        tower = exported.trainer.model.item
        example = exported.examples(8, 1)
        report = export_model(exported.trainer, tmp_path / "item", batch=example, model=tower)
        assert list(report.row_errors) == ["item"]
        vectors = Predictor(tmp_path / "item").predict(
            {name: example[name] for name in ("item_id", "item_cat")}
        )
    assert vectors.outputs["output"].shape == (8, 4)


def test_inputs_may_be_arrays_and_lists(tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        exported = export("din", cluster, tmp_path / "export")
    predictor = Predictor(tmp_path / "export")
    ids = [[3, 4], [], [2**64 - 1]]
    values = np.array([3, 4, 2**64 - 1], np.uint64)
    offsets = np.array([0, 2, 2, 3])
    targets = {name: np.array([5, 6, 7]) for name in ("target_item", "target_cat")}
    of_lists = predictor.predict({"hist_item_seq": ids, "hist_cat_seq": ids, **targets})
    pairs = dict.fromkeys(("hist_item_seq", "hist_cat_seq"), (values, offsets))
    of_arrays = predictor.predict({**pairs, **targets, "label": ["x", "y", "z"]})
    ragged = tr.data.Ragged(torch.from_numpy(values.view(np.int64)), torch.from_numpy(offsets))
    names = ("hist_item_seq", "hist_cat_seq")
    of_tensors = predictor.predict(
        dict.fromkeys(names, ragged) | {k: torch.from_numpy(v) for k, v in targets.items()}
    )
    torch.testing.assert_close(of_lists.outputs, of_arrays.outputs, atol=0, rtol=0)
    torch.testing.assert_close(of_lists.outputs, of_tensors.outputs, atol=0, rtol=0)
    with pytest.raises(BadRequest, match=r"expected feature 'target_item' in the batch, found"):
        predictor.predict(dict.fromkeys(names, ids))
    with pytest.raises(BadRequest, match=r"'hist_item_seq': .* found \['a', 3\], .* in row 0"):
        predictor.predict({"hist_item_seq": [["a", 3]]})
    assert exported.name == "din"


def test_one_example_is_enough_to_export_a_model(tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        exported = export("din", cluster, tmp_path / "export")
        one = {name: [[7]] for name in ("hist_item_seq", "hist_cat_seq")}
        one |= {name: np.array([5]) for name in ("target_item", "target_cat")}
        save = partial(export_model, exported.trainer)
        save(tmp_path / "one", batch=one)
        check(exported, Predictor(tmp_path / "one"))
        none = one | {name: [[]] for name in ("hist_item_seq", "hist_cat_seq")}
        with pytest.raises(BadRequest, match=r"an example batch with ids of lookup 'item:none"):
            save(tmp_path / "none", batch=none)


def test_columns_of_another_form_are_refused_by_name(tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        exported = export("deepfm", cluster, tmp_path / "export")
    predictor = Predictor(tmp_path / "export")
    batch = exported.examples(3, 1)
    columns = dict(batch.items())
    del columns["dense_feature"]
    with pytest.raises(BadRequest, match=r"expected column 'dense_feature' in the batch, found"):
        predictor.predict(columns)
    for dense in (torch.zeros(3, 12), torch.full((3, 13), 2**24 + 1), torch.zeros(3)):
        with pytest.raises(
            BadRequest, match=r"column 'dense_feature' as float32 of shape \(any, 13\), found"
        ):
            predictor.predict(columns | {"dense_feature": dense})
    with pytest.raises(BadRequest, match=r"expected columns of the same examples, found"):
        predictor.predict(columns | {"dense_feature": torch.zeros(4, 13)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused_as_by_a_trainer(value: float, tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        exported = export("deepfm", cluster, tmp_path / "export")
        batch = exported.examples(3, 1)
        dense = torch.zeros(3, 13, dtype=torch.float64)
        dense[1, 4] = value
        columns = {**batch, "dense_feature": dense}
        predictor = Predictor(tmp_path / "export")
        for predict in (exported.trainer.predict, predictor.predict):
            with pytest.raises(
                DataError, match=rf"finite .*'dense_feature'.* found {value} at .1, 4"
            ):
                predict(columns)
    large = dense.clone()
    large[1, 4] = 1e300
    with pytest.raises(DataError, match=r"'dense_feature', found inf at \(1, 4\)"):
        predictor.predict(columns | {"dense_feature": large})
    as_it_is = tr.data.Batch({**batch, "dense_feature": dense})
    assert not torch.isfinite(predictor.predict(as_it_is).outputs["output"]).all()
    unread = dict(batch.items()) | {"label": torch.full((3,), value)}
    assert torch.isfinite(predictor.predict(unread).outputs["output"]).all()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = (flip, truncate, Path.unlink, lambda path: path.write_bytes(b""))


def test_damaged_exports_are_refused_by_name(tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        whole = export("deepfm", cluster, tmp_path / "export").folder
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".pt2", ".rows"}
    for file in files:
        for damage in DAMAGES:
            copy = tmp_path / "copy"
            shutil.copytree(whole, copy)
            damage(copy / file)
            with pytest.raises((Corruption, BadRequest), match=re.escape(str(copy / file))):
                Predictor(copy)
            shutil.rmtree(copy)
    with pytest.raises(BadRequest, match=r"expected .*manifest.json, found none"):
        Predictor(tmp_path)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_an_export_that_is_replaced_while_it_is_opened_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """Also without checksums, by which rows of one and the dense part of another would differ."""
    with embedded(threads=2) as cluster:
        exported = export("deepfm", cluster, tmp_path / "export")
        zoo_trainers.train("deepfm", exported.trainer, exported.schema)
        newer = tmp_path / "newer"
        export_model(exported.trainer, newer, batch=exported.examples(16, 99))

    def load(*arguments: Any, **options: Any) -> Any:
        shutil.rmtree(exported.folder)
        if is_replaced:
            newer.rename(exported.folder)
        return load_program(*arguments, **options)

    monkeypatch.setattr(predictor, "load_program", load)
    with pytest.raises(BadRequest, match="was replaced" if is_replaced else "found none"):
        Predictor(exported.folder, verify=False)


def test_what_a_predictor_cannot_read_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with embedded(threads=2) as cluster:
        folder = export("deepfm", cluster, tmp_path / "export").folder

    whole = row_layers.mapped

    def cut(path: Path) -> mmap.mmap:
        memory = whole(path)
        os.truncate(path, 0)  # a touch beyond the end is SIGBUS, as that of a bad sector
        return memory

    def refuse(path: Path) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    for broken, match in ((refuse, f"cannot read {folder}: Cannot"), (cut, r"\.rows: expected to")):
        monkeypatch.setattr(row_layers, "mapped", broken)
        with pytest.raises((BadRequest, Corruption), match=match):
            Predictor(folder)


def test_impossible_exports_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        exported = export("deepfm", cluster, tmp_path / "export")
        trainer, batch = exported.trainer, exported.examples(4, 1)
        save = partial(export_model, trainer)
        with pytest.raises(BadRequest, match=r"expected a new folder, found .*export"):
            save(tmp_path / "export", batch=batch)
        with pytest.raises(
            BadRequest, match="expected dtype as one of float32, float16, int8, found 'half'"
        ):
            save(tmp_path / "new", batch=batch, dtype="half")

        class Branching(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model = model

            def forward(self, batch: Any) -> torch.Tensor:
                logits: torch.Tensor = self.model(batch)
                return logits if logits.sum() > 0 else -logits

        with pytest.raises(BadRequest, match=r"a model that torch.export takes, found"):
            save(tmp_path / "new", batch=batch, model=Branching(trainer.model))
        assert trainer.model.training
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_processes_share_the_pages_of_an_export(tmp_path: Path) -> None:
    """A table of 20 MB: looking all of it up adds next to nothing to a process' own memory."""
    rows, dim = 60_000, 80
    keys = np.arange(rows, dtype=np.uint64)
    table = tr.Table("t", dim=dim, optimizer=tr.optim.SGD(lr=1.0))
    model = tr.nn.EmbeddingBag(table, features=["a"])
    with embedded(threads=2) as cluster:
        trainer = tr.Trainer(
            model, None, loss=lambda out, _: out.sum(), label=None, progress=False, cluster=cluster
        )
        trainer.fit([{"a": torch.from_numpy(part.view(np.int64))} for part in np.split(keys, 10)])
        export_model(trainer, tmp_path / "e", batch={"a": torch.arange(5)})
    children = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(tmp_path / "e"), str(rows)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    actual = []
    try:
        for child in children:  # all have looked everything up before the first one ends
            assert child.stdout is not None
            actual.append([int(number) for number in child.stdout.readline().split()])
    finally:
        for child in children:
            child.communicate("", timeout=60)
    for private_before, private_after, shared, missing in actual:
        assert missing == 0
        assert private_after - private_before < 6 << 20
        assert shared > rows * dim * 4


READER = """
import sys
import torch
from trireme.errors import BadRequest, Corruption, DataError
from trireme.inference import Predictor
from trireme.policy import CountFilter, CtrCommonAccessor, ShowClick

def of(field, path="/proc/self/smaps_rollup"):
    return sum(int(line.split()[1]) << 10 for line in open(path) if line.startswith(field))

predictor = Predictor(sys.argv[1], threads=1)
def look_up(begin, num):
    return predictor.predict({"a": torch.arange(begin, begin + num)}).num_missing

torch.set_num_threads(1)
look_up(0, 1000)
before = of("Private_Dirty")
missing = sum(look_up(begin, 1000) for begin in range(0, int(sys.argv[2]), 1000))
print(before, of("Private_Dirty"), of("Rss"), missing, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_shows_clicks_heads_and_narrow_weights_are_answered_as_in_training(
    dtype: str, tmp_path: Path
) -> None:
    """Of a table whose lookups answer statistics, whose rows are heads at first, and which admits
    a key at its second occurrence; and of one of 16-bit weights.
    """
    policy = CtrCommonAccessor(show_click=ShowClick("show", "click"), embedx_threshold=2.0)
    scored = tr.Table(
        "scored",
        dim=5,
        optimizer=tr.optim.FleetAdagrad(lr=0.1),
        policy=policy,
        admit=CountFilter(2),
    )
    narrow = tr.Table("narrow", dim=4, dtype="bfloat16", absent="zeros")
    model = Statistics(scored, narrow)
    rng = np.random.default_rng(0)

    def examples(num: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(rng.zipf(1.3, (2, num)) % 300)
        clicks = torch.from_numpy((rng.random(num) < 0.4).astype(np.float32))
        return {"a": ids[0], "b": ids[1], "show": torch.ones(num), "click": clicks}

    with embedded(threads=2) as cluster:
        trainer = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters(), lr=0.01),
            loss=nn.functional.binary_cross_entropy_with_logits,
            label="click",
            progress=False,
            cluster=cluster,
        )
        trainer.set_time(86_400 * 100)
        trainer.fit([examples(128) for _ in range(10)])
        trainer.set_time(86_400 * 103)
        example = examples(200)
        save = partial(export_model, trainer)
        report = save(tmp_path / "base", batch=example, dtype=dtype)
        predictor = Predictor(tmp_path / "base")
        exported = Exported("", trainer, None, tmp_path)  # type: ignore[arg-type]

        def compare() -> None:
            asked = {name: example[name] for name in ("a", "b")}
            actual = predictor.predict(asked).outputs["output"]
            expected = exported.answers(tr.data.Batch(dict(example)))
            limit = 1e-5 + report.max_error
            torch.testing.assert_close(actual, expected, atol=limit, rtol=0)

        compare()
        trainer.fit([examples(128)])
        report = save(tmp_path / "delta", batch=example, follows=tmp_path / "base")
        predictor.apply(tmp_path / "delta")
        compare()
    assert (report.max_error > 0) == (dtype == "float16")


class Statistics(nn.Module):
    def __init__(self, scored: tr.Table, narrow: tr.Table) -> None:
        super().__init__()
        self.scored = tr.nn.EmbeddingBag(scored, features=["a", "b"])
        self.narrow = tr.nn.Embedding(narrow, features="b")
        self.cvm = tr.nn.CVM()
        self.head = nn.Linear(2 * 7 + 4, 1)

    def forward(self, batch: tr.data.Batch) -> torch.Tensor:
        rows = self.scored(batch)
        counts = rows.new_ones(rows.shape[0], 2)
        x = torch.cat([self.cvm(rows, counts).flatten(1), self.narrow(batch)], 1)
        logits: torch.Tensor = self.head(x)
        return logits.squeeze(1)
