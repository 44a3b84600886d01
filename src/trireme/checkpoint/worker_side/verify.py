"""Checking a checkpoint against its manifest, without servers."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from trireme.checkpoint.format.block_files import read_blocks, read_tensors
from trireme.checkpoint.format.manifest import CheckpointManifest, FileEntry, read_manifest
from trireme.checkpoint.format.row_files import RowColumns, read_checked_rows
from trireme.checkpoint.worker_side.server_operations import Watch
from trireme.errors import TriremeError
from trireme.storage.checked_file import FILE_THREADS, check_file
from trireme.storage.storage import Storage

Check = Callable[[], object]


def verify_checkpoint(
    storage: Storage, watch: Watch | None = None
) -> tuple[CheckpointManifest | None, list[str]]:
    """Read a whole checkpoint. Returns its manifest, None if that is damaged, and the problems:
    messages that name the files, each damaged file once. `watch` is called with the number of bytes
    read, and of all bytes.
    """
    try:
        manifest = read_manifest(storage)
        checks = list(_checks(storage, manifest))
    except TriremeError as error:
        return None, [str(error)]
    done, lock = 0, threading.Lock()

    def note(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            if watch is not None:
                watch(done, manifest.num_bytes)

    def problems(files: list[FileEntry], check: Check) -> list[str]:
        whole = [_problem(partial(check_file, storage, *file, note)) for file in files]
        return [text for text in (whole if any(whole) else [_problem(check)]) if text is not None]

    with ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="trireme-verify") as threads:
        of_files = threads.map(lambda check: problems(*check), checks)
        return manifest, [problem for problems in of_files for problem in problems]


def _checks(
    storage: Storage, manifest: CheckpointManifest
) -> Iterator[tuple[list[FileEntry], Check]]:
    """Files that belong together, and how to check their content if they are undamaged."""
    for table in manifest.tables.values():
        schema = RowColumns.of_schema(table.schema).schema
        for files in table.files:
            rows = read_checked_rows(storage, files, schema)
            yield [files.rows, files.buckets], partial(deque, rows, 0)
    for file in manifest.blocks:
        ids = {block.spec.id for block in file.blocks}
        yield [file.file], partial(deque, read_blocks(storage, file, ids), 0)
    if manifest.tensors is not None:
        yield [manifest.tensors], partial(read_tensors, storage, manifest.tensors)


def _problem(check: Check) -> str | None:
    try:
        check()
    except TriremeError as error:
        return str(error)
    return None
