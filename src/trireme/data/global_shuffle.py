"""Workers deal their examples to each other, round by round, over rpc.

Every worker serves one method, `exchange.piece`, to the others while it lasts. In a round each
takes a slice out of its store, sends every other worker its part of it, and appends what it got, in
the order of the workers; so no more than a few slices are in memory twice. A worker begins a round
when it has all pieces of the one before, so none is ahead of another by more than one round.

What a worker ends up with depends on the examples, the workers and `deal` alone.
"""

from __future__ import annotations

import socket
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

Piece = NDArray[np.uint8]
Deal = Callable[[_core.ColumnStore, int], NDArray[np.uint32]]
"""(a slice, the round) -> the worker that each of its rows goes to."""


def exchange(
    store: _core.ColumnStore,
    new_store: Callable[[bool], _core.ColumnStore],
    deal: Deal,
    *,
    columns: str,
    cluster: Cluster,
    pool: _core.Pool,
) -> _core.ColumnStore:
    """Deal the rows of all workers' stores; returns those that came here. Every worker calls it.

    Args:
        store: is emptied; when this fails, what is left in it is of no use.
        new_store: makes an empty one, with weights or without.
        columns: what the store holds, in words; the same at every worker.

    Raises:
        SchemaMismatch: workers hold other columns.
        BadRequest: this worker may not listen where the others could reach it.
        DeadlineExceeded, Unavailable: another worker did not answer within the cluster's timeout.
    """
    if cluster.client.script.has_attended_next():
        raise BadRequest(
            "global_shuffle: expected examples that the other workers send, found a worker that was"
            " started again when the shuffle was under way or over: start the job again and load"
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
        met = [body for body, _ in _meet(cluster, facts, "global shuffle")]
        _check_columns([str(of["columns"]) for of in met])
        inbox.token = str(met[0]["token"])
        server = end.enter_context(_server(cluster, [of["key"] for of in met], inbox))
        places = _meet(cluster, {"endpoint": server.endpoint}, "global shuffle: places")
        outbox = _Outbox(
            cluster, [of["key"] for of in met], [str(p["endpoint"]) for p, _ in places]
        )
        end.callback(outbox.close)
        received = new_store(_has_weights([of["weights"] for of in met]))
        rounds = max(int(of["rounds"]) for of in met)
        for number in range(rounds):
            piece = store.take_chunks(-(-store.num_chunks // (rounds - number)))
            pieces = piece.split(deal(piece, number), cluster.num_workers, pool)
            del piece
            inbox.begin(number)
            outbox.send(inbox.token, number, pieces)
            for worker in range(cluster.num_workers):
                own = worker == cluster.worker
                received.append_piece(pieces[worker] if own else inbox.take(number, worker))
            del pieces
        # Nobody stops serving before everybody has heard that the last piece arrived.
        _meet(cluster, {}, "end of global shuffle")
    return received


def num_rounds(num_bytes: int) -> int:
    """How many slices to cut so many bytes into."""
    return max(-(-num_bytes // SLICE_BYTES_MAX), min(SLICES, -(-num_bytes // SLICE_BYTES_MIN)), 1)


def _meet(
    cluster: Cluster, body: dict[str, Any], purpose: str
) -> list[tuple[dict[str, Any], list[Any]]]:
    return cluster.client.gather(body, [], purpose=purpose, patient=True)


def _check_columns(columns: Sequence[str]) -> None:
    for worker, found in enumerate(columns):
        if found != columns[0]:
            raise SchemaMismatch(
                f"global_shuffle: expected the columns of worker 0, {columns[0]}, "
                f"found at worker {worker}: {found}"
            )


def _has_weights(found: Sequence[bool | None]) -> bool:
    """None: a worker without examples."""
    kinds = {of for of in found if of is not None}
    if len(kinds) > 1:
        raise SchemaMismatch(
            "global_shuffle: expected weighted values at all workers or at none, "
            f"found (by worker) {list(found)}"
        )
    return kinds.pop() if kinds else False


def _server(cluster: Cluster, keys: Sequence[str | None], inbox: _Inbox) -> Server:
    """Admits the workers of this job alone, as the servers do, if there are keys."""
    own = None
    if cluster.keys is not None:
        admitted = frozenset(key for key in keys if key is not None)
        own = ServerKeys(own=cluster.keys.own, admitted=admitted)
    return Server(
        f"{own_host(cluster.client.servers.map.servers[0])}:0",
        {"exchange.piece": inbox.on_piece},
        name=f"worker {cluster.worker}",
        keys=own,
        insecure=cluster.insecure,
    )


def own_host(server: str) -> str:
    """The address from which this machine reaches a server, where other workers can reach it."""
    host, _, port = server.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        own = str(probe.getsockname()[0])
    return f"[{own}]" if family == socket.AF_INET6 else own


class _Outbox:
    """Sends pieces to the other workers; one client per key that a worker must prove to have."""

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

    def send(self, token: str, number: int, pieces: Sequence[Piece]) -> None:
        """Each worker its piece of this round, but for the own one; returns when all have it."""
        body = {"exchange": token, "round": number, "worker": self._worker}
        for client in self._clients.values():
            calls = [
                Call(self._endpoints[to], "exchange.piece", body, [piece])
                for to, piece in enumerate(pieces)
                if to != self._worker and self._client_of[to] is client
            ]
            client.call_all(calls, timeout_s=self._timeout_s)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


class _Inbox:
    """Pieces that have come, of this round and the next. Threads: any."""

    def __init__(self, num_workers: int, timeout_s: float) -> None:
        self.token = ""
        self._num_workers, self._timeout_s = num_workers, timeout_s
        self._changed = threading.Condition()
        self._pieces: dict[tuple[int, int], Piece] = {}
        self._seen: set[tuple[int, int]] = set()
        self._round = 0

    def begin(self, number: int) -> None:
        """From now on pieces of the round after this one may come: before this one's are sent."""
        with self._changed:
            self._round = number

    def on_piece(self, request: Request) -> Reply:
        """A piece that comes twice, as after a lost answer, is one."""
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
                self._pieces[number, worker] = request.arrays[0]
                self._changed.notify_all()
        return Reply()

    def take(self, number: int, worker: int) -> Piece:
        """The piece of a round from a worker, once."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while (number, worker) not in self._pieces:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise DeadlineExceeded(
                        f"global_shuffle: no examples from worker {worker} in round {number} "
                        f"within {self._timeout_s:g} s"
                    )
            return self._pieces.pop((number, worker))
