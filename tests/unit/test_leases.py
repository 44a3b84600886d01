"""Leases of streams, and workers that come, leave and fall silent, as the coordinator answers."""

from __future__ import annotations

import itertools
import random
import time
import uuid
from collections import Counter
from typing import Any

import msgpack
import pytest

from tests.seeds import SEED
from trireme.coordinator.coordinator import Coordinator
from trireme.coordinator.leases import StreamLeases
from trireme.errors import BadRequest, Fenced, NotReady, ResourceExhausted, TriremeError
from trireme.rpc import Deferred, Reply, Request

SILENCE_S = 10.0
NUM_STREAMS = 3


class Job:
    """Calls of workers, in a job that begins with two of them. `kept`: the state that outlives the
    coordinator.
    """

    def __init__(self, num_streams: int = NUM_STREAMS) -> None:
        self.num_streams, self.now, self.kept = num_streams, 1000.0, b""
        self.num_kept = 0
        self.incarnations: dict[int, int] = {}
        self._calls = itertools.count(1)
        self._make()

    def _make(self) -> None:
        self.coordinator = Coordinator(lambda: self.now)
        self.coordinator.keep(self._keep)
        self.handlers = self.coordinator.handlers()

    def _keep(self, state: dict[str, Any]) -> None:
        self.kept = msgpack.packb(state, default=lambda part: part())
        self.num_kept += 1

    def restart(self) -> None:
        """The coordinator's process is killed and restarted."""
        kept = msgpack.unpackb(self.kept, strict_map_key=False)
        self._make()
        self.coordinator.install(kept)

    def ask(self, method: str, body: dict[str, Any]) -> Any:
        name, deadline = f"coord.{method}", time.monotonic() + 10
        return self.handlers[name](Request(1, name, body, [], "test", "test", "", deadline))

    def join(self, **place: Any) -> int:
        """Another process joins; returns which worker it is."""
        body = {"servers": ["a:1"], "token": uuid.uuid4().hex, **place}
        reply = self.ask("join", body).body
        self.incarnations[reply["worker"]] = reply["incarnation"]
        return int(reply["worker"])

    def begin(self, worker: int, num_workers: int = 2) -> int:
        streams = {"streams": self.num_streams, "silence_s": SILENCE_S}
        return self.join(worker=worker, num_workers=num_workers, **streams)

    def me(self, worker: int) -> dict[str, int]:
        incarnation = self.incarnations[worker]
        return {"worker": worker, "incarnation": incarnation, "call": next(self._calls)}

    def enter(self, worker: int, number: int = 1, num_steps: int = 0) -> bool:
        """Whether nothing is left of the pass."""
        sequences = [0] * self.num_streams
        body = {"pass": number, "num_steps": num_steps, "sequences": sequences, **self.me(worker)}
        return bool(self.ask("enter", body).body["is_over"])

    def take(self, worker: int, done: tuple[int, int] | None = None, number: int = 1) -> Any:
        return self.ask("take", {"pass": number, "done": list(done or ()), **self.me(worker)})

    def gather(self, worker: int, name: str, purpose: str = "talk") -> Any:
        place = {"pass": 1, "name": name, "purpose": purpose, "body": {"of": worker}}
        return self.ask("gather", {**place, **self.me(worker)})

    def alive(self, *workers: int) -> None:
        for worker in workers:
            self.coordinator.note_heartbeat(worker, self.incarnations[worker])

    def heartbeats_of_one(self, worker: int) -> None:
        """Only this worker sends heartbeats for longer than a silence."""
        for _ in range(6):
            self.now += SILENCE_S / 4
            self.alive(worker)


@pytest.fixture
def job() -> Job:
    made = Job()
    for worker in (0, 1):
        made.begin(worker)
    return made


def lease_of(answer: Any) -> tuple[int, int] | None:
    """What an answer gives: (stream, lease); None: all are done."""
    if isinstance(answer, Deferred):
        got: list[Reply | TriremeError] = []
        answer.bind(got.append)
        [answer] = got
        if isinstance(answer, TriremeError):
            raise answer
    body = answer.body
    return None if body["stream"] is None else (body["stream"], body["lease"])


def come_of(deferred: Deferred) -> list[int]:
    got: list[Any] = []
    deferred.bind(got.append)
    return [body["of"] for body, _ in got[0].body["bodies"]]


def test_each_stream_is_one_workers_at_a_time_and_is_given_once(job: Job) -> None:
    assert [job.enter(worker) for worker in (0, 1)] == [False, False]
    assert lease_of(job.take(0)) == (0, 1)
    assert lease_of(job.take(0)) == (0, 1)  # its answer was lost
    assert lease_of(job.take(1)) == (1, 1)
    assert lease_of(job.take(1, (1, 1))) == (2, 1)
    waiting = job.take(0, (0, 1))
    assert waiting.describe() == "pass 1 waits for streams 2 (worker 1)"
    assert lease_of(job.take(1, (2, 1))) is None
    assert lease_of(waiting) is None
    assert job.enter(1) is True
    with pytest.raises(BadRequest, match=r"expected pass 1 of worker 0.* found pass 3"):
        job.enter(0, 3)
    assert job.enter(0, 2) is False


def test_no_worker_begins_a_pass_before_all_streams_of_the_last_one_are_done(job: Job) -> None:
    job.enter(0)
    job.take(0)
    with pytest.raises(BadRequest, match=r"streams \[0, 1, 2\] are not done, found pass 2"):
        job.enter(1, 2)


def test_a_late_worker_participates_from_the_pass_it_enters(job: Job) -> None:
    for worker in (0, 1):
        job.enter(worker)
    late = job.join(late=True)
    assert late == 2
    before = job.gather(0, "1"), job.gather(late, "1")
    assert isinstance(job.gather(1, "1"), Reply)
    assert [come_of(deferred) for deferred in before] == [[0, 1], [0, 1]]
    assert job.enter(late) is False
    waiting = [job.gather(worker, "2") for worker in (0, 1)]
    assert waiting[0].describe() == "meeting 2 of pass 1 (talk) waits for workers [2]"
    assert isinstance(job.gather(late, "2"), Reply)
    assert come_of(waiting[0]) == [0, 1, 2]


def test_a_late_worker_with_another_purpose_is_refused_alone(job: Job) -> None:
    for worker in (0, 1):
        job.enter(worker)
    late = job.join(late=True)
    waiting = job.gather(0, "1")
    with pytest.raises(BadRequest, match="it is for 'talk', worker 2, which has come late, comes"):
        job.gather(late, "1", "sing")
    job.gather(1, "1")
    assert come_of(waiting) == [0, 1]


def test_a_late_worker_makes_no_other_call_first(job: Job) -> None:
    late = job.join(late=True)
    with pytest.raises(NotReady, match="no worker that takes part has set its strategy yet"):
        job.ask("agree", {"fact": "strategy", "value": "sync", **job.me(late)})
    with pytest.raises(BadRequest, match="expected worker 2 in a pass, found it in none"):
        job.take(late)


def test_a_late_worker_that_is_refused_learns_why(job: Job) -> None:
    other = Job(num_streams=0)
    with pytest.raises(NotReady, match="no worker has joined yet that others may join later"):
        other.join(late=True)
    other.begin(0)
    with pytest.raises(BadRequest, match="expected a job with leased streams"):
        other.join(late=True)
    job.enter(job.join(late=True))
    with pytest.raises(ResourceExhausted, match="expected at most 3 workers at a time"):
        job.join(late=True)
    job.ask("end", {"run": 0, **job.me(0)})
    with pytest.raises(BadRequest, match="found one whose workers end their scripts"):
        job.join(late=True)


def test_simultaneous_late_workers_enter_up_to_the_limit(job: Job) -> None:
    for worker in (0, 1):
        job.enter(worker)
    late = [job.join(late=True) for _ in range(2)]
    assert job.enter(late[0]) is False
    assert job.enter(late[0]) is False  # its answer was lost
    with pytest.raises(
        ResourceExhausted, match=r"coord\.enter: expected at most 3 workers .*, one"
    ):
        job.enter(late[1])
    job.begin(1)
    assert job.enter(1) is False
    job.ask("give_back", {"parts": True, **job.me(late[0])})
    assert job.enter(late[1]) is False


def test_others_get_the_streams_of_a_silent_worker(job: Job) -> None:
    for worker in (0, 1):
        job.enter(worker)
        job.alive(worker)
    assert [lease_of(job.take(worker)) for worker in (0, 1)] == [(0, 1), (1, 1)]
    assert lease_of(job.take(0, (0, 1))) == (2, 1)
    waiting, meeting = job.take(0, (2, 1)), job.gather(0, "1")
    job.heartbeats_of_one(0)
    assert lease_of(waiting) == (1, 2)
    assert come_of(meeting) == [0]
    with pytest.raises(
        Fenced, match="worker 1: it sent no heartbeat for 10 s, and others take over"
    ):
        job.take(1, (1, 1))
    job.restart()
    with pytest.raises(
        Fenced, match="worker 1: it sent no heartbeat for 10 s, and others take over"
    ):
        job.gather(1, "1")
    job.begin(1)
    assert job.enter(1) is False


@pytest.mark.parametrize("first", [0, 1])
def test_no_worker_is_given_up_because_the_server_was_suspended(job: Job, first: int) -> None:
    """Their heartbeats then arrive one after the other."""
    for worker in (0, 1):
        job.enter(worker)
        job.alive(worker)
    leases = [lease_of(job.take(worker)) for worker in (0, 1)]
    job.now += 2 * SILENCE_S
    job.alive(first)
    job.alive(1 - first)
    assert [lease_of(job.take(worker)) for worker in (0, 1)] == leases
    job.heartbeats_of_one(0)
    with pytest.raises(
        Fenced, match="worker 1: it sent no heartbeat for 10 s, and others take over"
    ):
        job.take(1)


def test_worker_0_is_waited_for_and_its_stream_is_not(job: Job) -> None:
    for worker in (0, 1):
        job.enter(worker)
        job.alive(worker)
    assert lease_of(job.take(0)) == (0, 1)
    meeting = job.gather(1, "1")
    job.heartbeats_of_one(1)
    assert lease_of(job.take(1)) == (0, 2)
    assert meeting.describe() == "meeting 1 of pass 1 (talk) waits for workers [0]"
    with pytest.raises(Fenced, match="stream 0: lease 2 has taken over, worker 0 had 1"):
        job.take(0, (0, 1))


def test_a_restarted_worker_releases_its_leases(job: Job) -> None:
    for worker in (0, 1):
        job.enter(worker)
    leases = [lease_of(job.take(worker)) for worker in (0, 1)]
    assert leases == [(0, 1), (1, 1)]
    assert lease_of(job.take(0, (0, 1))) == (2, 1)
    waiting = job.take(0, (2, 1))
    job.begin(1)
    assert lease_of(waiting) == (1, 2)
    assert job.enter(1) is False


def test_a_stream_given_back_again_is_not_done_in_the_next_pass(job: Job) -> None:
    """The answer was lost, and others have begun the next pass when it is asked for again."""
    for worker in (0, 1):
        job.enter(worker)
    for stream in range(NUM_STREAMS):
        assert lease_of(job.take(0)) == (stream, 1)
        answer = job.take(0, (stream, 1))
    assert lease_of(answer) is None
    assert job.enter(1, 2) is False
    assert lease_of(job.take(0, (2, 1))) is None
    for stream in range(NUM_STREAMS):
        assert lease_of(job.take(1, number=2)) == (stream, 2)
        assert lease_of(job.take(0, (stream, 1))) is None
        answer = job.take(1, (stream, 2), number=2)
    assert lease_of(answer) is None


def offers_of(monkeypatch: pytest.MonkeyPatch, num_workers: int, num_streams: int) -> int:
    """How often the coordinator looks for a stream for a worker, in a pass."""
    offered, offer = [], StreamLeases._offer

    def counting(self: StreamLeases, worker: int, number: int) -> Reply | None:
        offered.append(worker)
        return offer(self, worker, number)

    monkeypatch.setattr(StreamLeases, "_offer", counting)
    job = Job(num_streams)
    for worker in range(num_workers):
        job.begin(worker, num_workers)
    for worker in range(num_workers):
        job.enter(worker)
    done = 0
    asking = [(worker, job.take(worker)) for worker in range(num_workers)]
    while done < num_streams:
        worker, answer = asking.pop(0)
        lease = lease_of(answer)
        assert lease is not None
        done += 1
        asking.append((worker, job.take(worker, lease)))
    assert [lease_of(answer) for _, answer in asking] == [None] * num_workers
    monkeypatch.undo()
    return len(offered)


def test_offers_of_a_pass_grow_with_the_streams_and_the_workers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for num_workers, num_streams in ((4, 16), (32, 64)):
        num_offers = offers_of(monkeypatch, num_workers, num_streams)
        assert num_offers <= 2 * (num_streams + 2 * num_workers)


def test_a_question_that_changes_nothing_keeps_nothing(job: Job) -> None:
    for worker in (0, 1):
        job.enter(worker)
    before = job.num_kept
    assert [lease_of(job.take(worker)) for worker in (0, 1)] == [(0, 1), (1, 1)]
    assert job.num_kept == before + 2
    assert lease_of(job.take(1, (1, 1))) == (2, 1)
    job.take(1, (2, 1))
    waiting, before = job.take(1, (2, 1)), job.num_kept
    for _ in range(3):
        assert lease_of(job.take(0)) == (0, 1)
        waiting = job.take(1, (2, 1))
        assert isinstance(waiting, Deferred)
    assert job.num_kept <= before + 1
    job.restart()
    assert lease_of(job.take(0)) == (0, 1)
    waiting = job.take(1, (2, 1))
    assert lease_of(job.take(0, (0, 1))) is None
    assert lease_of(waiting) is None
    job.restart()
    assert job.enter(1) is True


def test_in_any_order_of_events_each_stream_is_done_once_under_its_last_lease() -> None:
    """Workers take, finish, die, fall silent, and come late; the coordinator is killed."""
    print(f"seed {SEED}")
    for case in range(40):
        rng, job = random.Random(f"{SEED} {case}"), Job(rng_streams := 1 + case % 5)
        for worker in (0, 1):
            job.begin(worker)
        has: dict[int, tuple[int, int]] = {}
        last, done = Counter[int](), Counter[int]()
        for worker in (0, 1):
            job.enter(worker)
        workers = [0, 1]
        while done.total() < rng_streams:
            worker = rng.choice(workers)
            event = rng.choice(("work", "work", "work", "again", "restart", "late"))
            if event == "restart":
                job.restart()
            elif event == "late" and len(workers) < rng_streams:
                workers.append(job.join(late=True))
                assert job.enter(workers[-1]) is False
            elif event == "again" and worker < 2:
                has.pop(worker, None)
                job.begin(worker)
                job.enter(worker)
            elif event == "work":
                finished = has.pop(worker, None)
                answer = job.take(worker, finished)
                if finished is not None:
                    assert finished[1] == last[finished[0]]
                    done[finished[0]] += 1
                taken = None if isinstance(answer, Deferred) else lease_of(answer)
                if taken is not None:
                    stream, lease = has[worker] = taken
                    assert lease > last[stream]
                    last[stream] = lease
                elif isinstance(answer, Deferred):  # who waits asks again, or is answered
                    job.restart()
        assert set(done.values()) == {1}
        assert all(job.enter(worker) for worker in workers)
