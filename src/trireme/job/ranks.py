"""A job without servers of its own: each worker hosts the server of its part of the buckets."""

import datetime
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from trireme import rpc
from trireme.errors import DeadlineExceeded, TriremeError
from trireme.job.cluster import Cluster
from trireme.job.connecting import connect
from trireme.job.host import Host
from trireme.rpc.notices import FIRST_S, Notices
from trireme.server.monitoring import watch_state

log = logging.getLogger("trireme.job")

_POLL_S, _MEET_S = 0.02, 0.1


def connect_ranks(
    host: Host,
    servers: Callable[[str], tuple[str, ...]],
    *,
    worker: int,
    num_workers: int,
    timeout_s: float,
    **options: Any,
) -> Cluster:
    """Join a job as the worker in whose process `host` serves; ends the host if that fails.

    servers: the addresses of all workers' servers, in the order of the workers, from that of the
    own one; it lives as long as the cluster. options: of `connect`.
    """
    try:
        addresses = servers(host.endpoint)
        log.info("worker %d hosts the rows of its buckets at %s", worker, host.endpoint)
        cluster = connect(
            addresses,
            worker=worker,
            num_workers=num_workers,
            timeout_s=timeout_s,
            host=host,
            **options,
        )
    except BaseException:
        host.end(waits=False)
        raise
    watch_state(cluster.metrics.registry, host.state)
    host.meeting = servers
    return cluster


class AddressMeeting:
    """Has the workers whose addresses are known begin together, in processes of one start: see
    `host.Views`. keys: this worker's.
    """

    def __init__(
        self, servers: Sequence[str], worker: int, timeout_s: float, keys: rpc.ClientKeys | None
    ) -> None:
        self._servers, self._worker, self._timeout_s = tuple(servers), worker, timeout_s
        self._keys = keys

    def __call__(self, _: str) -> tuple[str, ...]:
        """The addresses in the order of the workers. Raises DeadlineExceeded: a worker did not
        come; NotAdmitted: one does not list this worker's key.
        """
        with rpc.RpcClient(name=f"worker {self._worker}", keys=self._keys) as client:
            start = time.monotonic()
            deadline, notices = start + self._timeout_s, Notices(start)
            view, missing = "", list(self._servers)
            while (left_s := deadline - time.monotonic()) > 0:
                replies = self._tell(client, view, min(FIRST_S, left_s))
                missing = [s for s in self._servers if s not in replies]
                states = [str(reply.body.get("state")) for reply in replies.values()]
                seen = "" if missing else sha256(" ".join(states).encode()).hexdigest()
                if seen and seen == view and all(r.body.get("is_same") for r in replies.values()):
                    return self._servers
                view = seen
                if notices.take_due(time.monotonic()):
                    log.warning("worker %d still waits for %s", self._worker, self._who(missing))
                time.sleep(_MEET_S)  # the others have to tell all hosts, too
        raise DeadlineExceeded(
            f"init: the {len(self._servers)} workers did not meet within {self._timeout_s:g} s:"
            f" waited for {self._who(missing)}"
        )

    def _who(self, missing: Sequence[str]) -> str:
        if missing:
            places = [f"{self._servers.index(server)} at {server}" for server in missing]
            return f"workers that are not ready: {', '.join(places)}"
        return "the end of processes of a former start, in whose place some workers are"

    def _tell(self, client: rpc.RpcClient, view: str, timeout_s: float) -> dict[str, rpc.Reply]:
        """Returns the answers of those that are there."""
        body = {"worker": self._worker, "num_workers": len(self._servers), "view": view}
        answers = client.call_all(
            [rpc.Call(server, "server.meet", body) for server in self._servers],
            timeout_s=timeout_s,
            return_errors=True,
        )
        replies = {}
        for server, answer in zip(self._servers, answers, strict=True):
            if not isinstance(answer, TriremeError):
                replies[server] = answer
            elif not answer.retry:
                raise answer
        return replies


class TorchrunMeeting:
    """Exchanges the addresses of all workers through the store that torchrun's variables name
    (MASTER_ADDR, MASTER_PORT and its own), and keeps the store, which may be in this process.

    torchrun may start workers again with the same store, which then has entries of their
    predecessors. So worker 0 publishes what it finds, until every worker has confirmed a list that
    contains its own entry; entries contain a number drawn anew.
    """

    def __init__(self, worker: int, num_workers: int, timeout_s: float) -> None:
        self._worker, self._num_workers, self._timeout_s = worker, num_workers, timeout_s
        self._store: Any = None

    def __call__(self, own: str) -> tuple[str, ...]:
        """The addresses in the order of the workers. Raises DeadlineExceeded: one did not come."""
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        timeout = datetime.timedelta(seconds=self._timeout_s)
        error: Exception | None = None
        try:
            stores = rendezvous("env://", self._worker, self._num_workers, timeout=timeout)
            # The user's own process group may use the store too.
            self._store = dist.PrefixStore("trireme", next(stores)[0])  # type: ignore[attr-defined]
            self._store.set_timeout(timeout)
            return self._exchange(f"{uuid.uuid4().hex} {own}")
        except (RuntimeError, TimeoutError) as raised:
            error = raised
        raise DeadlineExceeded(
            f"init: the {self._num_workers} workers did not meet at MASTER_ADDR:MASTER_PORT within"
            f" {self._timeout_s:g} s: {error}"
        ) from error

    def _exchange(self, own: str) -> tuple[str, ...]:
        self._store.set(f"entry {self._worker}", own)
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            entries = self._publish() if self._worker == 0 else self._read("entries")
            if entries and own in entries.splitlines():
                self._store.set(f"confirmed {self._worker}", entries)
                if self._worker == 0 and self._have_all_confirmed(entries):
                    self._store.set("agreed", entries)
                if self._read("agreed") == entries:
                    return tuple(entry.split()[1] for entry in entries.splitlines())
            time.sleep(_POLL_S)
        raise TimeoutError(f"workers {self._missing()} are missing")

    def _publish(self) -> str:
        """Worker 0: the entries of all workers, some of them perhaps of predecessors."""
        read = [self._read(f"entry {worker}") for worker in range(self._num_workers)]
        entries = "\n".join(read) if all(read) else ""
        if entries and entries != self._read("entries"):
            self._store.set("entries", entries)
        return entries

    def _have_all_confirmed(self, entries: str) -> bool:
        workers = range(self._num_workers)
        return all(self._read(f"confirmed {worker}") == entries for worker in workers)

    def _missing(self) -> list[int]:
        entries = self._read("entries")
        workers = range(self._num_workers)
        return [w for w in workers if self._read(f"confirmed {w}") != entries or not entries]

    def _read(self, key: str) -> str:
        """Empty: there is none."""
        if not self._store.check([key]):
            return ""
        return str(self._store.get(key).decode())
