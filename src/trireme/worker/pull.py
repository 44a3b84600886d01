"""A pull: what is asked of each server, and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trireme import _core
from trireme.protocol.membership import Stop
from trireme.protocol.routing import BucketMap, Floats, Split
from trireme.rpc import Call, Reply
from trireme.table import RowClassId
from trireme.worker.gradients import KeysByClass


@dataclass(frozen=True)
class Pulled:
    """Answer of a pull."""

    rows: dict[RowClassId, Tensor]  # per table (K, W), W of `TableSchema.width_of`; row i for key i
    blocks: list[tuple[Sequence[str], Floats]] | None  # per server: ids, flat weights; if asked for
    push_counts: list[int]  # per server, the pushes that it had applied when it answered
    missing: dict[RowClassId, int]  # per table, how many keys have no row yet
    stop: Stop | None = None  # the step after which all stop, if a server has applied it


@dataclass
class FollowingPull:
    """A pull that follows a push on its way, and so reads what the push has changed. It saves the
    round trip of waiting for the push first. The arguments are those of `WorkerClient.pull`.
    """

    keys: KeysByClass
    blocks: bool
    time: int
    pulled: Pulled | None = None  # the answer, when the push has ended; None: it was refused


class PullPlan:
    """The keys of a pull, (K,) per `Table.class_id`, distinct and in bucket order, divided among
    the servers.
    """

    def __init__(self, keys: KeysByClass, bucket_map: BucketMap, pool: _core.Pool) -> None:
        self._map = bucket_map
        self._splits = {c: Split(keys_K, bucket_map, pool) for c, keys_K in keys.items()}
        self._keys = [self._splits[c].parts(keys_K) for c, keys_K in keys.items()]

    def tables(self) -> dict[str, list[Any]]:
        """The fields of `ps.pull` that name tables and row classes."""
        return {
            "tables": [class_id.table for class_id in self._splits],
            "classes": [class_id.row_class for class_id in self._splits],
        }

    def calls(self, body: dict[str, Any], method: str = "ps.pull") -> list[Call]:
        """One call per server."""
        return [
            Call(endpoint, method, body, [parts[server] for parts in self._keys])
            for server, endpoint in enumerate(self._map.servers)
        ]

    def join(self, replies: Sequence[Reply], *, blocks: bool) -> Pulled:
        """The answers of all servers as one."""
        rows = {
            class_id: torch.from_numpy(_core.borrow(split.join([r.arrays[i] for r in replies])))
            for i, (class_id, split) in enumerate(self._splits.items())
        }
        missing = {
            class_id: sum(int(reply.body["missing"][i]) for reply in replies)
            for i, class_id in enumerate(self._splits)
        }
        stops = (Stop.from_wire(reply.body.get("stop")) for reply in replies)
        return Pulled(
            rows,
            self._blocks(replies) if blocks else None,
            [int(reply.body["version"]) for reply in replies],
            missing,
            next(filter(None, stops), None),
        )

    def _blocks(self, replies: Sequence[Reply]) -> list[tuple[Sequence[str], Floats]]:
        """A server without blocks sends no array for them."""
        num_tables = len(self._splits)
        return [
            (self._map.blocks_of(server), reply.arrays[num_tables])
            for server, reply in enumerate(replies)
            if len(reply.arrays) > num_tables
        ]
