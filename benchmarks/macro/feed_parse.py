"""Parsing: bytes of text per second of CPU time, from memory into batches of 4096 examples.

`parse_tsv`: Criteo's TSV. `parse_multislot`: the same examples as MultiSlot text. `pyarrow_csv`:
the TSV into columns of integers and strings with given types, so that none are inferred. It neither
makes keys of the categories nor batches of equal size.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

import trireme as tr
from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings
from trireme.data import Batch, Dense, Label, Schema, Sparse
from trireme.data.text_parser import TextFormat, TextParser

_BATCH = 4096
_NUM_FILES = 2
_PIECE_BYTES = 1 << 20  # as much as a reader holds at a time


def contest(settings: Settings) -> Contest:
    texts = _Texts(settings)
    seconds = settings.pick(smoke=0.0, real=1.0)
    criteo, multislot = tr.data.criteo(), texts.multislot_schema
    return Contest(
        {
            "parse_tsv": lambda _: _measured(lambda: _parse(criteo, texts.tsv), texts.tsv, seconds),
            "parse_multislot": lambda _: _measured(
                lambda: _parse(multislot, texts.multislot), texts.multislot, seconds
            ),
            "pyarrow_csv": lambda _: _measured(lambda: _read_csv(texts.tsv), texts.tsv, seconds),
        },
        [
            Claim("parse_tsv", "parse_tsv", ("pyarrow_csv",), "MB/s per core"),
            Claim("parse_multislot", "parse_multislot", ("pyarrow_csv",), "MB/s per core"),
        ],
        settings.rounds,
    )


class _Texts:
    """The same examples as TSV and as MultiSlot text; made when first needed."""

    multislot_schema = tr.data.multislot(
        [Label("label"), *(Sparse(f"C{i}") for i in range(1, 27)), Dense("dense", 13)]
    )

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @cached_property
    def tsv(self) -> NDArray[np.uint8]:
        files = tsv_files(self._settings).train[:_NUM_FILES]
        return np.concatenate([np.frombuffer(Path(file).read_bytes(), np.uint8) for file in files])

    @cached_property
    def multislot(self) -> NDArray[np.uint8]:
        lines = (line for batch in _parse(tr.data.criteo(), self.tsv) for line in _lines(batch))
        return np.frombuffer("".join(lines).encode(), np.uint8)


def _lines(batch: Batch) -> list[str]:
    """MultiSlot text; a missing category becomes an empty bag."""
    assert batch.bags is not None
    B = batch.num_examples
    keys, ends = batch.bags.values.tolist(), batch.bags.offsets.tolist()
    slots = [
        f"{end - begin}{''.join(f' {key}' for key in keys[begin:end])}"
        for begin, end in itertools.pairwise(ends)
    ]
    dense = np.asarray(batch["dense"]).tolist()
    return [
        f"1 {label:.0f} {' '.join(slots[b::B])} 13 {' '.join(f'{x:.6g}' for x in dense[b])}\n"
        for b, label in enumerate(np.asarray(batch["label"]).tolist())
    ]


def _parse(schema: Schema, text: NDArray[np.uint8]) -> Iterator[Batch]:
    assert isinstance(schema.format, TextFormat)
    parser = TextParser(schema, schema.format, batch_size=_BATCH, threads=1, skip_broken=False)
    piece_bytes = max(_PIECE_BYTES, parser.core.max_line_bytes + 1)
    begin = 0
    while begin < len(text):
        piece = text[begin : begin + piece_bytes]
        begin += parser.parse(piece, len(piece), begin + len(piece) == len(text))
        assert parser.broken_line is None, parser.broken_line
        if parser.core.is_full:
            yield parser.take()
    yield parser.take()


def _read_csv(text: NDArray[np.uint8]) -> Iterator[pa.RecordBatch]:
    types = {f"f{i}": pa.int64() if i < 14 else pa.string() for i in range(40)}
    yield from pa_csv.open_csv(
        pa.py_buffer(text),
        read_options=pa_csv.ReadOptions(
            use_threads=False, block_size=_PIECE_BYTES, autogenerate_column_names=True
        ),
        parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=pa_csv.ConvertOptions(column_types=types),
    )


def _measured(call: Callable[[], Iterable[object]], text: NDArray[np.uint8], seconds: float) -> Run:
    hash = _hash(call())  # and warm up
    num_calls, start = 0, time.process_time()
    while num_calls == 0 or time.process_time() - start < seconds:
        for _ in call():
            pass
        num_calls += 1
    elapsed_s = max(time.process_time() - start, 1e-9)
    return Run(num_calls * len(text) / 1e6 / elapsed_s, hash=hash)


def _hash(batches: Iterable[object]) -> str:
    """A hash of the numbers of examples, and of the values of our batches."""
    digest = hashlib.sha256()
    for batch in batches:
        if isinstance(batch, Batch) and batch.bags is not None:
            digest.update(batch.bags.values.numpy())
            digest.update(np.asarray(batch["dense"]))
        else:
            digest.update(b"%d" % len(batch))
    return digest.hexdigest()[:16]
