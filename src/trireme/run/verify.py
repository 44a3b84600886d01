"""`trireme verify`: checkpoints and exports, one after the other, with progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.checkpoint.format.manifest import MANIFEST, CheckpointManifest
from trireme.checkpoint.worker_side.verify import verify_checkpoint
from trireme.errors import BadRequest, TriremeError
from trireme.inference.export_manifest import is_export, located
from trireme.inference.export_manifest import read_manifest as read_export
from trireme.progress import Display, display
from trireme.storage.location import Storage, open_storage

DEPTH = 2
"""Folders of days hold folders of passes."""


@dataclass(frozen=True)
class Verdict:
    """name: of the checkpoint or export. problems: what differs, a line each. summary: of one
    without any.
    """

    name: str
    problems: tuple[str, ...]
    summary: str


def verify_all(paths: Sequence[str], *, shows: bool) -> Iterator[Verdict]:
    """The verdict on each checkpoint and export that these paths are, or that is in these folders.

    shows: progress on stdout.

    Raises:
        BadRequest: a path has neither.
    """
    for path in paths:
        found = list(_places(open_storage(path, None), DEPTH))
        if not found:
            raise BadRequest(
                f"verify: expected a checkpoint or an export, or a folder of them, found no"
                f" {MANIFEST} at {path} and {DEPTH} folders down"
            )
        for place in found:
            with display(f"verify {place.name}", is_quiet=not shows) as shown:
                verdict = _verify(place, shown)
            yield verdict


def _places(place: Storage, depth: int) -> Iterator[Storage]:
    if place.size(MANIFEST) is not None:
        yield place
    elif depth > 0:
        for name in place.folders():
            if not name.startswith("."):
                yield from _places(place.below(name), depth - 1)


def _verify(place: Storage, shown: Display) -> Verdict:
    def watch(done: int, total: int) -> None:
        if shown.is_due():
            shown.show_fraction(done / max(total, 1))

    if "://" not in place.name and is_export(Path(place.name)):
        return _verify_export(Path(place.name), shown)
    manifest, problems = verify_checkpoint(place, watch)
    summary = "" if manifest is None else _summary(manifest)
    return Verdict(place.name, tuple(problems), summary)


def _verify_export(folder: Path, shown: Display) -> Verdict:
    try:
        manifest = read_export(folder)
    except TriremeError as error:
        return Verdict(str(folder), (str(error),), "")
    files = [manifest.dense, *(file for table in manifest.tables for file in table.files)]
    problems = []
    for number, file in enumerate(files):
        if shown.is_due():
            shown.show_fraction(number / len(files))
        try:
            located(folder, file, verify=True)
        except TriremeError as error:
            problems.append(str(error))
    rows = sum(table.rows for table in manifest.tables)
    num_bytes = sum(file.bytes for file in files)
    kind = "delta export" if manifest.is_delta else "export"
    return Verdict(
        str(folder),
        tuple(problems),
        f"complete: {kind}, version {manifest.version}, {rows:,} rows of"
        f" {len(manifest.tables)} tables, {num_bytes:,} bytes in {len(files)} files",
    )


def _summary(manifest: CheckpointManifest) -> str:
    rows = sum(table.num_rows for table in manifest.tables.values())
    num_files = sum(1 for _ in manifest.files())
    return (
        f"complete: {manifest.mode}, version {manifest.version}, {rows:,} rows of"
        f" {len(manifest.tables)} tables, {manifest.num_bytes:,} bytes in {num_files} files"
    )
