"""Whether a checkpoint is what its manifest says, without servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa

from trireme.checkpoint.format.block_files import read_blocks, tensors_of
from trireme.checkpoint.format.manifest import BlocksFile, FileEntry, Manifest, Piece, read_manifest
from trireme.checkpoint.server_side.jobs import THREADS
from trireme.checkpoint.server_side.load import checked_rows, columns_of
from trireme.checkpoint.worker_side.calls import Watch
from trireme.errors import TriremeError
from trireme.storage.storage import Storage, read_chunks

Check = Callable[[], None]


def verify_checkpoint(
    place: Storage, watch: Watch | None = None
) -> tuple[Manifest | None, list[str]]:
    """Read all of it. Returns its manifest, if that says what the files are, and what differs:
    messages that name the files, each damaged file once.

    watch: told how many bytes have been read, of how many.
    """
    try:
        manifest = read_manifest(place)
        verifier = _Verifier(place, manifest.num_bytes, watch)
        parts = list(verifier.parts(manifest))
    except TriremeError as error:
        return None, [str(error)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="trireme-verify") as threads:
        found = threads.map(lambda part: verifier.problems(*part), parts)
        return manifest, [problem for problems in found for problem in problems]


class _Verifier:
    """Threads: problems() any."""

    def __init__(self, place: Storage, num_bytes: int, watch: Watch | None) -> None:
        self._place = place
        self._total, self._watch = num_bytes, watch
        self._done = 0
        self._lock = threading.Lock()

    def parts(self, manifest: Manifest) -> Iterator[tuple[list[FileEntry], Check]]:
        """Files that belong together, and what to check of them where they are undamaged."""
        for table in manifest.tables.values():
            schema = columns_of(table.schema).schema
            for piece in table.pieces:
                yield [piece.rows, piece.buckets], partial(self._check_piece, piece, schema)
        for part in manifest.blocks:
            yield [part.file], partial(self._check_blocks, part)
        if manifest.tensors is not None:
            yield [manifest.tensors], partial(self._check_tensors, manifest.tensors)

    def problems(self, files: list[FileEntry], check: Check) -> list[str]:
        found = [_problem(partial(self._read, file)) for file in files]
        if not any(found):
            found.append(_problem(check))
        return [problem for problem in found if problem is not None]

    def _read(self, file: FileEntry) -> None:
        """All of it, to compare its length and checksum."""
        for num_bytes in read_chunks(self._place, file.to_json()):
            with self._lock:
                self._done += num_bytes
                if self._watch is not None:
                    self._watch(self._done, self._total)

    def _check_piece(self, piece: Piece, schema: pa.Schema) -> None:
        for _ in checked_rows(self._place, piece, schema):
            pass

    def _check_blocks(self, part: BlocksFile) -> None:
        for _ in read_blocks(self._place, part, {block.spec.id for block in part.blocks}):
            pass

    def _check_tensors(self, file: FileEntry) -> None:
        tensors_of(self._place, file)


def _problem(check: Check) -> str | None:
    try:
        check()
    except TriremeError as error:
        return str(error)
    return None
