"""Workers send their examples to each other, round by round, over rpc.

Every worker serves one method, `exchange.piece`, to the others during a global shuffle. In a round
each takes a slice out of its store, sends every other worker its part of the slice, and appends the
parts that it receives, in the order of the workers. So only a few slices are in memory twice. A
worker begins a round when it has all parts of the one before, so none is ahead of another by more
than one round.

The outcome depends on the examples, the workers and `Receivers` alone.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme import _core
from trireme.errors import BadRequest, DeadlineExceeded, SchemaMismatch
from trireme.job.cluster import Cluster
from trireme.rpc import Call, ClientKeys, Reply, Request, RpcClient, Server, ServerKeys

SLICE_BYTES_MAX = 64 << 20
# As long as a slice has this many, there are SLICES of them.
SLICE_BYTES_MIN = 1 << 20
SLICES = 16

PackedRows = NDArray[np.uint8]
Receivers = Callable[[_core.ColumnStore, int], NDArray[np.uint32]]
"""(a slice, the round) -> the worker that gets each of its rows."""


def deal_examples(
    store: _core.ColumnStore,
    new_store: Callable[[bool], _core.ColumnStore],
    receivers: Receivers,
    *,
    columns: str,
    cluster: Cluster,
    pool: _core.Pool,
) -> _core.ColumnStore:
    """Deal the rows of all workers' stores; returns those of this worker. Every worker calls it.

    Args:
        store: is emptied; after a failure the rest in it is of no use.
        new_store: makes an empty one, with weights or without.
        columns: describes the store's columns; the same at every worker.

    Raises:
        SchemaMismatch: workers hold other columns.
        BadRequest: this worker may not listen at an address that the others can reach.
        DeadlineExceeded, Unavailable: another worker did not answer within the cluster's timeout.
    """
    if cluster.client.script.has_attended_next():
        raise BadRequest(
            "global_shuffle: expected examples that the other workers send, found a worker that was"
            " restarted when the shuffle was under way or over: start the job again and load"
            " the newest checkpoint"
        )
    with ExitStack() as end:
        inbox = _Inbox(cluster.num_workers, cluster.client.timeout_s)
        facts = {
            "key": None if cluster.keys is None else cluster.keys.own.public,
            "token": uuid.uuid4().hex,
            "columns": columns,
            "weights": store.has_weights if store.num_rows else None,
            "rounds": num_rounds(store.num_bytes),
        }
        workers = _meet(cluster, facts, "global shuffle")
        _check_columns([str(worker["columns"]) for worker in workers])
        inbox.token = str(workers[0]["token"])
        keys = [worker["key"] for worker in workers]
        server = end.enter_context(_server(cluster, keys, inbox))
        places = _meet(cluster, {"endpoint": server.endpoint}, "global shuffle: places")
        outbox = _Outbox(cluster, keys, [str(place["endpoint"]) for place in places])
        end.callback(outbox.close)
        received = new_store(_has_weights([worker["weights"] for worker in workers]))
        rounds = max(int(worker["rounds"]) for worker in workers)
        for number in range(rounds):
            rows = store.take_chunks(-(-store.num_chunks // (rounds - number)))
            parts = rows.split(receivers(rows, number), cluster.num_workers, pool)
            del rows
            inbox.begin(number)
            outbox.send(inbox.token, number, parts)
            for worker in range(cluster.num_workers):
                is_own = worker == cluster.worker
                received.append_piece(parts[worker] if is_own else inbox.take(number, worker))
            del parts
        # Nobody stops serving before all workers know that the last part has arrived.
        _meet(cluster, {}, "end of global shuffle")
    return received


def num_rounds(num_bytes: int) -> int:
    """Number of slices for a store of this size."""
    return max(-(-num_bytes // SLICE_BYTES_MAX), min(SLICES, -(-num_bytes // SLICE_BYTES_MIN)), 1)


def _meet(cluster: Cluster, body: dict[str, Any], purpose: str) -> list[dict[str, Any]]:
    """What each worker contributed."""
    gathered = cluster.client.coordinator.gather(body, [], purpose=purpose, patient=True)
    return [body for body, _ in gathered]


def _check_columns(columns: Sequence[str]) -> None:
    for worker, own in enumerate(columns):
        if own != columns[0]:
            raise SchemaMismatch(
                f"global_shuffle: expected the columns of worker 0, {columns[0]}, "
                f"found at worker {worker}: {own}"
            )


def _has_weights(by_worker: Sequence[bool | None]) -> bool:
    """None: a worker without examples."""
    kinds = {has_weights for has_weights in by_worker if has_weights is not None}
    if len(kinds) > 1:
        raise SchemaMismatch(
            "global_shuffle: expected weighted values at all workers or at none, "
            f"found (by worker) {list(by_worker)}"
        )
    return kinds.pop() if kinds else False


def _server(cluster: Cluster, keys: Sequence[str | None], inbox: _Inbox) -> Server:
    """With keys, it admits the workers of this job alone, as the servers do."""
    own = None
    if cluster.keys is not None:
        admitted = frozenset(key for key in keys if key is not None)
        own = ServerKeys(own=cluster.keys.own, admitted=admitted)
    return Server(
        f"{cluster.address}:0",
        {"exchange.piece": inbox.on_piece},
        name=f"worker {cluster.worker}",
        keys=own,
        insecure=cluster.insecure,
    )


class _Outbox:
    """Sends parts to the other workers; one rpc client per key that a worker must prove to have."""

    def __init__(
        self, cluster: Cluster, keys: Sequence[str | None], endpoints: Sequence[str]
    ) -> None:
        self._worker, self._timeout_s = cluster.worker, cluster.client.timeout_s
        self._endpoints = endpoints
        self._clients: dict[str | None, RpcClient] = {}
        self._client_of: list[RpcClient] = []
        for key in keys:
            if key not in self._clients:
                own = None
                if cluster.keys is not None and key is not None:
                    own = ClientKeys(own=cluster.keys.own, server=key)
                self._clients[key] = RpcClient(name=f"worker {cluster.worker} (exchange)", keys=own)
            self._client_of.append(self._clients[key])

    def send(self, token: str, number: int, parts: Sequence[PackedRows]) -> None:
        """Send every other worker its part of this round; returns when all have it."""
        body = {"exchange": token, "round": number, "worker": self._worker}
        for client in self._clients.values():
            calls = [
                Call(self._endpoints[to], "exchange.piece", body, [part])
                for to, part in enumerate(parts)
                if to != self._worker and self._client_of[to] is client
            ]
            client.call_all(calls, timeout_s=self._timeout_s)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


class _Inbox:
    """Received parts, of this round and the next. Threads: any."""

    def __init__(self, num_workers: int, timeout_s: float) -> None:
        self.token = ""
        self._num_workers, self._timeout_s = num_workers, timeout_s
        self._changed = threading.Condition()
        self._parts: dict[tuple[int, int], PackedRows] = {}
        self._seen: set[tuple[int, int]] = set()
        self._round = 0

    def begin(self, number: int) -> None:
        """Admit parts of the next round from now on; called before this round's are sent."""
        with self._changed:
            self._round = number

    def on_piece(self, request: Request) -> Reply:
        """A repeated part, as after a lost answer, is ignored."""
        body = request.body
        number, worker = body.get("round"), body.get("worker")
        with self._changed:
            if (
                body.get("exchange") != self.token
                or not (isinstance(number, int) and 0 <= number <= self._round + 1)
                or not (isinstance(worker, int) and 0 <= worker < self._num_workers)
                or len(request.arrays) != 1
                or request.arrays[0].dtype != np.uint8
                or request.arrays[0].ndim != 1
            ):
                raise BadRequest(
                    "exchange.piece: expected one array of bytes for this exchange, a round up to "
                    f"{self._round + 1} and a worker below {self._num_workers}, found {body}"
                )
            if (number, worker) not in self._seen:
                self._seen.add((number, worker))
                self._parts[number, worker] = request.arrays[0]
                self._changed.notify_all()
        return Reply()

    def take(self, number: int, worker: int) -> PackedRows:
        """Wait for a worker's part of a round; returns it once."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while (number, worker) not in self._parts:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise DeadlineExceeded(
                        f"global_shuffle: no examples from worker {worker} in round {number} "
                        f"within {self._timeout_s:g} s"
                    )
            return self._parts.pop((number, worker))
