"""How workers join a job, and how its script ends."""

from collections.abc import Mapping
from typing import Any

from trireme.coordinator.facts import Facts
from trireme.coordinator.leases import StreamLeases
from trireme.coordinator.meetings import Meetings
from trireme.coordinator.workers import Workers
from trireme.errors import BadRequest, NotReady, ResourceExhausted
from trireme.protocol.block_messages import map_to_wire
from trireme.protocol.compute_addresses import addresses_from_wire, addresses_to_wire
from trireme.protocol.job_limits import STREAMS_MAX, WORKERS_MAX
from trireme.protocol.wire import need, need_name
from trireme.rpc import Reply, Request

TOKEN_CHARS_MAX = 64


class Joining:
    """Admits workers, and counts how often all of them have ended their scripts."""

    def __init__(
        self, facts: Facts, workers: Workers, meetings: Meetings, leases: StreamLeases
    ) -> None:
        self._facts, self._workers = facts, workers
        self._meetings, self._leases = meetings, leases
        self._num_runs = 0  # of the script, that all workers have ended
        self._begun = 0  # the pass with which the last of them ended
        self._gone: set[int] = set()  # workers that have said goodbye to this process

    def on_join(self, request: Request) -> Reply:
        """Give a process the next incarnation of its worker, which fences the one before. A
        repetition has the same token, and gets the same incarnation.
        """
        body = request.body
        servers = tuple(str(server) for server in need(body, "servers", list))
        token = need_name(body, "token", TOKEN_CHARS_MAX)
        is_late = need({"late": False, **body}, "late", bool)
        if not servers:
            raise BadRequest("coord.join: expected at least one server, found none")
        worker = self._late_worker(token) if is_late else self._worker(body)
        self._facts.agree("servers", list(servers), worker)
        bucket_map = self._facts.begin_map(servers)
        if self._workers.restart(worker, token, self._begun, self._leases.pass_number):
            self._leases.free(worker)
        record = self._workers.records[worker]
        head, arrays = map_to_wire(bucket_map)
        return Reply(
            {
                "worker": worker,
                "num_workers": self._facts.num_workers,
                "streams": self._facts.num_streams,
                "compute_workers": addresses_to_wire(self._facts.compute_workers),
                "incarnation": record.tokens[token],
                "map": head,
                "job": self._facts.job,
                "states": self._facts.server_states,
                "script": {  # how far the predecessors of this process have come in it
                    "run": self._num_runs,
                    "begun": self._begun,
                    "met": self._meetings.attended(worker, record.passes),
                    "entered": record.passes,
                    "trained": [record.trained, record.trained_steps],
                    "is_successor": record.tokens[token] > record.first,
                    "has_ended": record.has_ended,
                },
            },
            arrays,
        )

    def _worker(self, body: Mapping[str, Any]) -> int:
        """Index of a worker that names it."""
        worker, num_workers = need(body, "worker", int), need(body, "num_workers", int)
        if not 0 <= worker < num_workers <= WORKERS_MAX:
            raise BadRequest(
                f"coord.join: expected 0 <= worker < num_workers <= {WORKERS_MAX},"
                f" found {worker} and {num_workers}"
            )
        body = {"streams": 0, "silence_s": 0.0, **body}
        num_streams, silence_s = need(body, "streams", int), need(body, "silence_s", float)
        if not (0 <= num_streams <= STREAMS_MAX and silence_s >= 0):
            raise BadRequest(
                f"coord.join: expected 0 <= streams <= {STREAMS_MAX} and silence_s >= 0,"
                f" found {num_streams} and {silence_s}"
            )
        compute_workers = addresses_from_wire(body)
        is_first = self._facts.bucket_map is None
        self._facts.agree("servers", [str(server) for server in body["servers"]], worker)
        self._facts.agree("num_workers", num_workers, worker)
        self._facts.agree("streams", num_streams, worker)
        # Not agreed on: a job that is started again may have them elsewhere.
        self._facts.compute_workers = compute_workers
        if is_first:
            self._workers.begin_job(num_workers, silence_s)
            self._leases.begin(num_streams)
        return worker

    def _late_worker(self, token: str) -> int:
        """Index of a worker that joins a running job: the next free one."""
        for worker, record in self._workers.records.items():
            if token in record.tokens:  # its answer was lost
                return worker
        if self._facts.bucket_map is None:
            raise NotReady("coordinator: no worker has joined yet that others may join later")
        if not self._leases.is_in_use:
            raise BadRequest(
                "coord.join: expected a job with leased streams (--streams, TRIREME_STREAMS), which"
                f" others may join later, found one of {self._facts.num_workers} workers without"
            )
        worker = max(max(self._workers.records) + 1, self._facts.num_workers)
        self.check_late("coord.join", worker)
        return worker

    def check_late(self, method: str, worker: int) -> None:
        """Whether a worker that does not take part yet may do so. Raises BadRequest: the job is
        ending. ResourceExhausted: no stream would be left for a worker that comes late; those that
        the job begins with always have room.
        """
        records, participants = self._workers.records, self._workers.participants
        if any(records[w].has_ended for w in participants if w in records):
            raise BadRequest(
                f"{method}: expected a running job, found one whose workers end their scripts"
            )
        num_workers = self._facts.num_workers
        at_a_time = max(num_workers, self._facts.num_streams)
        if worker >= num_workers and (worker >= WORKERS_MAX or len(participants) >= at_a_time):
            raise ResourceExhausted(
                f"{method}: expected at most {at_a_time} workers at a time, one for each stream,"
                f" and {WORKERS_MAX} in all, found worker {worker} beside {len(participants)}"
            )

    def on_agree(self, worker: int, request: Request) -> Reply:
        """Every worker must name the same value for an option of the job."""
        name, value = need(request.body, "fact", str), need(request.body, "value", str)
        takes_part = worker in self._workers.participants
        self._facts.agree_on_option(name, value, worker, takes_part=takes_part)
        return Reply({})

    def on_end(self, worker: int, request: Request) -> Reply:
        if need(request.body, "run", int) == self._num_runs:
            self._workers.end_script(worker)
        return self._leases.end(worker)

    def note_goodbye(self, worker: int) -> None:
        """A worker has said goodbye. When all have, after the end of their scripts, and this
        process continues, workers that join begin the next run of the script.
        """
        self._gone.add(worker)
        begun = self._workers.end_run(self._gone, self._facts.num_workers)
        if begun is not None:
            self._num_runs, self._begun = self._num_runs + 1, begun
            self._gone.clear()

    def state(self) -> list[int]:
        return [self._num_runs, self._begun]

    def install(self, state: list[int]) -> None:
        self._num_runs, self._begun = state
