"""Checking a checkpoint against its manifest, without servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa

from trireme.checkpoint.format.block_files import read_blocks, read_tensors
from trireme.checkpoint.format.manifest import (
    BlockFile,
    CheckpointManifest,
    FileEntry,
    RowFiles,
    read_manifest,
)
from trireme.checkpoint.format.row_columns import RowColumns
from trireme.checkpoint.format.row_reader import read_checked_rows
from trireme.checkpoint.worker_side.server_operations import Watch
from trireme.errors import TriremeError
from trireme.storage.checked_file import FILE_THREADS, check_file
from trireme.storage.location import Storage

Check = Callable[[], object]


def verify_checkpoint(
    storage: Storage, watch: Watch | None = None
) -> tuple[CheckpointManifest | None, list[str]]:
    """Read a whole checkpoint. Returns its manifest, None if that is damaged, and the problems:
    messages that name the files, each damaged file once.

    watch: called with the number of bytes read, and of all bytes.
    """
    try:
        manifest = read_manifest(storage)
        verifier = _Verifier(storage, manifest.num_bytes, watch)
        checks = list(verifier.checks(manifest))
    except TriremeError as error:
        return None, [str(error)]
    with ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="trireme-verify") as threads:
        problems = threads.map(lambda check: verifier.problems(*check), checks)
        return manifest, [problem for of_files in problems for problem in of_files]


class _Verifier:
    """Threads: problems() any."""

    def __init__(self, storage: Storage, num_bytes: int, watch: Watch | None) -> None:
        self._storage = storage
        self._total, self._watch = num_bytes, watch
        self._done = 0
        self._lock = threading.Lock()

    def checks(self, manifest: CheckpointManifest) -> Iterator[tuple[list[FileEntry], Check]]:
        """Files that belong together, and how to check their content if they are undamaged."""
        for table in manifest.tables.values():
            schema = RowColumns.of_schema(table.schema).schema
            for files in table.files:
                yield [files.rows, files.buckets], partial(self._check_rows, files, schema)
        for blocks in manifest.blocks:
            yield [blocks.file], partial(self._check_blocks, blocks)
        if manifest.tensors is not None:
            yield [manifest.tensors], partial(read_tensors, self._storage, manifest.tensors)

    def problems(self, files: list[FileEntry], check: Check) -> list[str]:
        problems = [
            _problem(partial(check_file, self._storage, file.to_json(), self._note))
            for file in files
        ]
        if not any(problems):
            problems.append(_problem(check))
        return [problem for problem in problems if problem is not None]

    def _note(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if self._watch is not None:
                self._watch(self._done, self._total)

    def _check_rows(self, files: RowFiles, schema: pa.Schema) -> None:
        for _ in read_checked_rows(self._storage, files, schema):
            pass

    def _check_blocks(self, blocks: BlockFile) -> None:
        for _ in read_blocks(self._storage, blocks, {block.spec.id for block in blocks.blocks}):
            pass


def _problem(check: Check) -> str | None:
    try:
        check()
    except TriremeError as error:
        return str(error)
    return None
