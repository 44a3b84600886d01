"""`trireme predict`: files of every format get the trained model's answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import trireme as tr
from trireme.commands import cli
from trireme.data import Dense, InsId, Label, Sparse
from trireme.data.foreign import as_batch
from trireme.inference import Predictor
from trireme.inference.export import export_model
from trireme.job.embedded import embedded
from trireme.run.file_schema import parse_fields
from trireme.storage.atomic_file import PendingFile

NUM = 100
RNG = np.random.default_rng(0)
IDS = [[int(k) for k in RNG.integers(1, 300, i % 4)] for i in range(NUM)]  # 0 to 3 of an example
ONE = [int(k) for k in RNG.integers(1, 2**63, NUM)]
DENSE = RNG.random((NUM, 2)).astype(np.float32).round(3)
NAMES = [f"e{i}" for i in range(NUM)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("t", dim=4, optimizer=tr.optim.Adagrad(lr=0.1), absent="zeros")
        self.rows = tr.nn.EmbeddingBag(table, features=["many", "one"])
        self.head = nn.Linear(10, 2)

    def forward(self, batch: tr.data.Batch) -> dict[str, torch.Tensor]:
        both = self.head(torch.cat([self.rows(batch).flatten(1), batch["dense"]], 1))
        return {"score": both.sum(1), "both": both}


def examples() -> tr.data.Batch:
    offsets = np.cumsum([0, *map(len, IDS), *[1] * NUM])
    values = np.array([key for bag in [*IDS, ONE] for key in bag])
    bags = tr.data.Bags(("many", "one"), torch.from_numpy(values), torch.from_numpy(offsets))
    return tr.data.Batch({"dense": torch.from_numpy(DENSE)}, bags)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict") / "export"
    torch.manual_seed(0)
    model = Model()
    with embedded(threads=2) as cluster:
        trainer = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters(), lr=0.1),
            loss=lambda outputs, _: outputs["score"].square().mean(),
            label=None,
            progress=False,
            cluster=cluster,
        )
        trainer.fit([examples()])
        export_model(trainer, folder, batch=examples())
    return folder


def as_csv(folder: Path) -> list[str]:
    lines = ["id,d1,many,one,extra"]
    for name, (a, b), many, one in zip(NAMES, DENSE, IDS, ONE, strict=True):
        lines.append(f"{name},{a} {b},{' '.join(map(str, many))},{one},x")
    (folder / "a.csv").write_text("\n".join(lines).replace("d1", "dense") + "\n")
    return ["--format", "csv", "--ins_id", "id", "--list_separator", " ", "--input", "a.csv"]


def as_multislot(folder: Path) -> list[str]:
    for number, part in enumerate((slice(0, 40), slice(40, NUM))):
        lines = [
            f"1 {name} 2 {a} {b} {len(many)} {' '.join(map(str, many))} 1 {one}".replace("  ", " ")
            for name, (a, b), many, one in zip(
                NAMES[part], DENSE[part], IDS[part], ONE[part], strict=True
            )
        ]
        (folder / f"part-{number}").write_text("\n".join(lines) + "\n")
    fields = "ins_id,dense:dense:2,sparse:many,sparse:one"
    return ["--format", "multislot", "--fields", fields, "--input", "part-*"]


def as_parquet(folder: Path) -> list[str]:
    columns = {"id": NAMES, "dense": list(DENSE), "many": IDS, "one": ONE}
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return ["--format", "parquet", "--ins_id", "id", "--input", "a.parquet"]


@pytest.mark.parametrize("make", [as_csv, as_multislot, as_parquet])
@pytest.mark.parametrize("output", ["out.tsv", "new/out.parquet"])
def test_every_example_of_files_is_answered(
    make: Callable[[Path], list[str]],
    output: str,
    export: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["predict", "-m", str(export), *make(tmp_path), "--output", output]
    assert cli.main([*argv, "--batch_size", "17"]) == 0
    expected = Predictor(export).predict(examples())
    score, both = (expected.outputs[name].numpy() for name in ("score", "both"))
    if output.endswith(".tsv"):
        rows = [line.split("\t") for line in (tmp_path / output).read_text().splitlines()]
        names = [row[0] for row in rows]
        scores = np.array([row[1] for row in rows], np.float32)
        pairs = np.array([row[2].split(",") for row in rows], np.float32)
    else:
        table = pq.read_table(tmp_path / output)
        assert table.column_names == ["ins_id", "score", "both"]
        actual = pq.read_metadata(tmp_path / output).metadata
        assert actual[b"trireme.examples"] == b"100"
        assert 0 <= int(actual[b"trireme.missing"]) < int(actual[b"trireme.keys"])
        assert int(actual[b"trireme.version"]) == expected.version
        names = table["ins_id"].to_pylist()
        scores = table["score"].to_numpy()
        pairs = np.array(table["both"].to_pylist(), np.float32)
    assert names == NAMES
    np.testing.assert_allclose(scores, score, rtol=0, atol=1e-6)
    np.testing.assert_allclose(pairs, both, rtol=0, atol=1e-6)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"predict: 100 examples to {output}; of ")
    assert lines[-1].endswith(" had no row")


def test_fields_are_read_from_text() -> None:
    fields, columns = parse_fields("ins_id:id,label,dense:x:a+b, dense:y:3,hashed:C1,sparse:C2")
    expected = [
        InsId("id"), Label("label"), Dense("x", 2), Dense("y", 3), Sparse("C1", hashed=True),
        Sparse("C2"),
    ]  # fmt: skip
    assert (fields, columns) == (expected, {"x": ["a", "b"]})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "multislot"], "expected --fields, in the order of the files"),
        (["--format", "csv", "--no_header"], "expected --fields, in the order of the files"),
        (["--format", "libsvm", "--ins_id", "x"], "expected no --fields and no --ins_id"),
        (["--format", "csv", "--fields", "label,spare:x"], "found 'spare:x'"),
        (["--format", "csv", "--fields", "dense:x:1:2"], "found 'dense:x:1:2'"),
        (["--format", "parquet", "--fields", "dense:x:a+b"], "found columns of x"),
        (["--format", "parquet", "--fields", "ins_id", "--ins_id", "id"], "among --fields"),
        (["--format", "csv", "--fields", "sparse:many"], "expected feature 'one' in the batch"),
        (["--format", "csv", "--list_separator", " "], "missing: one"),
        (["--format", "csv", "--ins_id", "one"], "copy of it under another name"),
        (["--format", "parquet", "--delimiter", ";"], "expected --delimiter ';' with --format csv"),
        (["--format", "libsvm", "--list_separator", " "], "--list_separator ' ' with --format csv"),
        (["--format", "multislot", "--fields", "label", "--no_header"], "--no_header with"),
    ],
)
def test_wrong_calls_are_refused_and_leave_nothing(
    arguments: list[str],
    words: str,
    export: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.csv").write_text("many,dense\n1,0.5\n")
    output = tmp_path / "out.tsv"
    argv = ["-m", str(export), "--input", str(tmp_path / "a.csv"), "--output", str(output)]
    assert cli.main(["predict", *argv, *arguments]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_an_output_that_exists_or_a_disk_that_is_full_ends_with_an_error(
    export: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["predict", "-m", str(export), *as_parquet(tmp_path), "--output"]
    (tmp_path / "old").write_text("mine")
    assert cli.main([*argv, "old"]) == 2
    assert "expected a new file, found old existing" in capsys.readouterr().err
    assert (tmp_path / "old").read_text() == "mine"

    def full(part: PendingFile, data: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PendingFile, "write", full)
    assert cli.main([*argv, "new"]) == 1
    assert "error: cannot write new: No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_files_without_examples_have_outputs_without_rows(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("id,dense,many,one\n")
    argv = ["predict", "-m", str(export), "--format", "csv", "--ins_id", "id", "--input", "a.csv"]
    for name in ("out.tsv", "out.parquet"):
        assert cli.main([*argv, "--list_separator", " ", "--output", name]) == 0
    assert Path("out.tsv").read_text() == ""
    table = pq.read_table("out.parquet")
    assert table.num_rows == 0
    assert table.column_names == ["ins_id", "score", "both"]
    assert table.schema.field("both").type == pa.list_(pa.float32(), 2)


class Ages(nn.Module):
    """Reads strings, one number per example, and one as (B, 1)."""

    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("t", dim=2, optimizer=tr.optim.Adagrad(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(table, features=["genres"])

    def forward(self, batch: tr.data.Batch) -> torch.Tensor:
        return self.rows(batch).sum((1, 2)) + batch["age"] / 100 + batch["height"][:, 0]


@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_a_number_per_example_may_have_any_form_that_holds_it(
    kind: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    columns = {
        "genres": [["war", "drama"], ["war"], []],
        "age": torch.tensor([30, 40, 50]).to(kind),
        "height": torch.tensor([[1], [2], [3]]).to(kind),
    }
    model = Ages()
    with embedded(threads=1) as cluster:
        trainer = tr.Trainer(
            model, None, loss=lambda out, _: out.sum(), label=None, progress=False, cluster=cluster
        )
        trainer.fit([columns])
        export_model(trainer, "export", batch=columns)
        expected = model.eval()(as_batch(columns)).tolist()
    rows = ["war|drama,30,1", "war,40.0,2", ",50,3.0"]
    Path("a.csv").write_text("\n".join(["genres,age,height", *rows]) + "\n")
    lists = pa.array(columns["genres"])
    for age in (pa.int64(), pa.float32(), pa.int8()):
        numbers = {"age": pa.array([30, 40, 50], age), "height": pa.array([1, 2, 3], age)}
        pq.write_table(pa.table({"genres": lists, **numbers}), f"{age}.parquet")
    csv = ["--format", "csv", "--input", "a.csv"]
    fields = [
        [],
        ["--fields", "hashed:genres,dense:age,label:height"],
        ["--fields", "hashed:genres,label:age,dense:height:1"],
    ]
    calls = [[*csv, "--list_separator", "|", *some] for some in fields]
    calls += [
        ["--format", "parquet", "--input", f"{age}.parquet"] for age in ("int64", "float", "int8")
    ]
    for number, call in enumerate(calls):
        assert cli.main(["predict", "-m", "export", *call, "--output", f"{number}.tsv"]) == 0
        answers = [float(line) for line in Path(f"{number}.tsv").read_text().splitlines()]
        assert answers == pytest.approx(expected, abs=1e-6)
    assert "is one id" not in caplog.text
    assert cli.main(["predict", "-m", "export", *csv, "--output", "hint.tsv"]) == 0
    assert "'genres': a string such as 'war|drama' is one id; if it is a list" in caplog.text
    assert "--list_separator '|'" in caplog.text

    Path("a.csv").write_text("genres,age,height\nwar,16777217,1\n")  # float32 would round it
    code = cli.main(["predict", "-m", "export", *csv, "--output", "wide.tsv"])
    assert code == (2 if kind == torch.int64 else 0)
    if code:
        shown = (
            "'age' as int64 .*: 16777216.0 at .* is no whole number that both types hold exactly"
        )
        assert re.search(shown, capsys.readouterr().err)
