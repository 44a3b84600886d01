"""What a path holds: a checkpoint or an export."""

from __future__ import annotations

from pathlib import Path

from trireme.checkpoint.format.manifest import MANIFEST
from trireme.errors import BadRequest
from trireme.inference.export_manifest import is_export
from trireme.inspect.checkpoint_source import CheckpointSource
from trireme.inspect.export_source import ExportSource
from trireme.inspect.source import Source
from trireme.storage.location import open_storage

SHOWN_MAX = 8


def open_source(path: str) -> Source:
    """Raises BadRequest if neither is there, Corruption if its manifest is damaged."""
    if "://" not in path and is_export(Path(path)):
        return ExportSource(Path(path).absolute())
    storage = open_storage(path, None)
    if storage.size(MANIFEST) is None:
        there = [name for name in storage.folders() if not name.startswith(".")]
        inside = f"; folders there: {', '.join(sorted(there)[:SHOWN_MAX])}" if there else ""
        raise BadRequest(f"inspect: expected {storage.name}/{MANIFEST}, found none{inside}")
    return CheckpointSource(storage)
