"""A look at one row of a running job."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from trireme.errors import BadRequest, NotReady, ResourceExhausted
from trireme.inspect.wanted import key_of, shown_wanted, wanted_row
from trireme.protocol.block_messages import map_from_wire
from trireme.protocol.routing import Keys, buckets_of
from trireme.protocol.row_places import NONE, PLACES
from trireme.protocol.wire import Array, Arrays, need
from trireme.rows.core_table import make_core_table
from trireme.rows.wide_rows import RowLayout
from trireme.rpc import Reply, RpcClient
from trireme.table import TableSchema

TEXT_MAX = 1024
"""Characters of a table's name, and of what names a row."""


class Rows:
    """Finds rows. Threads: any; one look at a time.

    Args:
        client: used by looks alone.
        servers: of the job, the first one first.
        timeout_s: of each of the up to three calls of a look, and of the wait for other looks.
    """

    def __init__(self, client: RpcClient, servers: Sequence[str], *, timeout_s: float) -> None:
        self._client, self._servers, self._timeout_s = client, servers, timeout_s
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self._client.close()

    def find(self, table: str, row: str) -> dict[str, Any]:
        """What there is of a row, in JSON's types.

        Args:
            table: its name.
            row: a key, or FEATURE=VALUE as training took the value.

        Raises:
            BadRequest: such a text names no row, or only a key can name one of this table.
            UnknownTable: there is none such. ResourceExhausted: others look at rows. NotReady: no
            worker has connected. What `RpcClient.call` raises.
        """
        for what, text in (("a table", table), ("a row", row)):
            if not text or len(text) > TEXT_MAX or not text.isprintable():
                raise BadRequest(
                    f"console: expected {what} of 1 to {TEXT_MAX} printable characters, found"
                    f" {text[:64]!r} of {len(text)}"
                )
        wanted = wanted_row(row)
        if not self._lock.acquire(timeout=self._timeout_s):
            raise ResourceExhausted("console: others look at rows; try again")
        try:
            head = self._client.call(self._servers[0], "coord.map", {}, timeout_s=self._timeout_s)
            bucket_map = map_from_wire(head.body["map"], Arrays(head.arrays))
            if not bucket_map.servers:
                raise NotReady("console: no worker has connected yet")
            answer = self._look(bucket_map.servers[0], table, np.empty(0, np.uint64))
            schema = TableSchema.from_wire(need(answer.body, "schema", dict))
            key = key_of(table, wanted, schema.salt)
            keys = np.array([key], np.uint64)
            server = bucket_map.servers[int(bucket_map.buckets[buckets_of(keys)[0]])]
            answer = self._look(server, table, keys)
        finally:
            self._lock.release()
        named = {"table": table, "row": shown_wanted(wanted), "key": str(key), "server": server}
        return named | _content(schema, answer)

    def _look(self, server: str, table: str, keys: Keys) -> Reply:
        body = {"table": table}
        return self._client.call(server, "ps.look", body, [keys], timeout_s=self._timeout_s)


def _content(schema: TableSchema, answer: Reply) -> dict[str, Any]:
    """Where the row is, and what it has. Keys are texts, for a browser's numbers are float64, which
    would lose digits of a uint64.
    """
    core = make_core_table(schema)
    layout, arrays = RowLayout.of(schema, core), Arrays(answer.arrays)
    place = PLACES[int(arrays.take("places", np.uint8, (1,))[0])]
    wide = arrays.take("rows", np.uint8, (1, layout.row_bytes))
    if place == NONE:
        return {"place": place}
    state = layout.state(wide)[0]
    num_floats = len(state) - core.state_counts
    updates = np.ascontiguousarray(state[num_floats:]).view(np.uint32)
    statistics = layout.statistics(wide)[0]
    return {
        "place": place,
        "weights": _floats(layout.weights(wide)[0]),
        "state": _floats(state[:num_floats]),
        "updates": updates.tolist(),
        "rule": str(schema.rule["name"]),
        **{name: statistics[name].item() for name in statistics.dtype.names or ()},
    }


def _floats(values: Array) -> list[float]:
    return [float(value) for value in values]
