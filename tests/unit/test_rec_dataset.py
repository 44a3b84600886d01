"""Examples of a Python class become batches, divided among workers, resumed by replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from trireme.config import Config
from trireme.data import Dense, InsId, Label, Schema, Sparse
from trireme.errors import BadRequest, DataError
from trireme.run.rec_dataset import ExampleDataset, ReaderConfig

SCHEMA = Schema([Label("click"), Sparse("a"), Sparse("b"), Dense("d", 2)])


def examples(num: int) -> Iterator[list[Any]]:
    for i in range(num):
        yield [np.array([i % 2]), np.arange(i, i + i % 3), [2**63 + i], np.array([i, -i]) / 2]


def dataset(num: int, size: int = 4, **options: Any) -> ExampleDataset:
    return ExampleDataset(
        lambda _: examples(num), schema=SCHEMA, batch_size=size, name="reader.py", **options
    )


def test_a_batch_holds_the_columns_of_its_examples() -> None:
    (batch,) = dataset(4)
    assert batch["click"].tolist() == [0, 1, 0, 1]
    assert batch["d"].tolist() == [[0, 0], [0.5, -0.5], [1, -1], [1.5, -1.5]]
    a, b = batch["a"], batch["b"]
    assert a.values[a.offsets[0] : a.offsets[-1]].tolist() == [1, 2, 3]
    assert (a.offsets - a.offsets[0]).tolist() == [0, 0, 1, 3, 3]
    keys = b.values[b.offsets[0] : b.offsets[-1]].numpy().view(np.uint64)
    assert keys.tolist() == [2**63 + i for i in range(4)]
    assert batch["click"].dtype == torch.float32
    assert batch.bags.names == ("a", "b")


def test_an_empty_list_is_an_empty_bag() -> None:
    (batch,) = ExampleDataset(
        lambda _: [[[1], [], [3], [0, 0]]], schema=SCHEMA, batch_size=2, name="reader.py"
    )
    assert batch.bags.offsets.tolist() == [0, 0, 1]
    assert batch.bags.values.tolist() == [3]


def test_workers_share_the_batches_or_have_their_own() -> None:
    whole = [batch["d"].tolist() for batch in dataset(22)]
    assert [len(rows) for rows in whole] == [4, 4, 4, 4, 4, 2]
    shares = [[batch["d"].tolist() for batch in dataset(22).stream(i, 3)] for i in range(3)]
    assert shares == [whole[0::3], whole[1::3], whole[2::3]]
    own = dataset(22, own_files=True).stream(2, 3)
    assert [batch["d"].tolist() for batch in own] == whole


def test_workers_share_files_and_with_fewer_files_the_batches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    read: list[list[str]] = []

    def make(files: list[str]) -> Iterator[list[Any]]:
        read.append(files)
        return examples(10 * len(files))

    shared = ExampleDataset(make, ["a", "b", "c"], schema=SCHEMA, batch_size=5, name="reader.py")
    assert [len(list(shared.stream(i, 2))) for i in range(2)] == [4, 2]
    assert read == [["a", "c"], ["b"]]
    assert not caplog.messages
    assert [len(list(shared.stream(i, 4))) for i in range(4)] == [2, 2, 1, 1]
    assert read[2:] == [["a", "b", "c"]] * 4
    assert caplog.messages == [
        "reader.py: each of 4 workers reads all files, of which there are 3, and takes one batch of"
        " 4; with as many files as workers they share the reading, too"
    ]


def test_workers_share_the_batches_of_files_that_are_one(caplog: pytest.LogCaptureFixture) -> None:
    read: list[list[str]] = []

    def make(files: list[str]) -> Iterator[list[Any]]:
        read.append(files)
        return examples(20)

    options: dict[str, Any] = {"schema": SCHEMA, "batch_size": 5, "name": "reader.py"}
    shared = ExampleDataset(make, ["a", "b", "c"], files_are_one=True, **options)
    whole = [batch["d"].tolist() for batch in shared]
    shares = [[batch["d"].tolist() for batch in shared.stream(i, 2)] for i in range(2)]
    assert shares == [whole[0::2], whole[1::2]]
    assert read == [["a", "b", "c"]] * 3
    assert not caplog.messages
    own = ExampleDataset(make, ["a"], files_are_one=True, own_files=True, **options)
    assert [batch["d"].tolist() for batch in own.stream(1, 2)] == whole


class MapStyle(Dataset[Any]):
    """As PaddleRec's are: an index behind the last one draws once more."""

    def __getitem__(self, index: int) -> Any:
        return next(examples(1))

    def __len__(self) -> int:
        return 7


def test_a_map_style_dataset_is_read_once_from_its_begin() -> None:
    batches = list(
        ExampleDataset(lambda _: MapStyle(), schema=SCHEMA, batch_size=4, name="reader.py")
    )
    assert [batch.num_examples for batch in batches] == [4, 3]


def test_a_reader_gets_other_values_in_an_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("runner: {mode: train, words: 3}\n")
    reader_config = ReaderConfig(Config.load(path), {"runner.mode": "test", "mode": "test"})
    assert reader_config.get("runner.mode", "train") == reader_config["mode"] == "test"
    assert reader_config["runner.words"] == 3


def test_a_reader_gets_the_dictionary_that_it_expects(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("runner: {words: 3}\n")
    config = Config.load(path)
    reader_config = ReaderConfig(config)
    assert config.unread() == ["runner.words"]
    assert (reader_config["runner.words"], reader_config.get("runner.words")) == (3, 3)
    assert config.unread() == []
    assert reader_config.get("runner.batch_size") is None
    assert reader_config.get("runner.batch_size", 7) == 7
    assert "runner.batch_size" not in reader_config
    assert reader_config["config_abs_dir"] == str(tmp_path)
    assert dict(reader_config)["yaml_path"] == str(path)


@pytest.mark.parametrize("index", [0, 1])
def test_a_stream_goes_on_behind_any_batch(index: int) -> None:
    whole = list(dataset(30).stream(index, 2))
    for done, batch in enumerate(whole, 1):
        rest = dataset(30).stream(index, 2, start=batch.position)
        assert [b["d"].tolist() for b in rest] == [b["d"].tolist() for b in whole[done:]]


def test_a_class_may_yield_batches() -> None:
    ready = [{"x": torch.full((3,), float(i))} for i in range(5)]
    shared = ExampleDataset(lambda _: ready, schema=SCHEMA, batch_size=2, name="reader.py")
    assert [int(batch["x"][0]) for batch in shared.stream(1, 2)] == [1, 3]
    assert [batch.position for batch in shared.stream(1, 2)] == [(1,), (3,)]
    mixed = ExampleDataset(
        lambda _: [*examples(1), 7], schema=SCHEMA, batch_size=2, name="reader.py"
    )
    with pytest.raises(DataError, match=r"example 2: expected 4 arrays, .*found 7"):
        list(mixed)


class Numbered(torch.utils.data.Dataset[Any]):
    """Examples that have numbers, and no end but their length."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> list[Any]:
        return [[0], [number], [], [len(self.files), 0]]


def test_workers_take_batches_in_turn_of_a_dataset_whose_examples_have_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shared = ExampleDataset(
        Numbered, ["a", "b"], schema=SCHEMA, batch_size=3, name="reader.py", files_are_one=True
    )
    batches = [list(shared.stream(i, 2)) for i in range(2)]
    numbers = [[batch.bags.values.tolist() for batch in part] for part in batches]
    assert numbers == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9]]]
    assert batches[0][0]["d"].tolist() == [[2, 0]] * 3
    assert not caplog.messages


def test_an_array_is_a_batch_of_a_dense_field_alone() -> None:
    def batches(*arrays: Any) -> list[Any]:
        schema = Schema([Dense("d", 2)])
        made = ExampleDataset(lambda _: arrays, schema=schema, batch_size=9, name="reader.py")
        return [batch["d"].tolist() for batch in made]

    assert batches(np.ones((3, 2)), torch.zeros(1, 2)) == [[[1, 1]] * 3, [[0, 0]]]
    for shape in ((3, 4), (2,)):
        with pytest.raises(DataError, match=r"an array \(B, 2\), for Dense.*'d'.*found shape"):
            batches(np.ones(shape))


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ([[1], [2], [3]], r"reader\.py: example 1: expected 4 arrays, for schema.*found 3 of them"),
        ((), "expected 4 arrays, .*found 0 of them"),
        ([[1], [0.5], [3], [0, 0]], "expected integer keys as Sparse.*'a'.*found float64"),
        ([[1], [2.0**54], [3], [0, 0]], "expected integer keys as Sparse.*'a'.*found float64"),
        ([[1], np.float32([2**24 + 2]), [3], [0, 0]], "expected integer keys as.*float32"),
        ([[1], [float("nan")], [3], [0, 0]], "expected integer keys as Sparse.*'a'.*found"),
        ([[1], [2], [3], [0, 0, 0]], "expected 2 finite float32 numbers as Dense"),
        ([[1, 0], [2], [3], [0, 0]], "expected 1 finite float32 numbers as Label"),
        ([[float("nan")], [2], [3], [0, 0]], "expected 1 finite float32 numbers as Label"),
        ([[1], [2], [3], [0, 1e39]], "expected 2 finite float32 numbers as Dense"),
        ([["x"], [2], [3], [0, 0]], "expected 1 finite float32 numbers as Label"),
    ],
)  # fmt: skip
def test_an_example_that_does_not_fit_is_named(example: Any, message: str) -> None:
    wrong = ExampleDataset(lambda _: [example], schema=SCHEMA, batch_size=2, name="reader.py")
    with pytest.raises(DataError, match=message):
        list(wrong)


def test_floats_that_are_integers_are_keys() -> None:
    """Masks of PaddleRec's readers are such columns."""
    mask = np.array([0.0, -1e9], np.float32)
    example = [[1], mask, [3], [0, 0]]
    (batch,) = ExampleDataset(lambda _: [example], schema=SCHEMA, batch_size=2, name="reader.py")
    assert batch["a"].values.tolist() == [0, -(10**9)]


def test_arrays_of_several_shapes_are_joined() -> None:
    users = [[np.ones((2, 2), np.int64), np.array([[7, 8, 9]])], [np.zeros((1, 2), np.int64), [5]]]
    example = [[1], users, [3], [0, 0]]
    (batch,) = ExampleDataset(lambda _: [example], schema=SCHEMA, batch_size=2, name="reader.py")
    assert batch["a"].values.tolist() == [1, 1, 1, 1, 7, 8, 9, 0, 0, 5]


def test_strings_have_no_place_in_arrays() -> None:
    with pytest.raises(BadRequest, match="expected fields of numbers"):
        ExampleDataset(list, schema=Schema([InsId()]), batch_size=1, name="reader.py")
