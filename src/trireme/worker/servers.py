"""The servers of a job as one worker calls them, with the bucket map that requests rely on.

Threads: pulls, pushes, announcements, calls aside and the rest have a transport each. So one thread
may pull while another pushes and a third waits for a save.
"""

import time
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeVar

from trireme.errors import DeadlineExceeded, NotReady, TriremeError, Unavailable, WrongMap
from trireme.protocol.block_messages import map_from_wire
from trireme.protocol.routing import BucketMap
from trireme.protocol.wire import Array, Arrays
from trireme.rpc import Call, Reply
from trireme.worker.transport import LockedTransport, Transport

T = TypeVar("T")
RETRY_S = 0.02
_CONNECT_S = 1.0  # enough to reach a server that is there
ANNOUNCE_S = 2.0
FINISH = {"import": "import.finish", "load": "checkpoint.finish"}


class Servers:
    """Calls servers, again if the map was old.

    endpoints: the first hosts the coordinator. connect: makes a transport for one thread's calls,
    given a name for it. states: endpoint -> name of what its server holds; filled when servers have
    told, so that the transports find a server that was started again without it.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        connect: Callable[[str], Transport],
        timeout_s: float,
        states: dict[str, str],
    ) -> None:
        self.endpoints, self.timeout_s = tuple(endpoints), timeout_s
        self.pulls = LockedTransport(connect("pull"))
        self.pushes = LockedTransport(connect("push"))
        self._control = LockedTransport(connect("control"))
        self._aside = LockedTransport(connect("aside"))
        self._announcing: LockedTransport | None = None  # few jobs have tables that need it
        self._connect = connect
        self.map: BucketMap
        self.job = ""  # the coordinator's id of it
        self.states = states

    def close(self) -> None:
        for locked in (self.pulls, self.pushes, self._control, self._aside, self._announcing):
            if locked is not None:
                locked.transport.close()

    # ---- calls ----

    def call_all(
        self, calls: Sequence[Call], timeout_s: float, *, aside: bool = False
    ) -> list[Reply]:
        """Make these calls, in parallel; replies in their order. aside: see `everywhere`."""
        return (self._aside if aside else self._control).call_all(calls, timeout_s)

    def announce(self, calls: Sequence[Call]) -> None:
        """Make calls that need not succeed, and do not wait long."""
        if self._announcing is None:
            self._announcing = LockedTransport(self._connect("announce"))
        self._announcing.call_all(calls, min(self.timeout_s, ANNOUNCE_S))

    def everywhere(
        self,
        method: str,
        body: dict[str, Any],
        *,
        timeout_s: float | None = None,
        aside: bool = False,
    ) -> list[Reply]:
        """Call a method on every server, in parallel; replies in the order of the servers. aside:
        over a transport of its own, because it takes long and other calls continue.
        """
        calls = [Call(endpoint, method, body, []) for endpoint in self.endpoints]
        transport = self._aside if aside else self._control
        return transport.call_all(calls, self.timeout_s if timeout_s is None else timeout_s)

    def everywhere_current(self, method: str, body: dict[str, Any]) -> list[Reply]:
        """As `everywhere`, repeated until no server needs a newer map or is not ready."""
        return self.until_current(
            method, lambda left_s: self.everywhere(method, body, timeout_s=left_s)
        )

    def coordinator(
        self,
        method: str,
        body: dict[str, Any],
        arrays: Sequence[Array] = (),
        *,
        timeout_s: float | None = None,
    ) -> Reply:
        """Call a method of the coordinator."""

        def attempt(left_s: float) -> Reply:
            call = Call(self.endpoints[0], method, body, list(arrays))
            return self._control.call_all([call], left_s)[0]

        return self.until_current(method, attempt, timeout_s)

    def ask(self, method: str, body: dict[str, Any], *, aside: bool = False) -> Reply:
        """Call a method of server 0 once, whatever map it has."""
        call = Call(self.endpoints[0], method, body, [])
        return self.call_all([call], self.timeout_s, aside=aside)[0]

    def decide(self, id: str, *, commit: bool, **about: Any) -> bool:
        """Whether a prepared import or load takes place: as the coordinator has decided, or now
        decides by `commit`.
        """
        return bool(self.ask("coord.decide", {"id": id, "commit": commit, **about}).body["commit"])

    def finish(self, what: str, id: str, *, commit: bool, timeout_s: float) -> bool:
        """End an import or load on all servers as it is decided; returns the decision. what: a name
        in FINISH.
        """
        decision = self.decide(id, commit=commit)
        self.adopt()  # refuses pushes of before
        self.everywhere(FINISH[what], {"id": id, "commit": decision}, timeout_s=timeout_s)
        return decision

    # ---- bucket map ----

    def until_current(
        self, what: str, attempt: Callable[[float], T], timeout_s: float | None = None
    ) -> T:
        """Try until success or the deadline; refresh the map after WRONG_MAP, wait at NOT_READY."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = monotonic() + timeout_s
        error: TriremeError | None = None
        while (left_s := deadline - monotonic()) > 0:
            try:
                return attempt(left_s)
            except WrongMap as wrong:
                error = wrong
                self.adopt()
            except NotReady as not_ready:
                error = not_ready
                for kind in FINISH.keys() & (details := not_ready.details or {}).keys():
                    self.finish(kind, str(details[kind]), commit=False, timeout_s=left_s)
            except (DeadlineExceeded, Unavailable) as late:
                # To reach a server it had all the time; a server that gave up may leave some.
                spare_s = left_s if isinstance(late, Unavailable) else deadline - monotonic()
                if error is None or spare_s > _CONNECT_S:
                    raise
                break  # the last attempt had no time left: what kept the others is the reason
            time.sleep(min(RETRY_S, max(0.0, deadline - monotonic())))
        raise DeadlineExceeded(f"{what}: not possible within {timeout_s} s; last: {error}")

    def adopt(self, answer: Reply | None = None) -> None:
        """Use the coordinator's map, of an answer if given; send it to every server without it."""
        answer = answer or self.ask("coord.map", {})
        head, arrays = answer.body["map"], answer.arrays
        bucket_map = map_from_wire(head, Arrays(arrays))
        lack: Sequence[int] = range(len(bucket_map.servers))
        # First without the map: of a thousand workers, one needs to send it.
        for fields, parts in (({}, ()), ({"map": head}, arrays)):
            calls = []
            for server in lack:
                endpoint = bucket_map.servers[server]
                state = self.states.get(endpoint, "")
                body = {"job": self.job, "index": server, "state": state, **fields}
                calls.append(Call(endpoint, "ps.map", body, parts))
            replies = self.call_all(calls, self.timeout_s) if calls else []
            for call, reply in zip(calls, replies, strict=True):
                self.states[call.endpoint] = str(reply.body["state"])
            versions = [int(reply.body["version"]) for reply in replies]
            lack = [s for s, v in zip(lack, versions, strict=True) if v < bucket_map.version]
        self.map, self.endpoints = bucket_map, bucket_map.servers
