"""MultiSlot, CSV and libsvm: options, headers, and the errors a user reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.plain_text import examples_of, hash_of
from trireme.data import (
    Content,
    Dense,
    InsId,
    Label,
    QueueDataset,
    Schema,
    Show,
    Sparse,
    Weight,
    csv,
    libsvm,
    multislot,
    string_keys,
)
from trireme.data.csv import CsvText
from trireme.errors import BadRequest, DataError

SLOTS = [InsId(), Show(), Label("click"), Sparse("a"), Sparse("b"), Dense("d", 2)]


def read(schema: Schema, path: Path, text: str | bytes, **options: object) -> list[tuple]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    dataset = QueueDataset(path, schema=schema, **{"batch_size": 100, **options})
    return [example for batch in dataset for example in examples_of(schema, batch)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "part"


@pytest.mark.parametrize(
    ("rules", "bags"),
    [
        ({}, [((0, 7), ()), ((0,), (-1,))]),
        ({"drop_zeros": True}, [((7,), ()), ((), (-1,))]),
        ({"pad_empty": True}, [((0, 7), (0,)), ((0,), (-1,))]),
        ({"drop_zeros": True, "pad_empty": True}, [((7,), (0,)), ((0,), (-1,))]),
    ],
)
def test_multislot_follows_fleets_rules_if_told(path, rules, bags):
    text = "1 x 1 3 1 1 2 0 7 0 2 0.5 -2\n1 y 1 0 1 0 1 0 1 18446744073709551615 2 0 1e3 \n"
    expected = [
        (b"x", 3.0, 1.0, *bags[0], (0.5, -2.0)),
        (b"y", 0.0, 0.0, *bags[1], (0.0, 1000.0)),
    ]
    assert read(multislot(SLOTS, **rules), path, text) == expected


def test_multislot_batches_have_the_right_types(path):
    path.write_text("1 x 1 3 1 1 2 0 7 0 2 0.5 -2\n")
    (batch,) = QueueDataset(path, schema=multislot(SLOTS), batch_size=4)
    assert batch.keys() == ("ins_id", "show", "click", "d", "a", "b")
    assert batch["ins_id"].decode() == ["x"]
    for name, shape in (("show", (1,)), ("click", (1,)), ("d", (1, 2))):
        assert (batch[name].dtype, batch[name].shape) == (torch.float32, shape)
    assert batch.bags.values.dtype == batch.bags.offsets.dtype == torch.int64
    assert batch.bags.weights is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 x 1 -3", "field 2 (show): expected a finite number >= 0, found '-3'"),
        ("1 x 1 3 1 1e99", "field 3 (click): expected a finite number, found '1e99'"),
        ("1 x 1 3 2 1 1", "field 3 (click): expected the count 1, found '2'"),
        ("1 x 1 3 1 1 1 18446744073709551616", "field 4 (a): expected an integer from -2^63 to"),
        (
            "1 x 1 3 1 1 1 7 2 7",
            "field 5 (b): expected an integer from -2^63 to 2^64 - 1 (hashed=True reads strings),"
            " found ''",
        ),
        ("1 x 1 3 1 1 1 7 1 7 3 1 1 1", "field 6 (d): expected the count 2, found '3'"),
        ("1 x 1 3 1 1 1 7 1 7", "field 6 (d): expected a count of values, found ''"),
        ("1 x 1 3 1 1 1 7 1 7 2 0 0 1", "expected the line to end behind 6 slots, found '1'"),
        ("1 x" + " 9" * (1 << 20), "expected a line of at most 1048576 bytes, found '1 x 9"),
    ],
)
def test_multislot_names_what_is_wrong(path, line, message):
    good = "1 x 1 3 1 1 2 0 7 0 2 0.5 -2"
    with pytest.raises(DataError) as caught:
        read(multislot(SLOTS), path, f"{good}\n{line}\n{good}\n")
    assert f"{path} line 2: {message}" in str(caught.value)
    text = f"{good}\n{line}\n{good}\n"
    assert len(read(multislot(SLOTS), path, text, on_error="count", batch_size=1)) == 2


def test_multislot_reads_a_line_of_the_largest_size(path):
    keys = tuple(range(10**6, 10**6 + 131_000))
    line = f"1 1 {len(keys)} {' '.join(map(str, keys))}"
    assert len(line) < 1 << 20
    schema = multislot([Label(), Sparse("a")])
    assert read(schema, path, f"1 0 0\n{line}\n1 1 0\n", threads=2) == [
        (0.0, ()),
        (1.0, keys),
        (1.0, ()),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        [Label(), InsId(), Sparse("a")],
        [Content(), InsId(), Label()],
        [InsId(), InsId("other"), Label()],
    ],
)
def test_multislot_refuses_ins_id_elsewhere(fields):
    with pytest.raises(BadRequest, match="at most one InsId and one Content, first and in this"):
        multislot(fields)


PEOPLE = [Label("rich"), Sparse("job", hashed=True), Dense("age"), Weight("w"), Sparse("zip")]


def test_csv_finds_columns_by_name(path):
    text = (
        '\ufeffage,"job",note,zip,rich,w\r\n'
        '39,"clerk, senior",,12,1,2\r\n'
        ',,"a ""b""",,0,0.5\n'
        '17,say "hi",x,-1,0,0'
    )
    clerk, hi = (hash_of("job", word) for word in (b"clerk, senior", b'say "hi"'))
    assert read(csv(PEOPLE), path, text) == [
        (1.0, (clerk,), (39.0,), 2.0, (12,)),
        (0.0, (), (0.0,), 0.5, ()),
        (0.0, (hi,), (17.0,), 0.0, (-1,)),
    ]
    assert string_keys("job", ["clerk, senior"])[0][0] == clerk


def test_csv_files_may_order_their_columns_differently(tmp_path):
    (tmp_path / "a").write_text("x,y\n1,2\n3,4\n")
    (tmp_path / "b").write_text("z,y,x\n0,6,5\n")
    schema = csv([Dense("x"), Sparse("y")])
    (batch,) = QueueDataset([tmp_path / "a", tmp_path / "b"], schema=schema, batch_size=9)
    assert examples_of(schema, batch) == [((1.0,), (2,)), ((3.0,), (4,)), ((5.0,), (6,))]


def test_csv_does_not_search_the_header_for_each_column(path, monkeypatch):
    class Names(list):
        def index(self, *_):
            raise AssertionError("found a search for each column")

        __contains__ = count = index

    read = CsvText._names
    monkeypatch.setattr(CsvText, "_names", lambda *args: Names(read(*args)))
    path.write_text("b,c,a\n1,2,3\n")
    (batch,) = QueueDataset(path, schema=csv([Sparse(name) for name in "abc"]), batch_size=1)
    assert batch.bags.values.tolist() == [3, 1, 2]


def test_csv_header_belongs_to_no_stream_but_all_know_it(path):
    path.write_text("b,a\n" + "".join(f"{i},{i + 1}\n" for i in range(100)))
    dataset = QueueDataset(path, schema=csv([Label("a"), Label("b")]), batch_size=7)
    actual = [
        example
        for index in range(3)
        for batch in dataset.stream(index, 3)
        for example in examples_of(dataset.schema, batch)
    ]
    assert actual == [(i + 1.0, float(i)) for i in range(100)]


def test_csv_renames_columns_and_gathers_dense_ones(path):
    schema = csv([Label(), Dense("d", 2)], columns={"label": "click", "d": ["I1", "I2"]})
    assert read(schema, path, "I2,click,I1\n2,1,1\n,0,3\n") == [
        (1.0, (1.0, 2.0)),
        (0.0, (3.0, 0.0)),
    ]


def test_csv_without_header_takes_cells_in_order(path):
    schema = csv([Label(), Dense("d", 2), Sparse("s")], header=False, delimiter="\t", quote=None)
    assert read(schema, path, '1\t2\t\t7\n0\t\t"\t\n', on_error="count") == [
        (1.0, (2.0, 0.0), (7,))
    ]


def test_csv_lists(path):
    schema = csv([Label(), Dense("d", 3), Sparse("s")], list_separator="|")
    text = "d,s,label\n1|2|3,4||5|,1\n,,0\n|-1|,6,0\n"
    assert read(schema, path, text) == [
        (1.0, (1.0, 2.0, 3.0), (4, 5)),
        (0.0, (0.0, 0.0, 0.0), ()),
        (0.0, (0.0, -1.0, 0.0), (6,)),
    ]


def test_csv_fields_may_share_a_long_list(path):
    """More keys in a line than it has characters."""
    fields = [Label(), *(Sparse(name) for name in "abcd")]
    schema = csv(fields, list_separator="|", columns=dict.fromkeys("abcd", "x"))
    keys = (7,) * 200_000
    text = f"label,x\n1,{'|'.join(map(str, keys))}\n"
    assert read(schema, path, text) == [(1.0, keys, keys, keys, keys)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (",,,,,", "field 1 (rich): expected a finite number, found ''"),
        ("1,2", "expected 6 cells separated by ',', found 2 in '1,2'"),
        (",,x,1", "found 4 in ',,x,1'"),
        ('0,"a', "expected a closing quote, found '\"a'"),
        ('0,"a"b,,,,', "expected a delimiter behind the closing quote, found '\"a\"b,,,,'"),
        (" 39,,,,0,1", "field 3 (age): expected a finite number, found ' 39'"),
        ("39,,,,0,-1", "field 4 (w): expected a finite number >= 0, found '-1'"),
        ("39,,,1.5,0,1", "field 5 (zip): expected an integer from -2^63 to 2^64 - 1 (hashed=True"),
        ("39,,,1.5,0,1", "(hashed=True reads strings), found '1.5'"),
    ],
)
def test_csv_names_what_is_wrong(path, line, message):
    with pytest.raises(DataError) as caught:
        read(csv(PEOPLE), path, f"age,job,note,zip,rich,w\n1,,,,1,1\n{line}\n")
    assert f"{path} line 3: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"age,job,zip,rich", "rich, job, age, w, zip, found age, job, zip, rich; missing: w"),
        (b"age,job,zip,rich,w,age", "; twice: age"),
        (b"", "missing: rich, job, age, w, zip"),
        (b'age,"job', "expected a header, found b'age,\"job': unexpected end of data"),
        (b"age,\xff", "expected a header, found b'age,\\xff': 'utf-8' codec"),
        (b"age," * 20_000, "expected a header of fewer than 65536 bytes, found more"),
    ],
)
def test_csv_names_a_wrong_header(path, header, message):
    with pytest.raises(DataError) as caught:
        read(csv(PEOPLE), path, header + b"\n1,,,,1,1\n")
    assert f"{path}: expected" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delimiter": ""}, "expected different marks that are no part of a number, found"),
        ({"delimiter": "1"}, "found '1'"),
        ({"delimiter": "\n"}, "found '.x0a'"),
        ({"delimiter": '"'}, "found '\"'"),
        ({"list_separator": ","}, "found ','"),
        ({"delimiter": ";;"}, "expected a mark of one ASCII character, found ';;'"),
        ({"columns": {"b": "x"}}, "columns of no field: b"),
        ({"columns": {"a": ["x", "y"]}}, "expected the names of 1 columns for Label.*found x, y"),
        ({"columns": {"a": "x"}, "header": False}, "columns are names in a header, found header="),
    ],
)
def test_csv_refuses_options_that_make_no_sense(options, message):
    with pytest.raises(BadRequest, match=message):
        csv([Label("a")], **options)


def test_csv_asks_for_the_columns_of_a_wide_feature():
    with pytest.raises(
        BadRequest, match=r"expected the names of 2 columns for Dense.*, found d; say"
    ):
        csv([Dense("d", 2)])
    assert csv([Dense("d", 2)], list_separator="|") != csv([Dense("d", 2)], header=False)


def test_libsvm_values_are_weights(path):
    text = "1 3:0.5 10:-2\n-1\t\n0.5 18446744073709551615:1e-3  3:1 3:1 # note 1:1\n"
    path.write_text(text)
    schema = libsvm(feature="x")
    (batch,) = QueueDataset(path, schema=schema, batch_size=9)
    thousandth = float(torch.tensor(1e-3))
    assert examples_of(schema, batch) == [
        (1.0, ((3, 0.5), (10, -2.0))),
        (-1.0, ()),
        (0.5, ((-1, thousandth), (3, 1.0), (3, 1.0))),
    ]
    assert batch.bags.weights.dtype == torch.float32


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "field 1 (label): expected a finite number, found ''"),
        ("+ 1:1", "field 1 (label): expected a finite number, found '+'"),
        ("1 qid:3 1:1", "field 2 (features): expected index:value with an integer from -2^63 to"),
        ("1 5", "and a finite number, found '5'"),
        ("1 5:", "found '5:'"),
        ("1 5:x", "found '5:x'"),
        ("1 5:1e40", "found '5:1e40'"),
        ("1 :1", "found ':1'"),
    ],
)
def test_libsvm_names_what_is_wrong(path, line, message):
    with pytest.raises(DataError) as caught:
        read(libsvm(), path, f"1 1:1\n{line}\n0 1:1\n")
    assert f"{path} line 2: " in str(caught.value)
    assert message in str(caught.value)
