"""`trireme verify`: checks checkpoints and exports one after the other, with progress."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.checkpoint.format.manifest import MANIFEST
from trireme.checkpoint.worker_side.verify import verify_checkpoint
from trireme.errors import BadRequest, TriremeError
from trireme.inference.export_manifest import is_export, located
from trireme.inference.export_manifest import read_manifest as read_export
from trireme.progress import Display, display
from trireme.storage.storage import Storage, open_storage

DEPTH = 2
"""Depth of the search: folders of days contain folders of passes."""


@dataclass(frozen=True)
class Verdict:
    """The result for one checkpoint or export.

    problems: a line for each difference. summary: of one without problems.
    """

    name: str
    problems: tuple[str, ...]
    summary: str


def verify_all(paths: Sequence[str], *, shows: bool) -> Iterator[Verdict]:
    """The verdict on each checkpoint and export at these paths or in these folders.

    shows: whether to print progress on stdout.

    Raises BadRequest: a path has none.
    """
    for path in paths:
        folders = list(_saved_folders(open_storage(path, None), DEPTH))
        if not folders:
            raise BadRequest(
                f"verify: expected a checkpoint or an export, or a folder of them, found no"
                f" {MANIFEST} in {path} or {DEPTH} levels below it"
            )
        for folder in folders:
            with display(f"verify {folder.name}", is_quiet=not shows) as shown:
                verdict = _verify(folder, shown)
            yield verdict


def _saved_folders(folder: Storage, depth: int) -> Iterator[Storage]:
    if folder.size(MANIFEST) is not None:
        yield folder
    elif depth > 0:
        for name in folder.folders():
            if not name.startswith("."):
                yield from _saved_folders(folder.below(name), depth - 1)


def _verify(folder: Storage, shown: Display) -> Verdict:
    def watch(done: int, total: int) -> None:
        if shown.is_due():
            shown.show_fraction(done / max(total, 1))

    try:
        if "://" not in folder.name and is_export(Path(folder.name)):
            return _verify_export(Path(folder.name), shown)
    except TriremeError as error:  # nobody can tell which it is
        return Verdict(folder.name, (str(error),), "")
    manifest, problems = verify_checkpoint(folder, watch)
    summary = ""
    if manifest is not None:
        rows = [table.num_rows for table in manifest.tables.values()]
        sizes = [file.num_bytes for file in manifest.files()]
        summary = _summary(manifest.mode, manifest.version, rows, sizes)
    return Verdict(folder.name, tuple(problems), summary)


def _verify_export(folder: Path, shown: Display) -> Verdict:
    manifest = read_export(folder)
    files = [manifest.dense, *(file for table in manifest.tables for file in table.files)]
    problems = []
    for number, file in enumerate(files):
        if shown.is_due():
            shown.show_fraction(number / len(files))
        try:
            located(folder, file, verify=True)
        except TriremeError as error:
            problems.append(str(error))
    kind = "delta export" if manifest.is_delta else "export"
    rows = [table.rows for table in manifest.tables]
    summary = _summary(kind, manifest.version, rows, [file.bytes for file in files])
    return Verdict(str(folder), tuple(problems), summary)


def _summary(kind: str, version: int, rows: Sequence[int], sizes: Sequence[int]) -> str:
    """rows: of each table. sizes: bytes of each file."""
    return (
        f"complete: {kind}, version {version}, {sum(rows):,} rows of {len(rows)} tables,"
        f" {sum(sizes):,} bytes in {len(sizes)} files"
    )
