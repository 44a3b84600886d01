"""All methods of interchange by their names on the wire."""

from __future__ import annotations

from pathlib import Path

from trireme.interchange.server_side.exporting import ExportHandlers
from trireme.interchange.server_side.importing import ImportHandlers
from trireme.interchange.worker_side.dense_blocks import BlockHandlers
from trireme.server.shard import Handler, Shard


def interchange_handlers(shard: Shard, root: Path) -> dict[str, Handler]:
    """root: folder below which local files are read and written."""
    return {
        **ImportHandlers(shard, root).handlers(),
        **ExportHandlers(shard, root).handlers(),
        **BlockHandlers(shard).handlers(),
    }
