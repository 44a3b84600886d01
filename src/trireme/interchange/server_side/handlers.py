"""All methods of interchange by their names on the wire."""

from __future__ import annotations

from pathlib import Path

from trireme.interchange.server_side.dense_blocks import BlockHandlers
from trireme.interchange.server_side.exporting import ExportHandlers
from trireme.interchange.server_side.importing import ImportHandlers
from trireme.rpc import Handler
from trireme.server.state import ServerState


def interchange_handlers(server: ServerState, root: Path) -> dict[str, Handler]:
    """root: local files are read and written below this folder."""
    return {
        **ImportHandlers(server, root).handlers(),
        **ExportHandlers(server, root).handlers(),
        **BlockHandlers(server).handlers(),
    }
