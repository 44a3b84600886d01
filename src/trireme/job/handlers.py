"""What a server answers to: the methods of all its parts by their names on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trireme.checkpoint.server_side.handlers import CheckpointHandlers
from trireme.coordinator.coordinator import Coordinator
from trireme.interchange.server_side.handlers import interchange_handlers
from trireme.protocol.wire import need
from trireme.rpc import Deferred, Reply, Request
from trireme.server.expiry import PolicyHandlers
from trireme.server.frozen_export import ExportHandlers
from trireme.server.shard import Handler, Shard


def handlers_of(
    shard: Shard, coordinator: Coordinator, attendance: Mapping[str, Handler], root: Path
) -> dict[str, Handler]:
    """All methods.

    Args:
        attendance: the methods by which workers come and go.
        root: folder below which files are written and read.
    """
    goodbye, alive = attendance["server.goodbye"], attendance["server.alive"]

    def on_alive(request: Request) -> Reply | Deferred | None:
        reply = alive(request)
        worker = need(request.body, "worker", int)
        coordinator.note_heartbeat(worker, need(request.body, "incarnation", int))
        return reply

    def on_attendance(request: Request) -> Reply | Deferred | None:
        reply = attendance["server.attendance"](request)
        assert isinstance(reply, Reply)
        silent = coordinator.participants_among(reply.body["silent"])
        return Reply({**reply.body, "silent": silent})

    def on_goodbye(request: Request) -> Reply | Deferred | None:
        reply = goodbye(request)
        coordinator.note_goodbye(need(request.body, "worker", int))
        return reply

    return {
        **shard.handlers(),
        **coordinator.handlers(),
        **attendance,
        "server.alive": on_alive,
        "server.attendance": on_attendance,
        "server.goodbye": on_goodbye,
        **CheckpointHandlers(shard, root).handlers(),
        **ExportHandlers(shard, root).handlers(),
        **interchange_handlers(shard, root),
        **PolicyHandlers(shard).handlers(),
    }
