"""What a log holds besides rows and the content of blocks, and how its records are replayed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from trireme.errors import BadRequest
from trireme.protocol.block_messages import map_from_kept, map_to_kept
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.membership import PassMembers
from trireme.protocol.wire import Array, Push
from trireme.rpc import Request
from trireme.server.attendance import Attendance
from trireme.server.log.segment import Record
from trireme.server.prepared_import import BLOCK, FINISH, PREPARE, PREPARED, ROWS, PreparedImport
from trireme.server.prepared_load import LOAD, LOAD_END, PreparedLoad
from trireme.server.removal import remove
from trireme.server.requests import RequestHandlers
from trireme.server.served_tables import Settled
from trireme.server.state import ServerState
from trireme.table import TableSchema

STATE, STATE_END = "log.state", "log.state_end"


def state_records(server: ServerState, attendance: Attendance) -> Iterator[Record]:
    """The first records of a segment that belongs to a snapshot. Nothing may change meanwhile.

    Without the snapshot they repeat what the segments before have, and a kill may have left a part
    of them, such as some rows of an import that is whole: replay leaves them out, up to the last.
    """
    assignment, tables, streams = server.assignment, server.tables, server.streams
    state = {
        "job": assignment.job,
        "map": map_to_kept(assignment.map()),
        "index": assignment.index,
        "tables": [table.schema.declaration() for table in tables.values()],
        "blocks": server.blocks.declaration(),
        "streams": streams.state(),
        "staging": server.staging.state(),
        "paces": server.pacing.state(),
        "version": tables.version,
        "pushes": streams.num_pushes,
        "pushes_at_load": streams.pushes_at_load,
        "settled": [tables.settled.id, dict(tables.settled.parts), tables.settled.version],
        "lease": server.leases.state(),
        "staleness": list(streams.staleness.items()),
    }
    yield STATE, {"shard": state, "attendance": attendance.gone()}, ()
    for push in server.staging.staged():
        yield "ps.push", *push.to_wire()
    if server.prepared is not None:
        yield from server.prepared.records()
    yield STATE_END, {}, ()


def install_state(server: ServerState, attendance: Attendance, body: Mapping[str, Any]) -> None:
    """Install the first of `state_records` in an empty server. Blocks become zeros."""
    state = body["shard"]
    server.assignment.adopt(state["job"], map_from_kept(state["map"]), state["index"])
    server.raise_version(state["version"])
    for schema in state["tables"]:
        server.create_table(TableSchema.from_wire(schema))
    if state["blocks"] is not None:
        optimizer, groups, specs = state["blocks"]
        blocks = [BlockSpec.from_wire(spec) for spec in specs]
        zeros = np.zeros(sum(spec.size for spec in blocks), np.float32)
        server.blocks.create(optimizer, groups, blocks, zeros, {})
    server.streams.install(state)
    server.staging.install(state["staging"])
    server.pacing.install(state["paces"])
    id, parts, *version = state["settled"]  # older files have none
    server.tables.settled = Settled(id, dict(parts), *version)
    server.leases.install(state["lease"])
    attendance.install(body["attendance"])


def replay(server: ServerState, attendance: Attendance, record: Record) -> None:
    """Execute a recorded request again. What it did before the snapshot stays as it is. Raises
    BadRequest: a method that changes nothing.
    """
    method, body, arrays = record
    if method == "ps.push":
        push = Push.from_wire(body, arrays)
        stream = server.streams[push.stream]
        stream.incarnation = max(stream.incarnation, push.incarnation)
        server.row_claims.fetch(push)
        server.stage_or_apply(push)
    elif method == "log.step":
        if body["step"] > server.staging.applied:
            server.staging.apply_step(body["step"], body.get("norm"))
    elif method == "ps.group":
        members = PassMembers.from_wire(body)
        if server.pacing.is_newer(members.version):
            server.set_members(members)  # steps have records of their own
    elif method == "server.goodbye":
        worker, num_workers = body["worker"], body["num_workers"]
        attendance.install([(worker, num_workers, body["incarnation"], body.get("members"))])
    elif method == "server.alive":
        attendance.take_back(body["worker"])
    elif method == "policy.shrink":
        server.shrink(body)
    elif method == "ps.remove":
        remove(server, body, arrays)
    elif method == "ps.begin_anew":
        server.begin_anew(body)
    elif method in (FINISH, LOAD_END):
        server.finish(body["id"], commit=body["commit"])
    elif method == LOAD:
        server.prepared = PreparedLoad(body["id"], body["checkpoint"])
    elif method in (PREPARE, ROWS, BLOCK, PREPARED):
        _replay_import(server, method, body, arrays)
    elif method != STATE_END:
        _replay_control(server, method, body, arrays)


def leave_out(server: ServerState, record: Record) -> None:
    """Note that a push or step which cannot be replayed is over: some tables may have it, and its
    numbers are not used again.
    """
    method, body, arrays = record
    if method == "log.step":
        server.pass_over(server.staging.pushes_of(body["step"]))
        server.staging.finish_step(body["step"], body.get("norm"))
    elif method == "ps.push":
        try:
            push = Push.from_wire(body, arrays)
        except BadRequest:  # then nothing has it
            return
        if not push.staged:
            server.pass_over([push])


def _replay_import(
    server: ServerState, method: str, body: dict[str, Any], arrays: Sequence[Array]
) -> None:
    prepared = server.prepared
    if method == PREPARE:
        rows = {name: server.make_rows(server.table(name).schema) for name in body["tables"]}
        server.prepared = PreparedImport(body["id"], body["replace"], rows, is_whole=False)
    elif not isinstance(prepared, PreparedImport) or prepared.id != body["id"]:
        raise BadRequest(f"expected {PREPARE} of import {body['id']} before its {method}")
    elif method == ROWS:
        server.with_room(partial(prepared.add, body, arrays, server.pool))
    elif method == BLOCK:
        prepared.add_block(body, arrays)
    else:
        prepared.is_whole = True


def _replay_control(
    server: ServerState, method: str, body: dict[str, Any], arrays: Sequence[Array]
) -> None:
    if method == "log.version":
        server.raise_version(body["version"])
    elif method == "log.forget":
        server.forget_removed(body["version"])
    elif method == "log.settle":
        keys, gained = arrays
        table = server.table(body["table"])
        saved = body["id"], server.tables.version  # it was allowed
        server.settle_some(table, saved, body["part"], body["first"], keys, gained)
    elif method == "ps.create_table":
        server.create_table(TableSchema.from_wire(body["schema"]))
    elif method in ("ps.map", "ps.create_blocks", "ps.lease", "ps.release"):
        request = Request(0, method, body, list(arrays), "log", "log", "", math.inf)
        RequestHandlers(server).handlers()[method](request)
    else:
        raise BadRequest(f"expected a method that changes something, found {method!r}")
