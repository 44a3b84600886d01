"""Files of every format, and everything that can be wrong with them."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from trireme.data import Dense, InsId, Label, Schema, Sparse, arrow, criteo, csv, libsvm, multislot

NUM_LINES = 300
BROKEN_LINE = 200  # from 0, a header not counted
_FIELDS = [InsId("id"), Label("label"), Dense("dense", 2), Sparse("C1")]
_CRITEO = ["1", *["3"] * 13, *["a"] * 26]
_TOO_LARGE = "18446744073709551616"  # 2^64


@dataclass(frozen=True)
class TextFormat:
    """broken: what is wrong with a line -> the line, and the value that the message has to show."""

    schema: Schema
    header: tuple[str, ...]
    line: Callable[[int], str]
    broken: dict[str, tuple[str, str]]


TEXT = {
    "multislot": TextFormat(
        multislot(_FIELDS),
        (),
        lambda i: f"1 id{i} 1 {i % 2} 2 0.5 {i} 2 {i} 7",
        {
            "a column less": ("1 x 1 1 2 0.5 0.5", "field 4 (C1): expected a count"),
            "a column more": ("1 x 1 1 2 0.5 0.5 1 3 1 4", "'1 4'"),
            "a large number": ("1 x 1 1 2 1e39 0.5 1 3", "field 3 (dense)|'1e39'"),
            "a large key": (f"1 x 1 1 2 0.5 0.5 1 {_TOO_LARGE}", f"field 4 (C1)|'{_TOO_LARGE}'"),
            "a word": ("1 x 1 1 2 what 0.5 1 3", "field 3 (dense)|'what'"),
        },
    ),
    "criteo": TextFormat(
        criteo(),
        (),
        lambda i: "\t".join([str(i % 2), *[str(i)] * 13, *[f"{i:x}"] * 26]),
        {
            "a column less": ("\t".join(_CRITEO[:-1]), "expected 40 fields|found 39"),
            "a column more": ("\t".join([*_CRITEO, "a"]), "expected 40 fields|found 41"),
            "a large number": (
                "\t".join(["1", "9223372036854775808", *_CRITEO[2:]]),
                "field 2 (I1)|'9223372036854775808'",
            ),
            "a large key": ("\t".join([*_CRITEO[:-1], "123456789"]), "field 40 (C26)|'123456789'"),
            "a word": ("\t".join(["1", "what", *_CRITEO[2:]]), "field 2 (I1)|'what'"),
        },
    ),
    "csv": TextFormat(
        csv(_FIELDS, columns={"dense": ["d1", "d2"]}),
        ("id,label,d1,d2,C1",),
        lambda i: f"id{i},{i % 2},0.5,{i},{i}",
        {
            "a column less": ("x,1,0.5,0.5", "expected 5 cells|found 4 in 'x,1,0.5,0.5'"),
            "a column more": ("x,1,0.5,0.5,3,4", "expected 5 cells|found 6"),
            "a large number": ("x,1,1e39,0.5,3", "field 3 (dense)|'1e39'"),
            "a large key": (f"x,1,0.5,0.5,{_TOO_LARGE}", f"field 4 (C1)|'{_TOO_LARGE}'"),
            "a word": ("x,1,what,0.5,3", "field 3 (dense)|'what'"),
        },
    ),
    "libsvm": TextFormat(
        libsvm(feature="C1"),
        (),
        lambda i: f"{i % 2} {i}:0.5 7:1",
        {
            "a column more": ("1 3:1:2", "field 2 (C1)|'3:1:2'"),
            "a column less": ("1 3", "field 2 (C1)|'3'"),
            "a large number": ("1 3:1e39", "field 2 (C1)|'3:1e39'"),
            "a large key": (f"1 {_TOO_LARGE}:1", f"field 2 (C1)|'{_TOO_LARGE}:1'"),
            "a word": ("what 3:1", "field 1 (label)|'what'"),
        },
    ),
}
SCHEMAS = {
    **{name: text_format.schema for name, text_format in TEXT.items()},
    "parquet": arrow(_FIELDS),
}


@dataclass(frozen=True)
class Case:
    """Something wrong, as a user may have it.

    make: puts it at a path without ending; returns the path to read.
    says: what the message has to contain besides the path, parts separated by |.
    has_schema: whether the schema is shown with it.
    """

    format: str
    name: str
    make: Callable[[Path], Path]
    says: str
    has_schema: bool = False

    def __str__(self) -> str:
        return f"{self.format}: {self.name}"


def text(text_format: TextFormat, broken: str | None = None, size: int = NUM_LINES) -> bytes:
    """Good lines, and a broken one in between."""
    lines = [text_format.line(i) for i in range(size)]
    if broken is not None:
        lines.insert(BROKEN_LINE, broken)
    return "\n".join([*text_format.header, *lines, ""]).encode()


def compressed(data: bytes, ending: str) -> bytes:
    if ending == ".gz":
        return gzip.compress(data)
    return bytes(pa.compress(data, "zstd", asbytes=True)) if ending == ".zst" else data


def junk(size: int = 20000) -> bytes:
    return random.Random(5).randbytes(size)


def write(data: bytes, ending: str = "") -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        path = path.with_name(path.name + ending)
        path.write_bytes(data)
        return path

    return make


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def text_cases() -> Iterator[Case]:
    for name, text_format in TEXT.items():
        line = BROKEN_LINE + len(text_format.header) + 1
        for what, (broken, says) in text_format.broken.items():
            for ending in ("", ".gz"):
                data = compressed(text(text_format, broken), ending)
                says_all = f" line {line}: |{says}"
                yield Case(name, what + ending, write(data, ending), says_all, has_schema=True)
        yield Case(name, "missing", lambda path: path, "found nothing at")
        yield Case(name, "a directory", _folder, "expected a file, found the directory")
        yield Case(name, "junk", write(junk()), "expected", has_schema=True)
        for ending in ("", ".gz", ".zst"):
            yield Case(name, "empty" + ending, write(b"", ending), "found the empty file")
        for ending, why in ((".gz", "zlib"), (".zst", "ZSTD")):
            whole = compressed(text(text_format), ending)
            for what, data, says in (
                ("truncated", whole[: len(whole) // 2], "Truncated compressed stream"),
                ("without its last byte", whole[:-1], "Truncated compressed stream"),
                ("junk", junk(), why),
                ("not compressed", text(text_format), why),
                ("nothing compressed", compressed(b"", ending), "expected data, found none in"),
            ):
                yield Case(name, what + ending, write(data, ending), says)
    header = text(TEXT["csv"]).replace(b"d2", b"d3", 1)
    yield Case("csv", "another header", write(header), "missing: d2", has_schema=True)


def _table(**columns: pa.Array) -> pa.Table:
    size = NUM_LINES
    good = {
        "id": pa.array([f"id{i}" for i in range(size)]),
        "label": pa.array([float(i % 2) for i in range(size)]),
        "dense": pa.array([[0.5, float(i)] for i in range(size)]),
        "C1": pa.array([[i, 7] for i in range(size)]),
    }
    return pa.table({name: columns.get(name, values) for name, values in good.items()})


def _but(values: Sequence[object], value: object) -> pa.Array:
    return pa.array([*values[:BROKEN_LINE], value, *values[BROKEN_LINE + 1 :]])


def parquet(table: pa.Table | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(_table() if table is None else table, sink)
    return bytes(sink.getvalue())


def parquet_cases() -> Iterator[Case]:
    whole = parquet()
    row = f" row {BROKEN_LINE + 1}: "
    ones, pairs = [1.0] * NUM_LINES, [[0.5, 0.5]] * NUM_LINES
    yield Case("parquet", "missing", lambda path: path.with_suffix(".parquet"), "found nothing at")
    for name, data, says, has_schema in (
        ("empty", b"", "found the empty file", False),
        ("truncated", whole[: len(whole) // 2], "cannot read", False),
        ("junk", junk(), "cannot read", False),
        ("a column less", parquet(_table().drop_columns(["C1"])), "'C1'|found 0", True),
        ("words", parquet(_table(label=pa.array(["x"] * NUM_LINES))), "'label'|string", True),
        ("a large number", parquet(_table(label=_but(ones, 1e39))), f"{row}|'label'|1e+39", True),
        ("a null", parquet(_table(label=_but(ones, None))), f"{row}|'label'|None", True),
        ("a short list", parquet(_table(dense=_but(pairs, [2.5]))), f"{row}|'dense'|[2.5]", True),
    ):
        yield Case("parquet", name, write(data, ".parquet"), says, has_schema)


CASES = [*text_cases(), *parquet_cases()]
