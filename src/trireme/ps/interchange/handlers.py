"""All methods of interchange by their names on the wire."""

from __future__ import annotations

from pathlib import Path

from trireme.ps.interchange.dense_blocks import BlockHandlers
from trireme.ps.interchange.exporting import ExportHandlers
from trireme.ps.interchange.importing import ImportHandlers
from trireme.ps.shard import Handler, Shard


def interchange_handlers(shard: Shard, root: Path) -> dict[str, Handler]:
    """root: folder below which local files are read and written."""
    return {
        **ImportHandlers(shard, root).handlers(),
        **ExportHandlers(shard, root).handlers(),
        **BlockHandlers(shard).handlers(),
    }
