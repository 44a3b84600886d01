"""Columns as users have them: DataFrames, Arrow tables, arrays, lists; the keys of their ids."""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

import trireme as tr
from trireme.data import ArrayDataset, Batch, Ragged, Strings, string_keys
from trireme.data.foreign import as_batch
from trireme.data.user_columns import arrow_of, as_column, column_of, columns_of
from trireme.errors import BadRequest, DataError
from trireme.nn.ids import keys_of_column, read_ids
from trireme.train.loop.scoring import Scorer

FRAME = pd.DataFrame(
    {
        "user": ["u1", "u2", None, "u1"],
        "movie": np.array([1, 2, 3, 4], np.int32),
        "genres": [["drama", "war"], [], ["drama"], ["comedy"]],
        "seen": [[1, 2], [3], [], [4, 5, 6]],
        "plot": [[0.5, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]],
        "at": pd.to_datetime(["2020-01-01", "2020-01-02", "2020-01-03", "2020-01-04"]),
        "year": pd.array([1990, None, 2001, 2002], "Int64"),
        "price": [0.5, 1.5, 2.5, 3.5],
        "rating": np.array([4.0, 5.0, 1.0, 2.0]),
    }
)


def hashes(feature: str, *values: str) -> list[int]:
    return string_keys(feature, values)[0].tolist()


def bags(ragged: Any) -> list[list[int]]:
    return [part.tolist() for part in ragged.values.tensor_split(ragged.offsets[1:-1])]


@pytest.mark.parametrize("make", [lambda f: f, pa.Table.from_pandas, pl.from_pandas])
def test_a_frame_is_a_dataset(make) -> None:
    (batch,) = ArrayDataset(make(FRAME))
    assert bags(batch["user"]) == [hashes("user", u) if u else [] for u in ("u1", "u2", "", "u1")]
    assert bags(batch["genres"]) == [hashes("genres", *g) for g in FRAME["genres"]]
    assert bags(batch["seen"]) == FRAME["seen"].tolist()
    assert bags(batch["year"]) == [[1990], [], [2001], [2002]]
    assert batch["movie"].tolist() == [1, 2, 3, 4]
    assert batch["plot"].tolist() == FRAME["plot"].tolist()
    assert batch["at"][0] == datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc).timestamp()
    kinds = {name: batch[name].dtype for name in ("movie", "at", "price", "plot")}
    assert kinds == {
        "movie": torch.int64,
        "at": torch.int64,
        "price": torch.float32,
        "plot": torch.float32,
    }


def test_the_ids_of_a_batch_are_those_of_the_dataset() -> None:
    (batch,), direct = ArrayDataset(FRAME), as_batch(FRAME)
    assert isinstance(direct, Batch)
    for name in ("user", "movie", "genres", "seen", "year"):
        left, right = (read_ids(b, (name,), "test") for b in (batch, direct))
        assert left.values.tolist() == right.values.tolist()
        assert left.bounds().tolist() == right.bounds().tolist()


def test_a_schema_reads_a_frame() -> None:
    schema = tr.data.Schema(
        [tr.data.Label("rating"), tr.data.Sparse("genres"), tr.data.Dense("plot", 2)]
    )
    batches = list(ArrayDataset(FRAME, schema=schema, batch_size=3))
    assert batches[1]["rating"].tolist() == [2.0]
    assert batches[1]["genres"].values.tolist() == hashes("genres", "comedy")
    assert batches[0]["plot"].shape == (3, 2)


IDS = [3, 2**40, 7]


@pytest.mark.parametrize(
    "ids",
    [
        np.array(IDS),
        np.array(IDS, object),
        np.array(IDS, np.uint64),
        np.array(IDS, np.float64),
        np.array([3, 2**16, 7], np.uint32),
        np.array([3, 2**16, 7], np.int32),
        torch.tensor(IDS),
        torch.tensor([3, 2**16, 7], dtype=torch.int32),
        IDS,
        pa.array(IDS),
        pd.Series(IDS),
        pd.Series([3.0, 2.0**40, None]),
    ],
    ids=lambda ids: f"{type(ids).__name__} {getattr(ids, 'dtype', '')}",
)
def test_integers_of_any_type_are_ids(ids) -> None:
    schema = tr.data.Schema([tr.data.Sparse("id")])
    (batch,) = ArrayDataset({"id": ids}, schema=schema)
    values = ids.to_pylist() if isinstance(ids, pa.Array) else ids
    expected = [int(value) for value in values if value == value]
    assert read_ids(batch, ("id",), "test").values.tolist() == expected


def test_ids_above_63_bits_keep_their_bits() -> None:
    for values in ([2**64 - 1, 1], np.array([2**64 - 1, 1], np.uint64), [[2**64 - 1], [1]]):
        batch = as_batch({"id": values})
        assert read_ids(batch, ("id",), "test").values.tolist() == [-1, 1]


def test_floats_are_ids_where_they_are_exact() -> None:
    assert read_ids({"id": torch.tensor([1.0, 5.0])}, ("id",), "t").values.tolist() == [1, 5]
    for wrong in (torch.tensor([1.0, 0.5]), torch.tensor([1.0, 2.0**24])):
        with pytest.raises(BadRequest, match=r"'id' as integers or strings, found .* at 1"):
            read_ids({"id": wrong}, ("id",), "test")


def test_other_columns_are_refused_by_name_kind_and_row() -> None:
    cases: list[tuple[Any, str]] = [
        (["a", 3], "'x': expected values of one kind, found 3, a int, in row 1, and 'a', a str"),
        ([object()], "'x': expected numbers, strings, times or lists of ids, found .* in row 0"),
        ([{"a": 1}], "'x': .*found struct<a: int64>"),
        ([[0.5], [0.5, 1.0]], "'x': expected 1 fractions .* found 2 in row 1"),
        ([True, None], "'x': .* found bool with 1 missing"),
    ]
    for values, message in cases:
        for make in (as_batch, ArrayDataset, lambda c: ArrayDataset(pd.DataFrame(c))):
            with pytest.raises(DataError, match=message):
                make({"x": values})
    with pytest.raises(DataError, match=r"'x'.*nan in row 1: .*fillna.*astype\('Int64'\)"):
        ArrayDataset({"x": [0.5, None]})
    with pytest.raises(DataError, match="twice: a"):
        columns_of(pd.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(BadRequest, match=r"expected a DataFrame, .*, found list"):
        ArrayDataset([1, 2])


def test_what_is_a_column_already_stays_what_it_is() -> None:
    ragged = Ragged(torch.arange(3), torch.tensor([0, 3]))
    for value in (torch.ones(2), ragged, Strings.encode(["a"]), None, 7, "text", {"a": 1}):
        assert as_column("x", value) is value
    assert as_batch({"x": ("a", "b")})["x"].decode() == ["a", "b"]


def test_names_of_examples_stay_strings() -> None:
    (batch,) = ArrayDataset({"ins_id": ["a", "bc"], "x": [1, 2]})
    assert batch["ins_id"].decode() == ["a", "bc"]


def test_the_keys_of_column_are_those_of_a_lookup() -> None:
    ids = read_ids(as_batch({"movie": ["Heat", "Up"]}), ("movie",), "test")
    plain = keys_of_column("movie", ["Heat", "Up"], salted=False)
    assert plain.view(np.int64).tolist() == ids.values.tolist() == hashes("movie", "Heat", "Up")
    assert keys_of_column("movie", [3, 4], salted=False).tolist() == [3, 4]
    salted = keys_of_column("movie", [3, 4], salted=True)
    assert salted.tolist() == tr.nn.keys_of("movie", np.array([3, 4])).tolist()


def test_batches_know_which_features_have_strings(tmp_path: Path) -> None:
    path = str(tmp_path / "examples.parquet")
    FRAME.to_parquet(path)
    fields = [tr.data.Sparse(name) for name in ("user", "genres")]
    files = tr.data.QueueDataset(path, schema=tr.data.arrow(fields), batch_size=8)
    for batch in (
        as_batch(FRAME),
        as_batch(FRAME.to_dict("list")),
        next(iter(tr.data.ArrayDataset(FRAME))),
        next(iter(tr.data.ArrayDataset(FRAME, schema=tr.data.Schema(fields)))),
        next(iter(files)),
    ):
        kinds = {name: batch.has_strings(name) for name in ("user", "genres")}
        assert kinds == {"user": True, "genres": True}
        assert batch.has_strings("nothing") is None
        assert pickle.loads(pickle.dumps(batch)).has_strings("genres")
    ragged = as_batch({"genres": as_batch(FRAME)["genres"]})
    assert ragged.has_strings("genres") is None, "bags of keys do not tell"
    assert as_batch({"genres": [[1], []], "user": [1, 2]}).has_strings("genres") is False


def test_labels_of_any_type_are_compared_with_outputs() -> None:
    for labels in (
        torch.tensor([0, 1]),
        torch.tensor([False, True]),
        torch.tensor([0.0, 1]).double(),
    ):
        scorer = Scorer(torch.nn.functional.binary_cross_entropy_with_logits, "y")
        batch = Batch({"y": labels, "x": torch.tensor([0.5, 2.0])})
        scored = scorer.scored(batch["x"], batch)
        expected = torch.nn.functional.binary_cross_entropy_with_logits(
            batch["x"], torch.tensor([0.0, 1.0])
        )
        assert scored.loss == expected
    scorer = Scorer(torch.nn.functional.cross_entropy, "y")
    classes = Batch({"y": torch.tensor([0, 1]), "x": torch.ones(2, 3)})
    assert scorer.scored(classes["x"], classes).loss is not None


@pytest.mark.parametrize("values", [[1, 2**64], [-(2**63) - 1, 1], [[1], [2**64]]])
def test_a_key_of_more_than_64_bits_is_refused(values: list[Any]) -> None:
    with pytest.raises(DataError, match="column 'id'"):
        as_column("id", values)


def test_keys_of_both_signs_keep_their_bits() -> None:
    assert as_column("id", [-1, 2**63]).tolist() == [-1, -(2**63)]


def test_a_string_that_is_no_unicode_names_column_and_row() -> None:
    with pytest.raises(DataError, match=r"column 'name': .*in row 1"):
        as_column("name", ["a", "b\ud800"])


def test_an_id_that_is_no_integer_is_refused_beside_large_ones() -> None:
    for values in ([2**60 + 1, 2.5], [2**63, np.float32(2.5)], [2**63, True], [[2**63, 2.5], [1]]):
        with pytest.raises(DataError, match="column 'a': expected"):
            as_column("a", values)
    assert as_column("a", [2**63, pd.NA, float("nan")]).offsets.tolist() == [0, 1, 1, 1]


def test_masked_values_of_an_array_are_missing() -> None:
    masked = np.ma.array([1, 2, 3], mask=[0, 1, 0])
    assert bags(as_column("a", masked)) == [[1], [], [3]]
    (batch,) = ArrayDataset({"a": masked}, schema=tr.data.Schema([tr.data.Sparse("a")]))
    assert bags(batch["a"]) == [[1], [], [3]]
    with pytest.raises(DataError, match="expected numbers in 'y', found Ragged"):
        ArrayDataset({"y": masked}, schema=tr.data.Schema([tr.data.Label("y")]))


def test_a_string_of_an_array_is_that_of_a_list() -> None:
    texts = ["x\0y", "x", "z"]
    assert as_column("a", np.array(texts)).decode() == as_column("a", texts).decode() == texts


def test_objects_of_polars_are_read_as_those_of_lists() -> None:
    frame = pl.DataFrame({"a": pl.Series([{3}, {4}], dtype=pl.Object)})
    assert bags(as_column("a", columns_of(frame)["a"])) == [[3], [4]]
    frame = pl.DataFrame({"a": pl.Series([1], dtype=pl.Int128)})
    with pytest.raises(
        DataError, match="column 'a': expected a type that Arrow knows, found Int12"
    ):
        ArrayDataset(frame)


def test_lists_of_tensors_are_columns() -> None:
    assert bags(as_column("a", [torch.tensor([1, 2]), torch.tensor([3])])) == [[1, 2], [3]]
    assert as_column("a", [torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (torch.ones(3).to_sparse(), "torch.sparse_coo"),
        (torch.ones(3, device="meta"), "one on meta"),
        (torch.ones(3, dtype=torch.complex64), "torch.complex64"),
        (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "a nested tensor"),
        (np.array(5), "ndarray"),
        ((np.array([1, 2]), np.array([0.0, 2.0])), "Ragged"),
    ],
)
def test_a_column_that_is_none_is_refused_by_name(column: Any, kind: str) -> None:
    with pytest.raises(DataError, match=rf"ArrayDataset: expected .*'a'.* found {kind}"):
        ArrayDataset({"a": column})


def test_bags_of_strings_may_have_weights() -> None:
    grams = np.array(["ab", "bc", "ab"]), np.array([0, 2, 3]), np.array([0.5, 1.0, 2.0])
    batch = as_batch({"gram": grams})
    assert batch["gram"].values.tolist() == hashes("gram", *grams[0])
    assert batch["gram"].weights.tolist() == [0.5, 1.0, 2.0]
    assert batch.hashed == {"gram": True}
    (same,) = ArrayDataset({"gram": grams})
    assert same["gram"].values.equal(batch["gram"].values)
    assert same.hashed == batch.hashed
    missing = np.array(["ab", None, "bc"], object), grams[1]
    with pytest.raises(DataError, match="'gram': expected strings in bags, found none at 1"):
        as_batch({"gram": missing})


def test_missing_numbers_alone_are_not_called_strings() -> None:
    assert as_batch({"age": [None, None]}).shown_without_numbers("age").startswith("no values")


def test_a_sparse_column_of_pandas_is_a_dense_one() -> None:
    columns = pd.get_dummies(pd.Series(["x", "y", "x"]), sparse=True)
    columns["price"] = pd.arrays.SparseArray([0.0, 1.5, 0.0])
    (batch,) = ArrayDataset(columns)
    assert batch["x"].tolist() == [True, False, True]
    assert batch["price"].tolist() == [0.0, 1.5, 0.0]


def test_a_column_may_have_more_values_than_32_bits_count() -> None:
    part = pa.ListArray.from_arrays([0, 1 << 30], pa.nulls(1 << 30))  # without memory of their own
    joined = arrow_of("a", pa.chunked_array([part, part, part]))
    assert joined.type == pa.large_list(pa.null())
    assert joined.value_lengths().to_pylist() == [1 << 30] * 3
    words = pa.chunked_array([["x"], ["y"]])
    assert arrow_of("a", words).type == pa.string()


@pytest.mark.parametrize("values", [torch.arange(5), np.arange(5), np.array(list("abcde"))])
def test_offsets_without_the_last_end_are_refused_with_what_to_append(values: Any) -> None:
    bags, _ = column_of("a", (values, torch.tensor([0, 2, 3, 5])))
    assert bags.offsets.tolist() == [0, 2, 3, 5]
    message = r"column 'a': expected offsets that end at 5, .*, found \[3\]: append it"
    with pytest.raises(DataError, match=message):
        column_of("a", (values, torch.tensor([0, 2, 3])))
