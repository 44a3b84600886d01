"""What a server knows beside rows and the content of blocks, and how a recorded request is obeyed
once more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trireme.errors import BadRequest
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.membership import Group
from trireme.protocol.routing import BucketMap
from trireme.protocol.wire import Array, Push
from trireme.rpc import Request
from trireme.server.attendance import Attendance
from trireme.server.expiry import shrink_slice
from trireme.server.log.segment import Record
from trireme.server.shard import Shard, StreamState
from trireme.table import TableSchema

STATE = "log.state"


def state_records(shard: Shard, attendance: Attendance) -> Iterator[Record]:
    """What a segment begins with that a snapshot goes with. Nobody may be changing anything."""
    yield STATE, {"shard": _state_of(shard), "attendance": attendance.gone()}, ()
    for push in shard.staging.staged():
        yield "ps.push", *push.to_wire()


def _state_of(shard: Shard) -> dict[str, Any]:
    streams = [
        [stream, state.last, state.incarnation, list(state.position)]
        for stream, state in shard.streams.items()
    ]
    return {
        "job": shard.job,
        "map": shard.map().to_wire(),
        "index": shard.index,
        "tables": [table.schema.to_wire() for table in shard.tables.values()],
        "blocks": shard.blocks.declaration(),
        "streams": streams,
        "staging": shard.staging.state(),
        "paces": shard.paces.state(),
        "version": shard.version,
        "pushes": shard.num_pushes,
        "pushes_at_load": shard.pushes_at_load,
        "settled": list(shard.settled),
        "staleness": list(shard.staleness.items()),
    }


def install_state(shard: Shard, attendance: Attendance, body: Mapping[str, Any]) -> None:
    """The inverse of `state_records`, less its pushes, in a server that has nothing yet. Blocks get
    zeros.
    """
    state = body["shard"]
    shard.job = state["job"]
    shard.set_map(BucketMap.from_wire(state["map"]), state["index"])
    shard.raise_version(state["version"])
    for schema in state["tables"]:
        shard.create_table(TableSchema.from_wire(schema))
    if state["blocks"] is not None:
        optimizer, groups, specs = state["blocks"]
        blocks = [BlockSpec.from_wire(spec) for spec in specs]
        zeros = np.zeros(sum(spec.size for spec in blocks), np.float32)
        shard.blocks.create(optimizer, groups, blocks, zeros, {})
    for stream, last, incarnation, position in state["streams"]:
        shard.streams[stream] = StreamState(last, incarnation, tuple(position))
    shard.staging.install(state["staging"])
    shard.paces.install(state["paces"])
    shard.num_pushes, shard.pushes_at_load = state["pushes"], state["pushes_at_load"]
    shard.settled = (state["settled"][0], list(state["settled"][1]))
    shard.staleness = Counter(dict(state["staleness"]))
    attendance.install(body["attendance"])


def replay(shard: Shard, attendance: Attendance, record: Record) -> None:
    """Obey a recorded request once more; what is there already stays.

    Raises:
        BadRequest: a method that changes nothing.
    """
    method, body, arrays = record
    if method == "ps.push":
        push = Push.from_wire(body, arrays)
        stream = shard.stream(push.stream)
        stream.incarnation = max(stream.incarnation, push.incarnation)
        shard.take(push)
    elif method == "log.step":
        if body["step"] > shard.staging.applied:
            shard.staging.apply_step(body["step"], body.get("norm"))
    elif method == "ps.group":
        _adopt(shard, Group.from_wire(body))
    elif method == "server.goodbye":
        of = body["worker"], body["num_workers"], body["incarnation"], body.get("members")
        attendance.install([of])
    elif method == "server.alive":
        attendance.take_back(body["worker"])
    elif method == "policy.shrink":
        shrink_slice(shard, body)
    elif method != STATE:  # the beginning of a segment whose snapshot was not finished
        _replay_control(shard, method, body, arrays)


def _adopt(shard: Shard, group: Group) -> None:
    if shard.paces.is_newer(group.version):
        shard.paces.set_group(group.version, group.members)
        if group.staged:  # the steps that it lets be applied have records of their own
            shard.staging.adopt_group(group.version, group.members)


def _replay_control(
    shard: Shard, method: str, body: dict[str, Any], arrays: Sequence[Array]
) -> None:
    if method == "log.version":
        shard.raise_version(body["version"])
    elif method == "log.forget":
        shard.forget_removed(body["version"])
    elif method == "log.settle":
        keys, gained = arrays
        shard.settle(shard.table(body["table"]), body["id"], body["part"], keys, gained)
    elif method in ("ps.map", "ps.create_table", "ps.create_blocks"):
        request = Request(0, method, body, list(arrays), "log", "log", "", math.inf)
        shard.handlers()[method](request)
    else:
        raise BadRequest(f"expected a method that changes something, found {method!r}")
