"""ArrayDataset: columns to batches, orders, streams, string keys, and bad columns."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from trireme import _core
from trireme.data import (
    ArrayDataset,
    Content,
    Dense,
    InsId,
    Label,
    Number,
    Ragged,
    Schema,
    Sparse,
    Weight,
    array_columns,
    criteo,
    string_keys,
)
from trireme.data.array_dataset import as_dataset
from trireme.data.batch import Strings
from trireme.data.foreign import as_batch
from trireme.data.user_columns import as_column
from trireme.errors import BadRequest, DataError

N = 103
SCHEMA = Schema(
    [Label("y"), Weight("w"), Dense("age"), Dense("xy", 2), Sparse("id"), Sparse("city")]
)


@pytest.fixture(autouse=True)
def without_hints(monkeypatch):
    """Each test begins as a process does."""
    monkeypatch.setattr(array_columns, "_hinted", set())


def columns() -> dict:
    return {
        "y": torch.arange(N) % 2,
        "w": np.linspace(0, 1, N),
        "age": list(range(N)),
        "xy": np.arange(2 * N).reshape(N, 2),
        "id": (np.arange(N) - N).view(np.uint64),
        "city": [None if i % 5 == 0 else f"city {i % 7}" for i in range(N)],
        "unread": "anything",
    }


def make(**options) -> ArrayDataset:
    return ArrayDataset(columns(), **({"schema": SCHEMA, "batch_size": 10} | options))


def rows(batches) -> list[int]:
    return [int(age) for batch in batches for age in batch["age"].flatten()]


def test_batches_hold_the_columns():
    dataset = make()
    batches = list(dataset)
    assert len(batches) == len(dataset) == 11
    assert rows(batches) == list(range(N))
    batch = batches[2]
    assert batch.keys() == ("y", "w", "age", "xy", "id", "city")
    assert all(batch[name].dtype == torch.float32 for name in ("y", "w", "age", "xy"))
    assert [tuple(batch[name].shape) for name in ("y", "age", "xy")] == [(10,), (10, 1), (10, 2)]
    assert batch["xy"][3].tolist() == [46, 47]
    assert batch["id"].values[batch["id"].offsets[0]].item() == -N + 20, "uint64 bits"
    keys = dict(
        zip(columns()["city"], string_keys("city", columns()["city"])[0].tolist(), strict=True)
    )
    city = batch["city"]
    bags = [
        city.values[b:e].tolist() for b, e in zip(city.offsets[:-1], city.offsets[1:], strict=True)
    ]
    assert bags == [[] if i % 5 == 0 else [keys[f"city {i % 7}"]] for i in range(20, 30)]


def test_drop_last_and_no_sparse_features():
    dataset = make(drop_last=True, schema=Schema([Dense("age")]))
    assert len(dataset) == len(list(dataset)) == 10
    assert next(iter(dataset)).bags is None


def test_shuffled_epochs_differ_and_repeat_by_seed():
    first, second = make(shuffle=True, seed=3), make(shuffle=True, seed=3)
    orders = [rows(first) for _ in range(3)]
    assert orders == [rows(second) for _ in range(3)]
    assert orders[0] != orders[1]
    assert all(sorted(order) == list(range(N)) for order in orders)
    assert rows(first.stream(0, 1, epoch=1)) == orders[1]
    assert rows(make(shuffle=True, seed=4)) != orders[0]
    assert rows(make(seed=4)) == list(range(N))


@pytest.mark.parametrize("num_streams", [1, 3, 200])
def test_streams_share_the_examples_and_go_on_from_a_position(num_streams):
    dataset = make(shuffle=True)
    shares = [list(dataset.stream(i, num_streams, epoch=2)) for i in range(num_streams)]
    assert [r for share in shares for r in rows(share)] == rows(dataset.stream(0, 1, epoch=2))
    sizes = [len(rows(share)) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    for i, share in enumerate(shares[:3]):
        for k, batch in enumerate(share):
            assert batch.stream == i
            rest = dataset.stream(i, num_streams, start=batch.position, epoch=2)
            assert rows(rest) == rows(share[k + 1 :])
            assert rest.fraction_read() == 1


def test_progress_is_a_fraction():
    stream = make().stream(0, 1, start=None)
    assert stream.fraction_read() == 0
    next(stream)
    assert stream.fraction_read() == pytest.approx(10 / N)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"age": None}, "missing: age"),
        ({"age": [1, 2]}, f"expected {N} values in 'age', as in 'y', found 2"),
        ({"age": ["a"] * N}, "expected numbers in 'age', found strings"),
        (
            {"age": [1.0] * (N - 1) + [np.nan]},
            rf"finite float32 numbers in 'age' of float64, found nan at \({N - 1}, 0\)",
        ),
        (
            {"y": pa.chunked_array([pa.array([1, 2] * (N // 2) + [None]).dictionary_encode()])},
            rf"finite float32 numbers in 'y' of float64, found nan at \({N - 1},\)",
        ),
        ({"age": [1e300] * N}, r"found 1e\+300 at \(0, 0\)"),
        ({"y": [0.0] * (N - 1) + [np.inf]}, rf"in 'y' of float64, found inf at \({N - 1},\)"),
        ({"w": [-1.0] * N}, r"expected weights >= 0 in 'w' of float32, found -1.0 at \(0,\)"),
        ({"xy": np.zeros((N, 3))}, r"'xy' of shape \(103, 2\), found \(103, 3\)"),
        ({"y": np.zeros((N, 1))}, r"'y' of shape \(103,\), found \(103, 1\)"),
        ({"id": np.full(N, 0.5)}, r"integers or strings in 'id' of float64, found 0.5 at \(0,\)"),
        ({"id": np.full(N, 2.0**53)}, r"integers or strings in 'id' of float64, found 9007"),
        ({"id": np.zeros((N, 2), int)}, "one value per example in 'id'"),
        (
            {"city": np.array([1, *["b"] * (N - 1)], object)},
            "'city': .* one kind, found 'b', a str, in row 1",
        ),
    ],
)
def test_bad_columns_are_refused(changes, message):
    data = {name: c for name, c in (columns() | changes).items() if c is not None}
    with pytest.raises(DataError, match=message):
        ArrayDataset(data, schema=SCHEMA, batch_size=4)


def test_arguments_out_of_range_are_refused():
    with pytest.raises(BadRequest, match="expected batch_size as an integer >= 1, found 0"):
        make(batch_size=0)
    with pytest.raises(
        BadRequest, match=r"expected tr.data.Schema\(fields\), .* one of CriteoText"
    ):
        make(schema=criteo())
    for arguments in [(-1, 2, 0), (2, 2, 0), (0, 1, -1)]:
        with pytest.raises(BadRequest, match=f"found {arguments[0]}, {arguments[1]} and"):
            make().stream(arguments[0], arguments[1], epoch=arguments[2])
    for start in [(N + 1,), (-1,), (0, 0)]:
        with pytest.raises(BadRequest, match="expected a position"):
            make().stream(0, 1, start=start)


def test_string_keys_are_the_published_hash():
    def key(feature: str, value: str) -> int:
        return string_keys(feature, [value])[0].view(np.uint64).item()

    assert key("workclass", "Private") == 0xFB5ED08825687BBA
    assert key("education", "Private") == 0xA67356D4206978E6
    assert key("s", "Z\u00fcrich") == 0xC765D980AB39E0C5
    assert key("s", "a" * 70) == 0x185EB14706480439
    keys, present = string_keys("s", np.array(["a", None, "", np.nan, "b"], object))
    assert present.tolist() == [True, False, False, False, True]
    assert keys[0] == string_keys("s", np.array(["a"]))[0][0]
    assert [len(array) for array in string_keys("s", [])] == [0, 0]


@pytest.mark.parametrize(
    "values",
    [
        pd.concat([pd.Series(["a", None]), pd.Series(["b"])]),
        pd.Series(["a", None, "b"], dtype="category"),
        pa.chunked_array([["a", None], ["b"]]),
        pl.concat([pl.Series(["a", None]), pl.Series(["b"])], rechunk=False),
    ],
    ids=["pandas", "categories", "arrow", "polars"],
)
def test_string_keys_take_columns_of_several_parts(values):
    keys, present = string_keys("s", values)
    assert present.tolist() == [True, False, True]
    assert keys[present].tolist() == string_keys("s", ["a", "b"])[0].tolist()


@pytest.mark.parametrize("values", [[1, 2], [["a"], ["b"]], ["a", 1]])
def test_string_keys_refuse_what_is_no_string(values):
    with pytest.raises(DataError, match=r"expected (strings|values of one kind)"):
        string_keys("s", values)


def test_core_refuses_offsets_out_of_range():
    text, out = np.zeros(4, np.uint8), np.zeros(2, np.uint64)
    for offsets in ([0, 3, 2], [-1, 0, 4], [0, 1, 5]):
        with pytest.raises(BadRequest, match=r"offsets that do not decrease within 0\.\.4"):
            _core.hash_strings(text, np.array(offsets), "s", out)
    with pytest.raises(BadRequest, match=r"one offset more than strings \(2\), found 2"):
        _core.hash_strings(text, np.array([0, 1]), "s", out)
    with pytest.raises(TypeError):
        _core.hash_strings(text, np.array([0, 1, 2], np.int32), "s", out)


def test_ragged_columns_give_their_bags_in_any_order():
    rng = np.random.default_rng(3)
    sizes = rng.integers(0, 4, 50)
    values = torch.from_numpy(rng.integers(0, 1000, 5 + sizes.sum()))
    ragged = Ragged(values, torch.from_numpy(5 + np.concatenate([[0], sizes.cumsum()])))
    bags = [values[b:e].tolist() for b, e in itertools.pairwise(ragged.offsets.tolist())]
    columns = {"n": np.arange(50), "id": np.arange(50) * 7, "words": ragged}
    schema = Schema([Dense("n"), Sparse("id"), Sparse("words")])
    seen = []
    for batch in ArrayDataset(columns, schema=schema, batch_size=8, shuffle=True):
        ids, words = batch["id"], batch["words"]
        for i, n in enumerate(batch["n"].flatten().int().tolist()):
            seen.append(n)
            assert ids.values[ids.offsets[i] : ids.offsets[i + 1]].tolist() == [7 * n]
            assert words.values[words.offsets[i] : words.offsets[i + 1]].tolist() == bags[n]
    assert sorted(seen) == list(range(50))
    assert seen != sorted(seen)


@pytest.mark.parametrize(
    "wrong",
    [
        Ragged(torch.ones(3), torch.tensor([0, 3])),
        Ragged(torch.arange(3), torch.tensor([0, 4])),
        Ragged(torch.arange(3), torch.tensor([2, 1])),
    ],
)
def test_ragged_columns_of_another_form_are_refused(wrong):
    with pytest.raises(DataError, match="expected 'id' as integers, with offsets that rise"):
        ArrayDataset({"id": wrong}, schema=Schema([Sparse("id")]), batch_size=1)


@pytest.mark.parametrize("schema", [None, Schema([Sparse("gram"), Sparse("word")])])
def test_values_keep_their_weights_and_other_features_have_none(schema):
    offsets = torch.tensor([1, 3, 3, 4])
    weighted = Ragged(torch.tensor([0, 7, 8, 9]), offsets, torch.tensor([0.0, 0.5, 2.0, -1.0]))
    columns = {"gram": weighted, "word": [[1, 2], [3], []]}
    batches = ArrayDataset(columns, schema=schema, batch_size=1, shuffle=True)
    seen = {}
    for batch in batches:
        gram, word = batch["gram"], batch["word"]
        assert word.weights is None
        seen[tuple(word.values.tolist())] = gram.values.tolist(), gram.weights.tolist()
    assert seen == {(1, 2): ([7, 8], [0.5, 2.0]), (3,): ([], []), (): ([9], [-1.0])}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], r"expected 2 weights of the values of 'gram', found \(1,\)"),
        ([1.0, np.nan], r"expected finite weights in 'gram' of float32, found nan at \(1,\)"),
    ],
)
def test_weights_of_values_that_cannot_be_are_refused(weights, message):
    column = Ragged(torch.tensor([7, 8]), torch.tensor([0, 2]), torch.tensor(weights))
    with pytest.raises(DataError, match=message):
        ArrayDataset({"gram": column})


@pytest.mark.parametrize(
    ("genres", "is_told"),
    [
        (["Comedy|Drama", "War", None], True),
        (["War", "", None, "Drama"], False),
        (["a|b", *("c" for _ in range(30))], False),
        ([], False),
        ([["Comedy", "Drama"], ["War"]], False),
    ],
)
def test_lists_in_one_string_are_told_once_how_to_be_split(genres, is_told, caplog):
    ArrayDataset({"genres": genres}, schema=Schema([Sparse("genres")]))
    data = ArrayDataset({"genres": genres}, schema=Schema([Sparse("genres")]))
    assert data.num_examples == len(genres)
    message = "'Comedy|Drama' is one id; if it is a list, split it, as frame['genres'].str.split("
    assert caplog.text.count(message) == is_told
    assert bool(caplog.text) == is_told


def _slices_of_strings():
    """The same slice of strings, by kind: a function of the strings, the first and the last."""

    def encoded(texts, begin, end):
        whole = Strings.encode(texts)
        return Strings(whole.data, whole.offsets[begin : end + 1])

    return {
        "Strings": encoded,
        "arrow": lambda texts, begin, end: pa.array(texts)[begin:end],
        "chunked": lambda texts, begin, end: pa.chunked_array([texts[:3], texts[3:]])[begin:end],
        "series": lambda texts, begin, end: pd.Series(texts, dtype="string[pyarrow]")[begin:end],
    }


@pytest.mark.parametrize("kind", _slices_of_strings())
@pytest.mark.parametrize(
    ("texts", "begin", "end", "hinted"),
    [
        (["a|b"] * 9 + ["War", "", "Art"], 9, 12, None),  # marks before the slice
        (["War", "", "Art"] + ["a|b"] * 9, 0, 3, None),  # and after it
        (["a|b"] * 9, 4, 4, None),
        (["War"] * 99 + ["", "\u00e9|d", "e|f"], 95, 101, "\u00e9|d"),  # few of all, many of these
        (["a|b", "", "Art", "c|", "|d"], 1, 4, "c|"),
        (["a|b", "", "Art", "c|", "|d"], 4, 5, "|d"),
    ],
)
def test_hint_at_lists_looks_at_the_strings_of_a_slice_alone(
    kind, texts, begin, end, hinted, caplog
):
    column = _slices_of_strings()[kind](texts, begin, end)
    data = ArrayDataset({"genres": column}, schema=Schema([Sparse("genres")]))
    assert data.num_examples == end - begin
    assert [record.args[1] for record in caplog.records] == ([] if hinted is None else [hinted])


def test_a_slice_of_strings_leaves_the_strings_around_it():
    column = as_column("word", pa.array(["before", "\u00e9t\u00e9", None, "after"])[1:3])
    assert column.decode() == ["\u00e9t\u00e9", ""]
    assert bytes(column.data.tolist()).decode() == "\u00e9t\u00e9"
    assert as_column("word", pa.array(["x"])[1:]).decode() == []
    assert as_column("word", pa.array([], pa.string())).decode() == []


def test_names_and_texts_of_examples_are_strings():
    names = [f"user {i} \u00e9" * (i % 3) for i in range(20)]
    schema = Schema([InsId(), Content("text"), Dense("n")])
    columns = {"ins_id": names, "text": np.array(names), "n": np.arange(20)}
    for batch in ArrayDataset(columns, schema=schema, batch_size=6, shuffle=True):
        expected = [names[n] for n in batch["n"].flatten().int().tolist()]
        assert batch["ins_id"].decode() == batch["text"].decode() == expected
    (batch,) = ArrayDataset(pa.table(columns), schema=schema, batch_size=20)
    assert batch["ins_id"].decode() == batch["text"].decode() == names
    with pytest.raises(DataError, match="expected strings in 'ins_id', found 3 in row 0"):
        ArrayDataset({"ins_id": [3]}, schema=Schema([InsId()]), batch_size=1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("train.csv", "expected a dataset, .* found 'train.csv'; tr.data.QueueDataset reads files"),
        (Path("train.csv"), "found PosixPath.'train.csv'.; tr.data.QueueDataset reads files"),
        (pd.Series([1, 2]), "expected a DataFrame, or columns by name, found a Series"),
    ],
)
def test_what_is_no_data_is_refused_with_what_is(data, message):
    with pytest.raises(BadRequest, match=message):
        as_dataset(data)


@pytest.mark.parametrize(
    ("columns", "are_strings"),
    [
        ({"user": ["u1"]}, {"user": True}),  # as many bytes as offsets
        ({"tags": [["a", "b"], ["c"]]}, {"tags": True}),  # as many values as offsets
        ({"tags": [[1, 2], [3]]}, {"tags": False}),
        ({"tags": Ragged(torch.arange(3), torch.tensor([0, 2, 3]))}, {}),
    ],
)
def test_the_kind_of_values_does_not_depend_on_their_number(columns, are_strings):
    (batch,) = ArrayDataset(columns)
    assert batch.hashed == are_strings


BIG = [2**63, 2**64 - 1, 1]


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        (BIG, BIG),
        (np.array(BIG, np.uint64), BIG),
        (tuple(BIG), BIG),
        ([-1, 2**63, 1], [2**64 - 1, 2**63, 1]),
        ([math.nan, 2**63, 1], [None, 2**63, 1]),
        ([None, 2**53 + 1, 1], [None, 2**53 + 1, 1]),
        (pd.array([2**63, None, 1], "UInt64"), [2**63, None, 1]),
        (pa.array([2**53 + 1, None, 1]), [2**53 + 1, None, 1]),
        (torch.tensor([1, 2, 256], dtype=torch.bfloat16)[:2], [1, 2]),
    ],
)
def test_integers_of_64_bits_are_keys_as_they_are(values, keys):
    (batch,) = ArrayDataset({"a": values}, schema=Schema([Sparse("a")]))
    assert (
        batch["a"].values.tolist()
        == np.array([key for key in keys if key is not None], np.uint64).view(np.int64).tolist()
    )
    assert batch["a"].offsets.diff().tolist() == [int(key is not None) for key in keys]
    hashed = Schema([Sparse("a", hashed=True)])
    (batch,) = ArrayDataset({"a": values}, schema=hashed)
    shown, present = string_keys("a", [None if key is None else str(key) for key in keys])
    if not any(key is not None and key < 0 for key in values if isinstance(key, int)):
        assert batch["a"].values.tolist() == shown[present].tolist()
    assert batch.hashed == {"a": True}


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
@pytest.mark.parametrize("schema", [None, Schema([Sparse("a")]), Schema([Label("a")])])
def test_integers_of_more_than_64_bits_are_refused(value, schema):
    for values in ([1, value], [[1], [value, 2]], pd.Series([1, value])):
        with pytest.raises(DataError, match=f"'a': expected integers of 64 bits, .*found {value}"):
            ArrayDataset({"a": values}, schema=schema)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([True, False], "bool"),
        (pd.date_range("2020-01-01", periods=2), "timestamp"),
        (Ragged(torch.arange(2), torch.arange(3)), "Ragged"),
        ((np.arange(2), np.arange(3)), "Ragged"),
    ],
)
def test_what_hashed_cannot_hash_is_refused(values, shown):
    with pytest.raises(
        DataError, match=f"strings or integers in 'a', .*hashed=True, found {shown}"
    ):
        ArrayDataset({"a": values}, schema=Schema([Sparse("a", hashed=True)]))


def test_lists_of_one_length_and_arrays_with_offsets_are_bags_with_a_schema():
    columns = {
        "lists": [[1, 2], [3, 4]],
        "none": [[], []],
        "arrays": (np.array([5, 6, 7]), np.array([0, 1, 3])),
    }
    (batch,) = ArrayDataset(columns, schema=Schema(map(Sparse, columns)))
    bags = {name: (batch[name].values.tolist(), batch[name].offsets.tolist()) for name in columns}
    assert bags == {
        "lists": ([1, 2, 3, 4], [0, 2, 4]),
        "none": ([], [0, 0, 0]),
        "arrays": ([5, 6, 7], [0, 1, 3]),
    }


def test_floats_that_their_type_may_have_rounded_are_no_ids():
    with pytest.raises(DataError, match=r"integers or strings in 'a' of float32, found 33554432"):
        ArrayDataset({"a": np.array([2**25], np.float32)}, schema=Schema([Sparse("a")]))


@pytest.mark.parametrize("field", [Label("a"), Dense("a"), Sparse("a"), Number("a"), InsId("a")])
@pytest.mark.parametrize(
    "value", [5, 1.5, "text", None, np.float32(1), torch.tensor(1), {"b": 1}, iter([1])]
)
def test_what_is_no_column_is_refused_with_a_schema(value, field):
    with pytest.raises(DataError, match=r"expected a value per example in 'a', found .*no column"):
        ArrayDataset({"a": value}, schema=Schema([field]))


def test_numbers_with_a_schema_may_be_a_list():
    (batch,) = ArrayDataset({"a": [1, 2]}, schema=Schema([Number("a")]))
    assert batch["a"].tolist() == [1, 2]
    with pytest.raises(DataError, match="expected numbers in 'a', found strings"):
        ArrayDataset({"a": ["x"]}, schema=Schema([Number("a")]))


def test_what_has_no_rows_yet_is_refused_with_what_reads_them():
    pl = pytest.importorskip("polars")
    lazy = pl.DataFrame({"a": [1]}).lazy()
    for use in (as_dataset, ArrayDataset, as_batch):
        with pytest.raises(DataError, match=r"found a LazyFrame, .*; \.collect\(\) reads them"):
            use(lazy)
    for kind in (pd.DataFrame, ArrayDataset):
        with pytest.raises(BadRequest, match=f"found the class {kind.__name__}; make one"):
            as_dataset(kind)
