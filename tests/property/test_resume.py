"""Stop after any batch and resume from its position: the same batches, for every kind of file, one
and three streams, and another number of threads.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from torch import Tensor

from tests.criteo_text import random_line
from tests.long import sampled
from tests.property.test_text_formats import FORMATS
from tests.seeds import SEED, named_in_failure
from trireme.data import Batch, Dense, InsId, Label, QueueDataset, Schema, Sparse, arrow, criteo

MakeLine = Callable[[], bytes]


def criteo_lines(random: Random) -> tuple[Schema, MakeLine]:
    return criteo(), lambda: random_line(random)


def lines_of(plain: Any) -> Callable[[Random], tuple[Schema, MakeLine]]:
    def make(random: Random) -> tuple[Schema, MakeLine]:
        schema = plain.random_schema(random)
        return schema, lambda: plain.random_line(schema, random)[0]

    return make


TEXTS = {"criteo": criteo_lines} | {
    plain.__name__.removeprefix("tests.plain_"): lines_of(plain) for plain in FORMATS
}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda text: text,
    ".gz": lambda text: gzip.compress(text, 1),
    ".zst": lambda text: pa.compress(text, "zstd", asbytes=True),
}
WRITE_TABLE: dict[str, Callable[[pa.Table, Path], None]] = {
    "parquet": lambda table, path: pa.parquet.write_table(table, path, row_group_size=37),
    "feather": lambda table, path: pa.feather.write_feather(table, path, chunksize=29),
}


def contents(batch: Batch) -> tuple[Any, ...]:
    """Everything in a batch, to compare."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, tuple(value.shape), value.numpy().tobytes()
        return tuple(map(plain, value)) if isinstance(value, tuple) else value

    columns = {name: plain(column) for name, column in batch.columns.items()}
    bags = batch.bags and tuple(map(plain, vars(batch.bags).values()))
    return columns, bags, batch.stream, batch.position


def check(dataset: Callable[..., QueueDataset], random: Random, *, num_stops: int = 10**9) -> None:
    batch_size = random.choice([1, 7, 30, 1000])
    options = {"batch_size": batch_size, "drop_last": random.random() < 0.3}
    for num_streams in (1, 3):
        for index in range(num_streams):
            whole = [contents(batch) for batch in dataset(**options).stream(index, num_streams)]
            stops = range(len(whole))
            for stop in random.sample(stops, min(len(stops), num_stops, 20)):
                other = dataset(**options, threads=random.randint(1, 4))
                rest = other.stream(index, num_streams, start=whole[stop][-1])
                assert [contents(batch) for batch in rest] == whole[stop + 1 :], (
                    f"{other.schema!r}, {options}, stream {index} of {num_streams}, batch {stop}"
                )


def sizes(random: Random) -> list[int]:
    return [random.choice([1, 3, 40, 150]) for _ in range(5)]


@sampled(keep=5)
@pytest.mark.parametrize("suffixes", [[""], [".gz"], [".zst"], ["", ".gz", ".zst"]], ids=str)
@pytest.mark.parametrize("kind", TEXTS)
def test_text_goes_on_from_any_position(kind, suffixes, tmp_path):
    random = Random(f"{SEED} {kind} {suffixes}")
    with named_in_failure():
        schema, make_line = TEXTS[kind](random)
        for i, size in enumerate(sizes(random)):
            suffix = suffixes[i % len(suffixes)]
            ending = random.choice([b"\n", b"\r\n"])
            text = ending.join(make_line() for _ in range(size)) + random.choice([b"", ending])
            (tmp_path / f"part-{i}{suffix}").write_bytes(COMPRESS[suffix](text or b"\n"))
        check(lambda **o: QueueDataset(f"{tmp_path}/part-*", schema=schema, **o), random)


@pytest.mark.parametrize("kind", TEXTS)
def test_text_through_a_command_goes_on_from_any_position(kind, tmp_path):
    random = Random(f"{SEED} {kind} command")
    with named_in_failure():
        schema, make_line = TEXTS[kind](random)
        for i, size in enumerate(sizes(random)):
            text = b"".join(make_line() + b"\n" for _ in range(size))
            (tmp_path / f"part-{i}").write_bytes(text)
        check(
            lambda **o: QueueDataset(
                f"{tmp_path}/part-*", schema=schema, pipe_command="tail -n +2; echo >&2", **o
            ),
            random,
            num_stops=2,
        )


@pytest.mark.parametrize("suffix", WRITE_TABLE)
def test_tables_go_on_from_any_position(suffix, tmp_path):
    random = Random(f"{SEED} {suffix}")
    fields = [InsId("id"), Label("y"), Dense("x", 2), Sparse("a"), Sparse("b")]

    def row(number: int) -> dict[str, Any]:
        bag = [random.randrange(100) for _ in range(random.randrange(4))]
        word = random.choice([None, "", "u", "v"])
        return {"id": number, "y": number % 2, "x": [random.random(), 1.0], "a": bag, "b": word}

    with named_in_failure():
        for i, size in enumerate(sizes(random)):
            table = pa.Table.from_pylist([row(number) for number in range(size)])
            WRITE_TABLE[suffix](table, tmp_path / f"part-{i}.{suffix}")
        check(lambda **o: QueueDataset(f"{tmp_path}/*", schema=arrow(fields), **o), random)
