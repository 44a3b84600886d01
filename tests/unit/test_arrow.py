"""Parquet and Arrow IPC files: kinds of columns, streams, positions, and what does not fit."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from trireme.data import (
    Content,
    Dense,
    InsId,
    Label,
    QueueDataset,
    Schema,
    Show,
    Sparse,
    Strings,
    Weight,
    arrow,
    arrow_columns,
    arrow_files,
    string_keys,
)
from trireme.errors import BadRequest, DataError
from trireme.rows.feature_keys import arrow_string_keys

FIELDS = [
    InsId("id"),
    Label("y"),
    Show("s"),
    Weight("w"),
    Dense("x"),
    Dense("v", 3),
    Sparse("big"),
    Sparse("word"),
    Sparse("words"),
    Sparse("ids"),
    Sparse("code", hashed=True),
    Sparse("color"),
    Content("note"),
]
TYPES = {
    "unread": pa.date32(),
    "note": pa.string_view(),
    "color": pa.dictionary(pa.int8(), pa.string()),
    "code": pa.int32(),
    "ids": pa.large_list(pa.int32()),
    "words": pa.list_(pa.large_string()),
    "word": pa.string(),
    "big": pa.uint64(),
    "v": pa.list_(pa.float64(), 3),
    "x": pa.float32(),
    "w": pa.float64(),
    "s": pa.dictionary(pa.int8(), pa.int64()),
    "y": pa.bool_(),
    "id": pa.int64(),
}


def random_row(random: Random, number: int) -> dict[str, Any]:
    def maybe(value):
        return None if random.random() < 0.2 else value

    def words():
        return [maybe(random.choice(["", "a", "b", "\u00e9"])) for _ in range(random.randrange(4))]

    return {
        "unread": None,
        "id": number,
        "y": random.random() < 0.5,
        "s": random.randrange(5),
        "w": random.random(),
        "x": np.float32(random.gauss(0, 1)).item(),
        "v": [random.random() for _ in range(3)],
        "big": maybe(random.randrange(1 << 64)),
        "word": maybe(random.choice(["", "a", "b"])),
        "words": maybe(words()),
        "ids": maybe([maybe(random.randrange(-9, 9)) for _ in range(random.randrange(4))]),
        "code": maybe(random.randrange(100)),
        "color": maybe(random.choice(["red", "green", ""])),
        "note": maybe(random.choice(["", "n", "long" * 10])),
    }


def keys_of(name: str, value: Any, hashed: bool) -> list[int]:
    """What a plain reader makes of a value of a sparse column."""
    values = value if isinstance(value, list) else [value]
    values = [v for v in values if v not in (None, "")]
    if hashed:
        keys, _ = string_keys(name, [str(v) for v in values])
        return [int(key) for key in keys]
    return [v - (1 << 64) if v >= 1 << 63 else v for v in values]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    expected: dict[str, Any] = {"id": str(row["id"]), "note": row["note"] or ""}
    expected |= {name: np.float32(row[name]).item() for name in ("y", "s", "w")}
    expected |= {"x": [row["x"]], "v": [np.float32(v).item() for v in row["v"]]}
    hashed = ("word", "words", "code", "color")
    for name in ("big", "ids", *hashed):
        expected[name] = keys_of(name, row[name], name in hashed)
    return expected


def examples_of(batch) -> list[dict[str, Any]]:
    columns = {}
    for field in FIELDS:
        column = batch[field.name]
        if isinstance(column, Strings):
            columns[field.name] = column.decode()
        elif isinstance(field, Sparse):
            ends = column.offsets.tolist()
            values = column.values.tolist()
            columns[field.name] = [values[b:e] for b, e in itertools.pairwise(ends)]
        else:
            columns[field.name] = column.tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    columns = {name: [row[name] for row in rows] for name in TYPES}
    return pa.table(columns, pa.schema(TYPES.items()))


def write(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        # Parquet has no type for views of strings.
        names = table.schema.names
        table = table.set_column(
            names.index("note"), "note", table.column("note").cast(pa.string())
        )
        pa.parquet.write_table(table, path, row_group_size=23)
    elif path.suffix == ".feather":
        pa.feather.write_feather(table, path, chunksize=40)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=17)


@pytest.fixture(params=["parquet", "arrow", "feather"])
def folder(request, tmp_path: Path, monkeypatch) -> Path:
    """Files of unequal sizes, one without a row."""
    monkeypatch.setattr(arrow_files, "_ROWS", 10)
    random = Random(3)
    number = 0
    for i, num_rows in enumerate([100, 1, 0, 150, 7]):
        rows = [random_row(random, number + j) for j in range(num_rows)]
        write(tmp_path / f"part-{8 + i}.{request.param}", table_of(rows))
        number += num_rows
    return tmp_path


EXPECTED = 258


def expected_rows() -> list[dict[str, Any]]:
    random = Random(3)
    return [plain(random_row(random, number)) for number in range(EXPECTED)]


def make(folder: Path, **options) -> QueueDataset:
    options = {"schema": arrow(FIELDS), "batch_size": 16} | options
    return QueueDataset(f"{folder}/part-*", **options)


def flat(batches) -> list[dict[str, Any]]:
    return [example for batch in batches for example in examples_of(batch)]


@pytest.mark.parametrize("batch_size", [1, 16, 1000])
def test_every_kind_of_column_reads_as_a_plain_reader_reads_it(folder, batch_size):
    batches = list(make(folder, batch_size=batch_size))
    assert flat(batches) == expected_rows()
    assert {batch.num_examples for batch in batches[:-1]} <= {batch_size}
    short = list(make(folder, batch_size=batch_size, drop_last=True))
    assert len(short) == EXPECTED // batch_size


@pytest.mark.parametrize("num_streams", [1, 2, 3, 7])
def test_streams_hold_every_row_once_and_are_balanced(folder, num_streams):
    dataset = make(folder)
    shares = [flat(dataset.stream(i, num_streams)) for i in range(num_streams)]
    assert [row for share in shares for row in share] == expected_rows()
    # Files of few rows are mostly metadata: balance shows within the large ones.
    (folder / "large").mkdir()
    for path in folder.glob("part-11.*"):
        path.rename(folder / "large" / path.name)
    large = make(folder / "large")
    sizes = [len(flat(large.stream(i, num_streams))) for i in range(num_streams)]
    assert sum(sizes) == 150
    assert max(sizes) - min(sizes) <= 2


@pytest.mark.parametrize("num_streams", [1, 3])
def test_a_stream_goes_on_from_any_position_with_exactly_the_same_batches(folder, num_streams):
    for index in range(num_streams):
        whole = list(make(folder).stream(index, num_streams))
        for k, batch in enumerate(whole):
            rest = make(folder, threads=3).stream(index, num_streams, start=batch.position)
            again = list(rest)
            assert [b.position for b in again] == [b.position for b in whole[k + 1 :]]
            assert flat(again) == flat(whole[k + 1 :])


def test_a_position_of_other_files_is_refused(folder):
    dataset = make(folder)
    with pytest.raises(BadRequest, match=r"row 0 to 100 of .*part-8\..*, found 101"):
        next(dataset.stream(0, 1, start=(0, 101)))
    with pytest.raises(BadRequest, match=r"file number 0 to 4, row\) of stream 0, found \(5, 0\)"):
        dataset.stream(0, 1, start=(5, 0))


def test_progress_counts_stored_bytes(folder):
    for index in range(3):
        stream = make(folder).stream(index, 3)
        seen = [stream.num_bytes_read]
        for _ in stream:
            seen.append(stream.num_bytes_read)
        assert seen == sorted(seen)
        assert seen[-1] == pytest.approx(stream.num_bytes, rel=0.05)
        assert all(seconds > 0 for seconds in stream.seconds.values())


def one_column(folder: Path, array: pa.Array, field, suffix: str = "parquet", **options):
    path = folder / f"one.{suffix}"
    table = pa.table({field.name: array})
    if suffix == "parquet":
        pa.parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    schema = arrow([field, *options.pop("more", [])])
    return QueueDataset(path, **({"schema": schema, "batch_size": 10} | options))


@pytest.mark.parametrize(
    ("array", "field", "message"),
    [
        (pa.array([0.0, None]), Label("y"), "row 2: column 'y': expected a finite .*found None"),
        (pa.array([1, 2, -1]), Weight("w"), "row 3: .*not negative, found -1"),
        (pa.array([1.0, 1e39]), Dense("x"), r"row 2: .*finite float32 number, found 1e\+39"),
        (pa.array([[1.0], [1.0, 2.0]]), Dense("x", 2), r"row 1: .*expected 2 .*found \[1.0\]"),
        (pa.array([[1, 2], [1, None]]), Dense("x", 2), r"row 2: .*expected 2 .*\[1, None\]"),
        (pa.array([None, [1, 2]]), Dense("x", 2), "row 1: .*expected 2 .*found None"),
    ],
)
def test_values_that_do_not_fit_are_named_or_counted(tmp_path, array, field, message, caplog):
    with pytest.raises(DataError, match=f"one.parquet {message}.*\nschema: "):
        list(one_column(tmp_path, array, field))
    stream = one_column(tmp_path, array, field, on_error="count").stream(0, 1)
    assert sum(batch.num_examples for batch in stream) == len(array) - 1
    assert stream.num_broken_lines == 1
    (record,) = caplog.records
    assert "skipped broken rows: 1; the first: " in record.getMessage()


@pytest.mark.parametrize(
    ("array", "field", "message"),
    [
        (pa.array(["1"]), Label("y"), "'y': expected numbers, found string"),
        (pa.array([1.5]), Sparse("a"), "'a': expected integers or strings, .*found double"),
        (pa.array([1.5]), Dense("x", 2), "'x': expected lists of 2 numbers, found double"),
        (pa.array([[1.5]]), InsId("i"), "'i': expected strings or integers, found list"),
    ],
)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_columns_that_do_not_fit_show_the_schema_and_the_file(
    tmp_path, array, field, message, suffix
):
    with pytest.raises(DataError, match=rf"one.{suffix}: {message}.*\nschema: .*\nthe file has: "):
        list(one_column(tmp_path, array, field, suffix))
    missing = one_column(tmp_path, array, field, suffix, more=[Sparse("none")])
    with pytest.raises(DataError, match=r"'none': expected one column, found 0"):
        list(missing)


def test_a_column_is_looked_up_by_its_name(tmp_path, monkeypatch):
    """Not by a pass over all columns for each field."""
    names = [f"x{i}" for i in range(50)]
    pa.parquet.write_table(pa.table({name: [1] for name in names}), tmp_path / "a.parquet")
    check = arrow_files._check_columns
    monkeypatch.setattr(
        arrow_files, "_check_columns", lambda schema, *rest: check(schema, NoPass(rest[0]), rest[1])
    )
    data = QueueDataset(
        tmp_path / "a.parquet", schema=arrow([Sparse(name) for name in names]), batch_size=1
    )
    (batch,) = data
    assert batch.bags.values.tolist() == [1] * 50


class NoPass:
    """A schema of Arrow over which nobody iterates."""

    def __init__(self, schema: pa.Schema) -> None:
        self.field, self.get_all_field_indices = schema.field, schema.get_all_field_indices

    def __iter__(self):
        raise AssertionError("found a pass over all columns")


def test_a_column_without_any_value_has_empty_bags(tmp_path):
    (batch,) = one_column(tmp_path, pa.nulls(3), Sparse("a"), "arrow", more=[])
    assert batch["a"].offsets.tolist() == [0, 0, 0, 0]
    (batch,) = one_column(tmp_path, pa.nulls(3), InsId("i"), "arrow")
    assert batch["i"].decode() == ["", "", ""]


@pytest.mark.parametrize("is_list", [False, True])
def test_a_large_dictionary_is_hashed_where_rows_use_it_only(tmp_path, monkeypatch, is_list):
    words = [f"word {i}" for i in range(5000)]
    array = pa.DictionaryArray.from_arrays(pa.array(range(5000)), words)
    if is_list:
        array = pa.ListArray.from_arrays(pa.array(range(5001), pa.int32()), array)
    table = pa.table({"word": array})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=10)
    sizes = []

    def counted(name: str, strings: pa.Array):
        sizes.append(len(strings))
        return arrow_string_keys(name, strings)

    monkeypatch.setattr(arrow_columns, "arrow_string_keys", counted)
    data = QueueDataset(tmp_path / "a.arrow", schema=arrow([Sparse("word")]), batch_size=5000)
    (batch,) = data
    assert sum(sizes) == 5000
    assert batch["word"].values.tolist() == string_keys("word", words)[0].tolist()


def test_broken_rows_keep_positions_of_the_file(tmp_path):
    values = [None if i % 3 == 0 else float(i) for i in range(100)]
    dataset = one_column(tmp_path, pa.array(values), Label("y"), on_error="count")
    batches = list(dataset)
    right = [value for value in values if value is not None]
    assert [y for batch in batches for y in batch["y"].tolist()] == right
    assert batches[0].position == (0, right[9] + 1)
    rest = list(dataset.stream(0, 1, start=batches[2].position))
    assert [y for batch in rest for y in batch["y"].tolist()] == right[30:]


def test_files_whose_content_differs_from_their_ending(tmp_path, folder):
    for path in folder.glob("part-*"):
        whole = path.read_bytes()
        for junk in (Random(1).randbytes(1000), whole[:-1], whole[: len(whole) // 2], b"x"):
            path.write_bytes(junk)
            with pytest.raises(DataError, match=f"cannot read .*{path.name}: "):
                list(QueueDataset(path, schema=arrow(FIELDS), batch_size=8))
        path.write_bytes(whole)
        dataset = make(folder)
        path.write_bytes(whole[:-1])
        with pytest.raises(DataError, match=f"bytes in .*{path.name}, found .*it has changed"):
            list(dataset)
        path.write_bytes(whole)
    (tmp_path / "a.parquet.gz").write_bytes(b"x")
    with pytest.raises(DataError, match=r"expected files \.parquet.*a\.parquet\.gz"):
        QueueDataset(tmp_path / "a.parquet.gz", schema=arrow(FIELDS), batch_size=8)


def test_damaged_pages_do_not_pass(tmp_path):
    path = tmp_path / "one.parquet"
    table = pa.table({"a": np.arange(10_000)})
    pa.parquet.write_table(table, path, write_page_checksum=True, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[5_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"cannot read .*one\.parquet: .*CRC"):
        list(QueueDataset(path, schema=arrow([Sparse("a")]), batch_size=64))


def test_an_empty_list_of_files_and_a_schema_without_format_are_refused(tmp_path):
    with pytest.raises(BadRequest, match="expected a schema with a format"):
        QueueDataset(tmp_path / "x.parquet", schema=Schema([Sparse("a")]), batch_size=1)
