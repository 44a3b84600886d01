"""The rows on SSD that a snapshot needs: further names of the segments that they lie in.

A page never changes once it is written: what comes later lies behind those that a snapshot counts,
in the same file or another. A file with two names outlives either. They lie in the folders of
--ssd_dir, in trireme-kept-STATE/SNAPSHOT/TABLE/.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from trireme import _core
from trireme.checkpoint.format.json_object import JsonObject
from trireme.errors import BadRequest, Corruption, writing
from trireme.server.row_tier import RowTier
from trireme.storage.local import sync_folder

_PREFIX = "trireme-kept-"
_NUMBER_MAX = (1 << 32) - 1


def keep_segments(
    tier: RowTier, state_id: str, snapshot: str, tables: Mapping[str, _core.Table]
) -> dict[str, Any]:
    """Give the segments of these tables, which hold them, further names. Returns for each table
    what `adopt_segments` needs, in JSON. Raises ResourceExhausted, BadRequest, Unavailable: a disk.
    """
    kept = {}
    with writing(f"log: cannot keep the segments of {snapshot}"):
        for number, (name, rows) in enumerate(sorted(tables.items())):
            targets = [root / (_PREFIX + state_id) / snapshot / str(number) for root in tier.roots]
            for target in targets:
                target.mkdir(parents=True)
            segments = rows.segments()
            for _, device, file, *_ in segments:
                os.link(tier.folders_of(rows)[device] / file, targets[device] / file)
            for target in targets:
                for folder in (target, *target.parents[:3]):
                    sync_folder(folder)
            kept[name] = {
                "folders": [str(target) for target in targets],
                "files": [list(segment) for segment in segments],
            }
    return kept


def adopt_segments(tier: RowTier | None, rows: _core.Table, kept: JsonObject) -> None:
    """Go on with kept segments in an empty table. Raises Corruption: one is missing or too small.
    BadRequest: the server does not use the folders that they lie in.
    """
    where = [Path(str(folder)) for folder in kept.list("folders")]
    if any(len(folder.parents) < 4 for folder in where):
        raise kept.wrong("paths of folders", where, "folders")
    roots = [folder.parents[2] for folder in where]
    missing = [root for root in roots if tier is None or root not in tier.roots]
    if tier is None or missing:
        used = "none" if tier is None else ", ".join(map(str, tier.roots))
        raise BadRequest(
            f"log: the rows of this state lie on SSD: expected --memory and --ssd_dir with"
            f" {', '.join(map(str, missing))}, found {used}"
        )
    devices = [tier.roots.index(root) for root in roots]
    targets = tier.folders_of(rows)
    for number, device, file, num_pages, num_rows in _files(kept, len(devices)):
        source = where[device] / file
        try:
            with writing(f"log: cannot use {source}"):
                os.link(source, targets[devices[device]] / file)
        except BadRequest as error:
            if source.exists():
                raise
            raise Corruption(f"log: expected rows in {source}, found no such file") from error
        rows.adopt_segment(number, devices[device], file, num_pages, num_rows)


def _files(kept: JsonObject, num_devices: int) -> Iterator[tuple[int, int, str, int, int]]:
    for entry in kept.list("files"):
        match entry:
            case [int(number), int(device), str(file), int(num_pages), int(num_rows)] if (
                0 <= device < num_devices
                and "/" not in file
                and all(0 <= n <= _NUMBER_MAX for n in (number, num_pages, num_rows))
            ):
                yield number, device, file, num_pages, num_rows
            case _:
                raise kept.wrong("the fields of a segment", entry, "files")


def sweep_segments(tier: RowTier | None, state_id: str, snapshots: Container[str]) -> None:
    """Remove what a state's snapshots have kept, but for these."""
    for root in tier.roots if tier is not None else []:
        folder = root / (_PREFIX + state_id)
        if not folder.is_dir():
            continue
        with writing(f"log: cannot remove old files in {folder}"):
            for old in folder.iterdir():
                if old.name not in snapshots:
                    shutil.rmtree(old)
            if not any(folder.iterdir()):
                folder.rmdir()
