"""Headers: given to the parser first wherever a stream begins, and never read as examples."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.criteo_text import examples_of, random_line, read_text
from trireme.data import QueueDataset, Schema, criteo
from trireme.data.criteo import CriteoText
from trireme.errors import DataError

HEADER = b"# columns of\tCriteo\n"


class AfterHeader:
    """Criteo's parser, which is called for lines only after a header was read."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.num_files = 0

    def parse(self, text: Any, limit: int, is_end: bool, pool: Any) -> int:
        assert self.num_files > 0
        return self.inner.parse(text, limit, is_end, pool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True)
class WithHeader(CriteoText):
    """Criteo's text after a first line that must be HEADER."""

    def core_parser(self, schema: Schema, batch_size: int, skip_broken: bool) -> Any:
        return AfterHeader(super().core_parser(schema, batch_size, skip_broken))

    def start_file(self, schema: Schema, core: AfterHeader, head: Any) -> int:
        if not head.tobytes().startswith(HEADER.rstrip()):
            raise DataError(f"expected the header {HEADER!r}, found {head[:10].tobytes()!r}")
        core.num_files += 1
        return min(len(HEADER), len(head))


SCHEMA = Schema(criteo().fields, format=WithHeader())


@pytest.fixture(params=["", ".gz"])
def folder(request, tmp_path: Path) -> Path:
    """Files of unequal sizes, one with its header alone and no newline."""
    random = Random(9)
    for i, num_lines in enumerate([30, 0, 1, 200]):
        text = b"\n".join([HEADER.rstrip(), *(random_line(random) for _ in range(num_lines))])
        (tmp_path / f"part-{i}{request.param}").write_bytes(
            gzip.compress(text) if request.param else text
        )
    return tmp_path


def plain(folder: Path) -> list[Any]:
    texts = [path.read_bytes() for path in sorted(folder.iterdir())]
    texts = [gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text for text in texts]
    return [example for text in texts for example in read_text(text.partition(b"\n")[2])]


def make(folder: Path, **options: Any) -> QueueDataset:
    return QueueDataset(f"{folder}/part-*", schema=SCHEMA, **({"batch_size": 8} | options))


def flat(batches: Any) -> list[Any]:
    return [example for batch in batches for example in examples_of(batch)]


def test_headers_are_no_lines_however_many_streams_there_are(folder):
    compressed = any(folder.glob("*.gz"))
    for num_streams in [1, 2, 3] if compressed else [1, 2, 3, 7, 500]:
        shares = [flat(make(folder).stream(i, num_streams)) for i in range(num_streams)]
        assert [example for share in shares for example in share] == plain(folder)


def test_a_stream_goes_on_from_any_position(folder):
    for num_streams in (1, 3):
        for index in range(num_streams):
            whole = list(make(folder).stream(index, num_streams))
            for k, batch in enumerate(whole):
                rest = make(folder).stream(index, num_streams, start=batch.position)
                assert flat(rest) == flat(whole[k + 1 :])


def test_a_header_that_does_not_fit_is_an_error_with_file_and_schema(folder):
    path = next(folder.glob("part-2*"))
    path.write_bytes(gzip.compress(b"x\ty\n") if path.suffix else b"x\ty\n")
    with pytest.raises(DataError, match=r"part-2.*: expected the header .*found b'x.*\nschema: "):
        list(make(folder))


def test_lines_are_numbered_with_the_header(folder):
    path = next(folder.glob("part-2*"))
    path.write_bytes(gzip.compress(HEADER + b"x\n") if path.suffix else HEADER + b"x\n")
    with pytest.raises(DataError, match=r"part-2.* line 2: expected 40 fields"):
        list(make(folder))
