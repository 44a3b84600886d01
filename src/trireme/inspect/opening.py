"""What a path holds: a checkpoint or an export."""

from __future__ import annotations

from pathlib import Path

from trireme.inference.manifest import is_export
from trireme.inspect.checkpoint_source import CheckpointSource
from trireme.inspect.export_source import ExportSource
from trireme.inspect.source import Source
from trireme.ps.checkpoint import open_storage


def open_source(path: str) -> Source:
    """Raises BadRequest if neither is there, Corruption if its manifest is damaged."""
    if "://" not in path and is_export(Path(path)):
        return ExportSource(Path(path).absolute())
    return CheckpointSource(open_storage(path, None))
