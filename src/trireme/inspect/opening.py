"""What a path holds: a checkpoint or an export."""

from __future__ import annotations

from pathlib import Path

from trireme.inference.manifest import KIND, MANIFEST
from trireme.inspect.checkpoint_source import CheckpointSource
from trireme.inspect.export_source import ExportSource
from trireme.inspect.source import Source
from trireme.ps.checkpoint import open_storage

HEAD_BYTES = 1 << 20


def open_source(path: str) -> Source:
    """Raises BadRequest if neither is there, Corruption if its manifest is damaged."""
    if "://" not in path and _is_export(Path(path)):
        return ExportSource(Path(path).absolute())
    return CheckpointSource(open_storage(path, None))


def _is_export(folder: Path) -> bool:
    """Whether the manifest says so. What cannot be read is left to the checkpoint's reader, who
    says what is wrong.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    with manifest.open("rb") as file:
        return b'"kind": "' + KIND.encode() + b'"' in file.read(HEAD_BYTES)
