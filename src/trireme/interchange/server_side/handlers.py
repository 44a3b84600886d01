"""All methods of interchange by their names on the wire."""

from __future__ import annotations

from pathlib import Path

from trireme.interchange.server_side.exporting import ExportHandlers
from trireme.interchange.server_side.importing import ImportHandlers
from trireme.interchange.worker_side.dense_blocks import BlockHandlers
from trireme.rpc import Handler
from trireme.server.state import ServerState


def interchange_handlers(server: ServerState, root: Path) -> dict[str, Handler]:
    """root: folder below which local files are read and written."""
    return {
        **ImportHandlers(server, root).handlers(),
        **ExportHandlers(server, root).handlers(),
        **BlockHandlers(server).handlers(),
    }
