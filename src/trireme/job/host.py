"""The server that a worker's process hosts, in a job whose workers hold the rows themselves.

It listens like any server: the other workers save, load, evaluate and meet through it. It ends
when all workers have said goodbye.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from trireme import _core, rpc
from trireme.coordinator.coordinator import Coordinator
from trireme.errors import BadRequest, TriremeError
from trireme.job.handlers import handlers_of
from trireme.protocol.job_limits import WORKERS_MAX
from trireme.protocol.wire import need, need_list, need_name
from trireme.rpc import Call, Handler, Reply, Request
from trireme.server.attendance import Attendance
from trireme.server.row_tier import RowTier
from trireme.server.server_limits import ServerLimits
from trireme.server.state import ServerState
from trireme.server.store_hosts import StoreHosts

log = logging.getLogger("trireme.job")

PROBE_S, VIEW_CHARS = 2.0, 64


class Host:
    """A server in this process.

    Args:
        pool: threads for the core, shared with the worker.
        listen: "host:port"; port 0 chooses a free one. None: nobody calls it over the network.
        listen_fd: a socket that listens there already.
        keys, insecure, root, limits, tier, store_hosts: as of `serving.serve`.
        timeout_s: how long the other workers may be silent; at the end, twice as long.

    Attributes:
        state: its tables and blocks. handlers: the methods that it answers.
        endpoint: its real address; empty: it has none.
    """

    def __init__(
        self,
        pool: _core.Pool,
        *,
        listen: str | None = None,
        listen_fd: int | None = None,
        keys: rpc.ServerKeys | None = None,
        insecure: bool = False,
        root: Path = Path("/"),
        limits: ServerLimits | None = None,
        tier: RowTier | None = None,
        store_hosts: StoreHosts = None,
        timeout_s: float = 60.0,
    ) -> None:
        if not root.is_dir():
            raise BadRequest(f"init: expected root to be a folder, found {str(root)!r}")
        limits = limits or ServerLimits()
        self.state = ServerState(pool, limits.capacity, store_hosts, tier)
        self._attendance, self._timeout_s, self._tier = Attendance(), timeout_s, tier
        self.losses, views = Losses(), Views(self.state.state_id)
        self.meeting: object = None  # what the workers met by, which others may still use
        self.handlers: Mapping[str, Handler] = {
            **handlers_of(
                self.state,
                Coordinator(held=self.state.held),
                self._attendance.handlers(),
                root.resolve(),
            ),
            **self.losses.handlers(),
            **views.handlers(),
        }
        self._server: rpc.Server | None = None
        if listen is not None:
            self._server = rpc.Server(
                listen,
                self.handlers,
                name="the server in a worker",
                limits=limits.messages,
                keys=keys,
                insecure=insecure,
                listen_fd=listen_fd,
                state=self.state.state_id,
            ).start()

    @property
    def endpoint(self) -> str:
        return "" if self._server is None else self._server.endpoint

    def silent_workers(self) -> list[int]:
        """Workers that have not been heard here for the timeout."""
        silences_s = self._attendance.silences_s()
        return [worker for worker, seconds in silences_s.items() if seconds > self._timeout_s]

    def end(self, *, waits: bool) -> None:
        """Stop serving. waits: first for the goodbyes of the other workers, who may still need the
        rows here.
        """
        try:
            if self._server is not None and waits:
                self._attendance.wait(max(2 * self._timeout_s, 10.0))
        except TriremeError as error:  # this worker has ended well
            log.warning("%s", error)
        finally:
            if self._server is not None:
                self._server.stop()
            else:  # embedded: the process goes on, and Python collects late what refers to itself
                self.state.tables.clear()
            if self._tier is not None:
                self._tier.close()


class Views:
    """What each worker has last seen at the addresses of all: a digest of the states there. Workers
    that are started again may come before all processes of their former start have ended; a start
    begins when every worker has seen the same, and told every host. Threads: any.
    """

    def __init__(self, state: str) -> None:
        self._lock = threading.Lock()
        self._state = state
        self._views: dict[int, str] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"server.meet": self._on_meet}

    def _on_meet(self, request: Request) -> Reply:
        body = request.body
        worker, num_workers = need(body, "worker", int), need(body, "num_workers", int)
        if not 0 <= worker < num_workers <= WORKERS_MAX:
            raise BadRequest(
                f"server.meet: expected 0 <= worker < num_workers <= {WORKERS_MAX}, found {worker}"
                f" and {num_workers}"
            )
        view = need_name(body, "view", VIEW_CHARS)
        with self._lock:
            self._views[worker] = view
            is_same = all(self._views.get(other) == view for other in range(num_workers))
        return Reply({"state": self._state, "is_same": is_same})


class Losses:
    """Which workers this process or another one has found gone. The first that notices tells the
    others, before it ends too and looks like the cause. Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost: list[int] = []

    def handlers(self) -> dict[str, Handler]:
        return {"server.lost": self._on_lost}

    def _on_lost(self, request: Request) -> Reply:
        self._note(need_list(request.body, "workers", int, WORKERS_MAX))
        return Reply()

    def _note(self, workers: Sequence[int]) -> list[int]:
        """Keep the first report; returns what is kept."""
        with self._lock:
            self._lost = self._lost or list(workers)
            return list(self._lost)

    def find(self, servers: Sequence[str], client: rpc.RpcClient) -> list[int]:
        """The workers that have gone: those whose server does not answer, unless another worker has
        said who has. servers: of all workers. Tells those that answer.
        """
        if reported := self._note([]):
            return reported
        answers = client.call_all(
            [Call(server, "server.ready") for server in servers],
            timeout_s=PROBE_S,
            return_errors=True,
        )
        gone = [w for w, answer in enumerate(answers) if isinstance(answer, TriremeError)]
        lost = self._note(gone)
        living = [server for worker, server in enumerate(servers) if worker not in gone]
        calls = [Call(server, "server.lost", {"workers": lost}) for server in living]
        client.call_all(calls if lost else [], timeout_s=PROBE_S, return_errors=True)
        return lost
