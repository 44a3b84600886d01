"""The methods that a server answers, by their names on the wire."""

from collections.abc import Mapping
from pathlib import Path

from trireme.checkpoint.server_side.handlers import CheckpointHandlers
from trireme.coordinator.coordinator import Coordinator
from trireme.interchange.server_side.dense_blocks import block_handlers
from trireme.interchange.server_side.exporting import ExportHandlers
from trireme.interchange.server_side.importing import ImportHandlers
from trireme.protocol.wire import need
from trireme.rpc import Deferred, Handler, Reply, Request
from trireme.server.frozen_export import frozen_export_handlers
from trireme.server.looking import Looking
from trireme.server.requests import RequestHandlers
from trireme.server.state import ServerState


def handlers_of(
    server: ServerState, coordinator: Coordinator, attendance: Mapping[str, Handler], root: Path
) -> dict[str, Handler]:
    """The methods of all parts of a server. attendance: those for heartbeats and goodbyes of
    workers. root: folder below which files are written and read.
    """
    join = coordinator.handlers()["coord.join"]
    goodbye, alive = attendance["server.goodbye"], attendance["server.alive"]

    def on_join(request: Request) -> Reply | Deferred | None:
        server.assignment.check_is_first(server.journal.where)
        return join(request)

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
        **RequestHandlers(server).handlers(),
        **Looking(server).handlers(),
        **coordinator.handlers(),
        "coord.join": on_join,
        **attendance,
        "server.alive": on_alive,
        "server.attendance": on_attendance,
        "server.goodbye": on_goodbye,
        **CheckpointHandlers(server, root).handlers(),
        **frozen_export_handlers(server, root),
        **ImportHandlers(server, root).handlers(),
        **ExportHandlers(server, root).handlers(),
        **block_handlers(server),
    }
