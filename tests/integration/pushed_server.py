"""A server in this process, without sockets, whose tables a test pushes to."""

from __future__ import annotations

from typing import Any

import numpy as np

import trireme as tr
from trireme import _core
from trireme.optim import values_of_group
from trireme.protocol.routing import BucketMap
from trireme.protocol.wire import Push, TablePush
from trireme.rpc import Request
from trireme.server.row_tier import RowTier
from trireme.server.state import ServerState

DIM = 8
RULE = tr.optim.Adagrad(lr=0.1)


class PushedServer:
    def __init__(self, tier: RowTier | None) -> None:
        self.state = ServerState(_core.Pool(1), tier=tier)
        self.state.assignment.adopt("", BucketMap.even(("a:1",)), 0)
        self._num_pushes = 0

    def create(self, name: str) -> None:
        self.state.create_table(tr.Table(name, dim=DIM, optimizer=RULE).schema)

    def tier_of(self, name: str) -> dict[str, int]:
        tier = self.state.tables[name].rows.tier
        assert tier is not None
        return tier

    def make_push(self, name: str, keys: np.ndarray) -> Push:
        self._num_pushes += 1
        gradients = np.ones((len(keys), DIM), np.float32)
        return Push(
            stream=0, sequence=self._num_pushes, incarnation=1, step=0, staged=False,
            computed_at=0, examples=8, position=(), time=0,
            map_version=self.state.assignment.map().version,
            tables=[TablePush(name, keys, gradients, values_of_group(RULE.group(), 1))],
            blocks=None,
        )  # fmt: skip

    def push(self, name: str, keys: np.ndarray) -> tuple[dict[str, Any], list[Any]]:
        """Returns the body and the arrays of the message."""
        push = self.make_push(name, keys)
        body, arrays = push.to_wire()
        request = Request(1, "ps.push", body, arrays, "test", "test", "", float("inf"))
        self.state.push(push, request)
        return body, arrays
