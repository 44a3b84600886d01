"""Rows that a worker removes by their keys."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trireme import _core
from trireme.protocol.routing import Keys, buckets_of
from trireme.protocol.wire import Array, Arrays, need
from trireme.server.state import ServerState


def remove(state: ServerState, body: dict[str, Any], arrays: Sequence[Array]) -> int:
    """Execute `ps.remove`, within `Journal.change_once`; returns how many of the rows were here. A
    repetition removes what is left. Raises as `RowClaims.claim`, before it is recorded.
    """
    table = state.table(need(body, "table", str))
    sent = Arrays(arrays)
    keys: Keys = sent.take("keys", np.uint64, (None,))
    sent.end()
    own = np.isin(buckets_of(keys), state.assignment.owned_buckets())
    keys = _core.distinct([keys[own]], state.pool)
    state.claim()
    claims = state.row_claims.claim_keys(table, keys)
    state.journal.record("ps.remove", body, [keys])
    with state.lock:
        state.streams.note_contents(are_loaded=False)
    return table.rows.erase(keys, state.pool, claims)
