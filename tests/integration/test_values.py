"""The same values in training, imports, files and serving."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trireme as tr
from tests.jobs import Job
from trireme.commands.cli import main
from trireme.errors import BadRequest, DataError, SchemaMismatch
from trireme.inference import Predictor
from trireme.inference.export import export_model
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded

FRAME = pd.DataFrame(
    {
        "user": np.arange(40, dtype=np.int32),
        "movie": ["Heat", "Up"] * 20,
        "genres": [["war"], ["drama", "war"], [], ["comedy"]] * 10,
        "age": np.linspace(20, 60, 40),
        "label": [True, False] * 20,
    }
)


class Model(torch.nn.Module):
    def __init__(self, *, salt: bool) -> None:
        super().__init__()
        table = tr.Table("t", dim=4, salt=salt, optimizer=tr.optim.Adagrad(lr=0.1))
        self.table = table
        self.rows = tr.nn.EmbeddingBag(table, features=["user", "movie", "genres"])
        self.mlp = torch.nn.Linear(13, 1)

    def forward(self, batch: tr.data.Batch) -> torch.Tensor:
        x = torch.cat([self.rows(batch).flatten(1), batch["age"].reshape(-1, 1) / 100], 1)
        return self.mlp(x).squeeze(1)


def trainer_of(cluster: Cluster, *, salt: bool) -> tr.Trainer:
    set_default(cluster)
    model = Model(salt=salt)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    return tr.Trainer(model, adam, loss=loss, progress=False)


@pytest.mark.parametrize("salt", [False, True])
def test_outputs_have_the_same_bits_in_training_and_serving(tmp_path: Path, salt: bool) -> None:
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=salt)
        trainer.fit(FRAME, epochs=3)
        asked = FRAME.drop(columns="label")
        outputs = trainer.predict(asked)["output"]
        assert outputs.shape == (40,)
        parts = [asked[i : i + 8] for i in range(0, 40, 8)]
        again = trainer.predict([part.to_dict("list") for part in parts])["output"]
        torch.testing.assert_close(again, outputs)
        export_model(trainer, tmp_path / "export", batch=asked)
    predictor = Predictor(tmp_path / "export")
    assert predictor.manifest.texts == ("movie", "genres")
    prediction = predictor.predict(asked)
    assert torch.equal(prediction.outputs["output"], outputs)
    assert prediction.num_missing == 0
    assert predictor.manifest.integers == ("user",)
    for wrong, expected, shown in (
        ({"movie": 1}, "strings as feature 'movie'", "integers"),
        ({"user": "1"}, "integers as feature 'user'", "strings"),
        ({"genres": [[1]] * 40}, "strings as feature 'genres'", "integers"),
    ):
        with pytest.raises(BadRequest, match=f"expected {expected}, as in training, found {shown}"):
            predictor.predict(asked.assign(**wrong))


def test_strings_and_missing_values_where_the_model_reads_numbers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = FRAME.drop(columns=["label", "genres"]).assign(genres="war")
    texts = asked["age"].astype(str)
    texts[5] = "old"
    wrong = asked.assign(age=texts)
    missing = asked.assign(age=pd.array([1, None] * 20, "Int64"))
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=False)
        trainer.fit(FRAME)
        export_model(trainer, tmp_path / "export", batch=asked)
        for data, shown in (
            (wrong, "column 'age', found strings"),
            ([wrong], "column 'age', found strings, 'old' in row 5"),
            (
                missing,
                r"column 'age', found bags of ids, 0 in row 1 \(of numbers, a missing one: fi",
            ),
        ):
            with pytest.raises(BadRequest, match=f"expected numbers .* with {shown}"):
                trainer.predict(data)
    predictor = Predictor(tmp_path / "export")
    for data, shown in ((wrong, "strings, 'old' in row 5"), (missing, "bags of ids, 0 in row 1")):
        with pytest.raises(BadRequest, match=f"column 'age' as a tensor of float32, found {shown}"):
            predictor.predict(data)
    wrong.to_csv(tmp_path / "wrong.csv", index=False)
    files = ["--input", str(tmp_path / "wrong.csv"), "--format", "csv"]
    output = ["--output", str(tmp_path / "out.txt")]
    assert main(["predict", "-m", str(tmp_path / "export"), *files, *output]) == 2
    expected = r"wrong\.csv line 7: field 4 \(age\): expected a finite number, found 'old'"
    assert re.search(expected, capsys.readouterr().err)


def test_a_checkpoint_and_an_export_are_told_apart(tmp_path: Path) -> None:
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=False)
        trainer.fit(FRAME)
        trainer.save(tmp_path / "ckpt")
        export_model(trainer, tmp_path / "export", batch=FRAME)
        with pytest.raises(BadRequest, match="found that of an export for inference"):
            trainer.load(tmp_path / "export")
    with pytest.raises(BadRequest, match="found that of a checkpoint; export_model"):
        Predictor(tmp_path / "ckpt")
    predictor = Predictor(tmp_path / "export")
    strings = dict.fromkeys(("movie", "genres"), "strings")
    assert predictor.columns == {"user": "integers", **strings, "age": "float32 (B)"}
    assert repr(predictor).startswith("Predictor(version 2, user: integers, movie: strings, ")
    records = FRAME.head(2).to_dict("records")
    with pytest.raises(BadRequest, match=r"found list; of examples .* pandas\.DataFrame"):
        predictor.predict(records)


@pytest.mark.parametrize("salt", [False, True])
def test_values_of_another_kind_than_in_training_are_refused(tmp_path: Path, salt: bool) -> None:
    """Also by a model that has loaded a checkpoint; one that begins anew may take either."""
    wrong = FRAME.assign(user=FRAME["user"].astype(str))
    expected = "expected integers as feature 'user', as in training, found strings, which have oth"
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=salt)
        trainer.fit(FRAME)
        trainer.save(tmp_path / "ckpt")
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=salt)
        trainer.load(tmp_path / "ckpt")
        for use in (trainer.fit, trainer.evaluate, trainer.predict):
            with pytest.raises(BadRequest, match=expected):
                use(wrong)
        with pytest.raises(BadRequest, match=expected):
            trainer.model(wrong[:4].to_dict("list"))
        with pytest.raises(BadRequest, match=expected):
            next(iter(tr.prefetch([wrong[:4]], trainer.model)))
        with pytest.raises(BadRequest, match=expected):
            tr.TableView(trainer.model.table, "user")[["3"]]
        rows = {"key": [3], "weights": np.zeros((1, 4), np.float32)}
        with pytest.raises(BadRequest, match="expected strings as feature 'movie'"):
            tr.interchange.import_arrays(trainer, "t", rows, feature="movie")
        assert trainer.evaluate(FRAME)["examples"] == 40
        adam = torch.optim.Adam(trainer.model.parameters())
        tr.Trainer(trainer.model, adam, loss=trainer.loss, fresh=True, progress=False).fit(wrong)


def test_ids_in_place_of_the_keys_of_a_table_with_salt_are_refused() -> None:
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=True)
        rows = {"key": np.arange(3), "weights": np.zeros((3, 4), np.float32)}
        with pytest.raises(
            BadRequest, match=r"keys of table 't' with salt.*ids up to 2: give feat"
        ):
            tr.interchange.import_arrays(trainer, "t", rows)
        with pytest.raises(
            BadRequest, match="features that read it, user, movie, genres, found 'm'"
        ):
            tr.interchange.import_arrays(trainer, "t", rows, feature="m")


@pytest.mark.parametrize("salt", [False, True])
def test_exported_values_come_back(tmp_path: Path, salt: bool) -> None:
    """With their state. Values that have no row, and rows of other values, are left out."""
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=salt)
        trainer.fit(FRAME)
        export = partial(tr.interchange.export_parquet, trainer, state=True)
        users = np.array([5, 3, 99])
        assert export(tmp_path / "u", feature="user", values=users) == {"t": 2}
        movies = ["Alien", "Up", "Heat"]
        assert export(tmp_path / "m", feature="movie", values=pd.Series(movies)) == {"t": 2}
        written = pq.read_table(tmp_path / "m" / "t")
        assert written["key"].to_pylist() == ["Up", "Heat"]
        before = [weights_of(trainer, *one) for one in (("user", users), ("movie", movies))]
        assert written["weights"].to_pylist() == before[1][1:]
        export(tmp_path / "keys", tables=["t"])
        for wrong in ({"values": [1]}, {"feature": "user"}):
            with pytest.raises(BadRequest, match="feature and values together"):
                export(tmp_path / "w", **wrong)
        for feature, values, error in (
            ("user", [1, 1], "distinct values of 'user', found one twice"),
            ("user", ["1"], "expected integers as feature 'user'"),
            ("film", ["Up"], "features that read it"),
        ):
            with pytest.raises(BadRequest, match=error):
                export(tmp_path / "w", feature=feature, values=values)
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=salt)
        for folder, feature in (("u", "user"), ("m", "movie")):
            path = tmp_path / folder / "t"
            assert tr.interchange.import_parquet(trainer, "t", path, feature=feature) == 2
        after = [weights_of(trainer, *one) for one in (("user", users), ("movie", movies))]
        assert after == before
        frame = pd.read_parquet(tmp_path / "u" / "t")  # with lists, as pandas reads them
        wider = pd.Series([[1.0], [1.0, 2.0]])
        with pytest.raises(BadRequest, match=r"'weights' of rank 2, found shape \(2,\)"):
            tr.interchange.import_arrays(trainer, "t", frame.assign(weights=wider), feature="user")
        assert tr.interchange.import_arrays(trainer, "t", frame, feature="user") == 2
        tr.interchange.export_parquet(trainer, tmp_path / "again", state=True)
    kept, again = (rows_by_key(tmp_path / folder / "t") for folder in ("keys", "again"))
    assert len(again) == 4
    assert {key: kept[key] for key in again} == again


def weights_of(trainer: tr.Trainer, feature: str, values: Any) -> list[list[float]]:
    return tr.TableView(trainer.model.table, feature)[values].tolist()


def rows_by_key(path: Path) -> dict[int, dict[str, Any]]:
    return {row["key"]: row for row in pq.read_table(path).to_pylist()}


def test_rows_are_imported_and_seen_by_value() -> None:
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=True)
        trainer.optimizer.flush()
        weights = np.arange(8, dtype=np.float32).reshape(2, 4)
        arrays = {"key": ["Heat", "Alien"], "weights": weights}
        assert tr.interchange.import_arrays(trainer, "t", arrays, feature="movie") == 2
        view = tr.TableView(trainer.model.table, "movie", ["Heat", "Alien", "Up"])
        assert view[["Alien", "Heat"]].tolist() == weights[::-1].tolist()
        assert view.nearest(weights[1], 3).values == ["Alien", "Heat"]


@pytest.mark.parametrize("salt", [True, False])
def test_rows_of_parquet_files_are_imported_by_value(tmp_path: Path, *, salt: bool) -> None:
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = str(tmp_path / "movies.parquet")
    with Job(2) as job:

        def work(cluster: Cluster) -> None:
            set_default(cluster)
            trainer = trainer_of(cluster, salt=salt)

            def load(values: pa.Array, feature: str | None) -> int:
                lists = pa.array(weights[: len(values)].tolist(), pa.list_(pa.float32()))
                pq.write_table(pa.table({"movie": values, "weights": lists}), path)
                names = {"key": "movie"}
                return tr.interchange.import_parquet(
                    trainer, "t", path, columns=names, feature=feature
                )

            titles = pa.array(["Heat", "Alien", "Heat 2"])
            for values in (titles, titles.dictionary_encode()):
                assert load(values, "movie") == 3
                view = tr.TableView(trainer.model.table, "movie", titles.to_pylist())
                assert view[["Alien", "Heat 2", "Heat"]].tolist() == weights[[1, 2, 0]].tolist()
            assert load(pa.array([7, -3], pa.int32()), "user") == 2
            assert tr.TableView(trainer.model.table, "user", [7])[7].tolist() == weights[0].tolist()
            missing = "movies.parquet: expected a value of 'movie' in each row, found 1 "
            with pytest.raises(BadRequest, match=missing):
                load(pa.array(["Up", None]), "movie")
            with pytest.raises(BadRequest, match="as integers or strings, found double"):
                load(pa.array([1.5]), "movie")
            with pytest.raises(BadRequest, match="column 'key' of uint64"):
                load(titles, None)

        job.run(1, work)


def test_a_model_of_files_is_served_columns_of_numbers(tmp_path: Path) -> None:
    text = "user,movie,genres,age,label\n1,Heat,war,20,1\n2,Up,drama,30,0\n"
    (tmp_path / "part.csv").write_text(text)
    hashed = [tr.data.Sparse(name, hashed=True) for name in ("movie", "genres")]
    fields = [tr.data.Label(), tr.data.Sparse("user"), *hashed, tr.data.Dense("age")]
    data = tr.data.QueueDataset(
        tmp_path / "part.csv", schema=tr.data.csv(fields), batch_size=2, own_files=True
    )
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=True)
        trainer.fit(data)
        outputs = trainer.predict(data)["output"]
        export_model(trainer, tmp_path / "export", batch=next(iter(data)))
    frame = pd.read_csv(tmp_path / "part.csv").drop(columns="label")
    prediction = Predictor(tmp_path / "export").predict(frame)
    assert torch.equal(prediction.outputs["output"], outputs)


def test_integers_in_the_place_of_strings_of_files_are_refused(tmp_path: Path) -> None:
    """The batch still says of the other features, all known, that they are strings."""
    (tmp_path / "part.csv").write_text("user,movie,genres,age,label\na,Heat,war,20,1\n")
    hashed = [tr.data.Sparse(name, hashed=True) for name in ("user", "movie", "genres")]
    schema = tr.data.csv([tr.data.Label(), *hashed, tr.data.Dense("age")])
    data = tr.data.QueueDataset(tmp_path / "part.csv", schema=schema, batch_size=1, own_files=True)
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=True)
        trainer.fit(data)
        [batch] = data
        columns = {**batch.columns, "movie": torch.tensor([7])}
        with pytest.raises(BadRequest, match=r"strings.*'movie'|'movie'.*strings"):
            trainer.predict([replace(batch, columns=columns)])


def test_a_table_of_another_salt_is_refused() -> None:
    with embedded() as cluster:
        cluster.client.create_table(tr.Table("t", dim=4, salt=True).schema)
        other = tr.Table("t", dim=4, salt=False).schema
        with pytest.raises(SchemaMismatch, match=r"'salt': True.*'salt': False"):
            cluster.server.create_table(other)


def test_inspect_takes_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=True)
        trainer.fit(FRAME)
        trainer.save(tmp_path / "ckpt")
    path = str(tmp_path / "ckpt")
    assert main(["inspect", path, "--key", "movie=Heat", "--key", "user=3", "--key", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("weights (4)") == 2
    assert "key 3: no row; each feature has keys of its own here: ask for FEATURE=VALUE" in shown
    assert main(["inspect", path, "--key", "user='3'"]) == 0
    assert capsys.readouterr().out.endswith("no row\n"), "a string is another value"
    assert main(["inspect", path, "--key", "movie=50"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("no row; training took strings here: ask for \"movie='50'\"\n")


MISSING: dict[str, Any] = {
    "None": [None] * 40,
    "NaN": [float("nan")] * 40,
    "empty": [""] * 40,
    "no lists": [[]] * 40,
    "Int64": pd.array([None] * 40, "Int64"),
    "string": pd.array([None] * 40, "string"),
    "null of Arrow": pa.nulls(40),
    "integers of Arrow": pa.nulls(40, pa.int64()),
}


@pytest.mark.parametrize("users", [list(range(40)), [f"u{i}" for i in range(40)]])
@pytest.mark.parametrize("missing", MISSING.values(), ids=list(MISSING))
@pytest.mark.parametrize("form", ["schema", "columns", "batches"])
def test_missing_values_alone_are_neither_strings_nor_integers(
    form: str, missing: Any, users: list[Any]
) -> None:
    sparse = [tr.data.Sparse(name) for name in ("user", "movie", "genres")]
    schema = tr.data.Schema([tr.data.Label(), tr.data.Number("age"), *sparse])

    def data(values: Any) -> Any:
        columns = FRAME.to_dict("list") | {"user": values}
        if form == "schema":
            return tr.data.ArrayDataset(columns, schema=schema)
        return columns if form == "columns" else [columns]

    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=False)
        trainer.fit(data(missing))
        known = trainer.model.table.features
        assert "user" not in known.are_strings
        trainer.fit(data(users))
        assert known.are_strings["user"] == isinstance(users[0], str)
        trainer.fit(data(missing))
        assert len(trainer.predict(data(missing))["output"]) == 40


def test_a_column_of_one_kind_may_be_without_values_in_the_first_file(tmp_path: Path) -> None:
    for name, users in (("1", pa.nulls(2)), ("2", pa.array([7, 8])), ("3", pa.array(["u", "v"]))):
        pq.write_table(pa.table({"user": users}), tmp_path / f"{name}.parquet")

    def batch(*names: str) -> tr.data.Batch:
        files = [str(tmp_path / f"{name}.parquet") for name in names]
        schema = tr.data.arrow([tr.data.Sparse("user")])
        (read,) = tr.data.QueueDataset(files, schema=schema, batch_size=4)
        return read

    assert batch("1").hashed == {}
    assert batch("1", "2").hashed == {"user": False}
    assert batch("1", "3").hashed == {"user": True}
    with pytest.raises(DataError, match="'user': expected strings or integers in all files"):
        batch("2", "3")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[tr.Trainer, Predictor]]:
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=False)
        trainer.fit(FRAME)
        folder = tmp_path_factory.mktemp("served") / "export"
        export_model(trainer, folder, batch=FRAME)
        yield trainer, Predictor(folder)


KINDS = ["int8", "int32", "uint64", "float64", "bool", "Int64", "Float32", "boolean"]


@pytest.mark.parametrize("kind", [*KINDS, "int64[pyarrow]", "object", "category"])
def test_numbers_of_any_kind_have_the_same_predictions(
    kind: str, served: tuple[tr.Trainer, Predictor]
) -> None:
    trainer, predictor = served
    whole = FRAME.drop(columns="label").assign(age=[0, 1] * 20, user=[1, 0] * 20)
    flags = "bool" if kind == "boolean" else "int64"
    other = whole.astype({"age": flags, "user": flags}).astype({"age": kind, "user": kind})
    expected = trainer.predict(whole)["output"]
    assert torch.equal(trainer.predict(other)["output"], expected)
    assert torch.equal(predictor.predict(other).outputs["output"], expected)


def test_numbers_that_have_no_equal_of_the_exported_kind_are_refused(
    served: tuple[tr.Trainer, Predictor],
) -> None:
    with pytest.raises(BadRequest, match=r"'age' as float32 of shape .any., found int64"):
        served[1].predict(FRAME.assign(age=2**24 + 1))


def test_no_examples_have_no_outputs_of_the_right_shape(
    served: tuple[tr.Trainer, Predictor],
) -> None:
    trainer, predictor = served
    names = FRAME.drop(columns="label").columns
    for none in (FRAME[:0], pd.DataFrame(columns=names), {name: [] for name in names}):
        for outputs in (trainer.predict(none), predictor.predict(none).outputs):
            assert outputs["output"].shape == (0,)
            assert outputs["output"].dtype == torch.float32


def test_a_model_that_takes_no_empty_batch_or_no_integers_is_refused_with_a_sentence(
    tmp_path: Path,
) -> None:
    class Strict(Model):
        def forward(self, batch: tr.data.Batch) -> torch.Tensor:
            flat = self.rows(batch).reshape(batch["age"].shape[0], -1)
            age = torch.nn.functional.linear(batch["age"][:, None], torch.ones(1, 1))
            return self.mlp(torch.cat([flat, age], 1)).squeeze(1)

    with embedded() as cluster:
        set_default(cluster)
        model = Strict(salt=False)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits
        trainer = tr.Trainer(model, sgd, loss=loss, progress=False)
        trainer.fit(FRAME)
        export_model(trainer, tmp_path / "export", batch=FRAME)
        expected = "expected examples, or a model that takes a batch without any, found none"
        for predict in (trainer.predict, Predictor(tmp_path / "export").predict):
            with pytest.raises(BadRequest, match=expected):
                predict(FRAME[:0])
        shown = (
            r"expected float32 where .* column 'age', found torch\.int64.*; \.float\(\) makes it"
        )
        with pytest.raises(BadRequest, match=shown):
            trainer.predict(FRAME.assign(age=1))


@pytest.mark.parametrize(
    ("feature", "values"),
    [
        ("user", [1.0, 3.0]),
        ("user", np.array([True, False])),
        ("user", torch.tensor([1.0, 3.0], dtype=torch.bfloat16)),
        ("user", pd.to_datetime([1, 3], unit="s")),
        ("user", []),
        ("movie", [b"Heat", b"Up"]),
        ("movie", pa.array(["Heat", "Up"], pa.string_view())),
        ("movie", pa.array([b"Heat"], pa.binary(4))),
        ("movie", tr.data.Strings.encode(["Heat", "Up"])),
        ("movie", []),
    ],
)
def test_rows_of_values_of_any_kind_come_back(feature: str, values: Any, tmp_path: Path) -> None:
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=True)
        trainer.fit(FRAME)
        export, load = tr.interchange.export_parquet, tr.interchange.import_parquet
        num = export(trainer, tmp_path / "rows", feature=feature, values=values)["t"]
        assert num == (len(values.offsets) - 1 if hasattr(values, "offsets") else len(values))
        view = tr.TableView(trainer.model.table, feature)
        before = view[values] if num else torch.empty(0)
        assert load(trainer, "t", str(tmp_path / "rows/t"), feature=feature, replace=True) == num
        assert len(view) == num
        assert torch.equal(view[values] if num else torch.empty(0), before)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([["Heat"], ["Up"]], "one by one, integers or strings, found list"),
        (tr.data.Ragged(torch.arange(2), torch.arange(3)), "found bags"),
        ([b"\xff"], "as text in UTF-8, found binary"),
    ],
)
def test_values_that_no_import_takes_are_not_exported(
    values: Any, shown: str, tmp_path: Path
) -> None:
    with embedded() as cluster:
        trainer = trainer_of(cluster, salt=False)
        trainer.fit(FRAME)
        with pytest.raises(
            BadRequest, match=f"export_parquet: expected values of 'movie' .*{shown}"
        ):
            tr.interchange.export_parquet(
                trainer, tmp_path / "rows", feature="movie", values=values
            )
    assert not (tmp_path / "rows").exists()
