"""Pushes and pulls of workers who exchange them together: which exchanges they take, and that no
step is applied before every server has every push.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from trireme.errors import DeadlineExceeded, NotReady, Unavailable
from trireme.rpc import Call, Deferred, Reply, Request
from trireme.train.modes.collective.byte_exchange import Parts, Received
from trireme.train.modes.collective.calls_together import CallsTogether

WAIT_S = 20.0


class Hall:
    """Where the threads of all workers exchange bytes: a ByteExchange without a process group."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=WAIT_S)
        self._brought: list[Any] = [None] * size
        self.num_bytes: list[int] = []  # of each exchange

    def end_of(self, rank: int) -> End:
        return End(self, rank)

    def exchange(self, rank: int, outgoing: list[list[list[bytes]]], note: int) -> Received:
        self._brought[rank] = outgoing, note
        self._barrier.wait()
        brought = list(self._brought)
        num = sum(len(part) for sent, _ in brought for to in sent for parts in to for part in parts)
        if self._barrier.wait() == 0:
            self.num_bytes.append(num)
        messages = [
            [[memoryview(part) for part in parts] for parts in sent[rank]] for sent, _ in brought
        ]
        return Received(messages, [int(note) for _, note in brought], num == 0)


class End:
    def __init__(self, hall: Hall, rank: int) -> None:
        self._hall, self._rank = hall, rank

    def exchange(self, outgoing: Sequence[Sequence[Parts]], *, note: int = 0) -> Received:
        copied = [[[bytes(part) for part in parts] for parts in to] for to in outgoing]
        return self._hall.exchange(self._rank, copied, note)


class Servers:
    """A server of each worker, as in sync: a step is applied when all its workers have said that
    their pushes are everywhere; then their pulls are answered.

    lengths: how many steps each worker has. refuses, defers: of a push at a server.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        refuses: Callable[[int, int, int], bool] = lambda *_: False,
        defers: Callable[[int, int, int], bool] = lambda *_: False,
    ) -> None:
        self.lengths, self._refuses, self._defers = lengths, refuses, defers
        self._lock = threading.Lock()
        self.staged: dict[int, set[tuple[int, int]]] = defaultdict(set)  # step -> (worker, server)
        # (server, step) -> workers
        self._declared: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._waiting: dict[tuple[int, int], list[Deferred]] = defaultdict(list)
        self.applied: set[tuple[int, int]] = set()  # (server, step)
        self.num_refused = 0
        self.timers: list[threading.Timer] = []

    def members(self, step: int) -> set[int]:
        return {worker for worker, length in enumerate(self.lengths) if step <= length}

    def handlers(self, server: int) -> dict[str, Any]:
        def push(request: Request) -> Reply | Deferred:
            step, worker = request.body["step"], request.body["worker"]
            if self._refuses(worker, server, step):
                self.num_refused += 1
                raise NotReady(f"push of step {step} is refused")
            if not self._defers(worker, server, step):
                self._stage(worker, server, step)
                return Reply()
            deferred = Deferred()

            def stage() -> None:
                self._stage(worker, server, step)
                deferred.reply(Reply())

            self.timers.append(threading.Timer(0.003, stage))
            self.timers[-1].start()
            return deferred

        def pull(request: Request) -> Deferred:
            step, worker = request.body["staged"], request.body["worker"]
            assert "after" not in request.body
            deferred = Deferred()
            with self._lock:
                self._waiting[server, step].append(deferred)
                self._declared[server, step].add(worker)
                self._apply_if_complete(server, step)
            return deferred

        return {"ps.push": push, "ps.pull": pull}

    def _stage(self, worker: int, server: int, step: int) -> None:
        with self._lock:
            self.staged[step].add((worker, server))

    def _apply_if_complete(self, server: int, step: int) -> None:
        if self._declared[server, step] < self.members(step):
            return
        missing = {(w, s) for w in self.members(step) for s in range(len(self.lengths))}
        assert missing <= self.staged[step], "a step is applied that a server does not have"
        self.applied.add((server, step))
        for deferred in self._waiting.pop((server, step), []):
            deferred.reply(Reply({"rows_of": [server, step]}, [np.full(3, step)]))


def push_and_pull(worker: int, size: int, step: int, *, both: bool) -> list[Call]:
    pushes = [
        Call(str(server), "ps.push", {"worker": worker, "step": step}, [np.ones(step)])
        for server in range(size)
    ]
    return [*pushes, *pulls(worker, size, step, after=step)] if both else pushes


def pulls(worker: int, size: int, step: int, **more: int) -> list[Call]:
    body = {"worker": worker, "staged": step, **more}
    return [Call(str(server), "ps.pull", body, [np.arange(step)]) for server in range(size)]


def train(
    servers: Servers,
    hall: Hall,
    calls_both: Callable[[int, int], bool] = lambda *_: True,
    meets: Callable[[int], bool] = lambda _: False,
) -> None:
    """Have all workers make their steps. calls_both: whether a worker calls push and pull of a step
    together. meets: whether all meet after the push of a step, outside of the exchanges.
    """
    size = len(servers.lengths)
    meetings = {
        step: threading.Barrier(len(servers.members(step)), timeout=WAIT_S)
        for step in range(1, max(servers.lengths) + 1)
    }

    def work(worker: int) -> None:
        calls = CallsTogether(
            hall.end_of(worker),  # type: ignore[arg-type]
            [str(server) for server in range(size)],
            worker,
            servers.handlers(worker),
            lambda _: None,
        )
        for step in range(1, servers.lengths[worker] + 1):
            rows = pushed(calls, worker, step)
            if meets(step):
                meetings[step].wait()
            rows = rows or calls.call_all(pulls(worker, size, step), timeout_s=WAIT_S)
            assert [reply.body["rows_of"] for reply in rows] == [[s, step] for s in range(size)]
            assert all((reply.arrays[0] == step).all() for reply in rows)
        calls.idle()

    def pushed(calls: CallsTogether, worker: int, step: int) -> list[Reply]:
        """Push a step until no server refuses it. Returns the rows, if they came with it."""
        while True:
            both = calls_both(worker, step)
            called = push_and_pull(worker, size, step, both=both)
            try:
                rows = calls.call_all(called, timeout_s=WAIT_S)[size:]
            except NotReady:
                continue
            return [] if any("refused" in reply.body for reply in rows) else rows

    with ThreadPoolExecutor(size) as pool:
        for done in [pool.submit(work, worker) for worker in range(size)]:
            done.result()
    for timer in servers.timers:
        timer.join()
    assert servers.applied == {
        (server, step) for server in range(size) for step in range(1, max(servers.lengths) + 1)
    }


@pytest.mark.parametrize(("both", "expected"), [(True, 3), (False, 4)])
def test_a_step_takes_three_exchanges_of_which_one_has_no_messages(
    both: bool, expected: int
) -> None:
    hall, steps = Hall(3), 5
    train(Servers([steps] * 3), hall, calls_both=lambda *_: both)
    *exchanges, last = [num > 0 for num in hall.num_bytes]
    assert not last  # where all say that they have nothing more
    assert exchanges == ([True, False, True] if both else [True] * expected) * steps


def test_if_one_worker_pulls_later_then_so_do_all() -> None:
    hall = Hall(3)
    train(Servers([4] * 3), hall, calls_both=lambda worker, step: worker != step % 3, meets=bool)
    assert len(hall.num_bytes) == 4 * 4 + 1


def test_a_worker_without_data_takes_part() -> None:
    train(Servers([2, 5, 3]), hall := Hall(3))
    assert [num > 0 for num in hall.num_bytes] == [True, False, True] * 5 + [False]


def test_a_push_that_is_refused_is_repeated_before_any_pull_is_answered() -> None:
    refused = {(0, 2, 2), (1, 1, 3)}  # (worker, server, step): once

    def refuses(*push: int) -> bool:
        is_refused = push in refused
        refused.discard(push)  # type: ignore[arg-type]
        return is_refused

    servers = Servers([4] * 3, refuses)
    train(servers, Hall(3), meets=lambda step: step not in (2, 3))
    assert servers.num_refused == 2


def test_pulls_wait_until_a_server_has_kept_all_pushes() -> None:
    train(Servers([4] * 3, defers=lambda worker, server, step: server == step % 3), hall := Hall(3))
    assert sum(num > 0 for num in hall.num_bytes) == 2 * 4  # none but pushes and rows


def test_what_all_have_given_up_is_forgotten() -> None:
    """A pull that nobody waits for is not answered later, and hides no error of a later push."""
    given_up: list[Deferred] = []
    handled = []
    hall = Hall(2)

    def calls_of(rank: int) -> CallsTogether:
        def push(request: Request) -> Deferred | Reply:
            if request.body["step"] == 1:
                given_up.append(Deferred())
                return given_up[-1]
            if rank != request.body["worker"]:
                raise NotReady("refused")
            return Reply()

        def pull(request: Request) -> Reply:
            handled.append(request.body)
            return Reply()

        handlers = {"ps.push": push, "ps.pull": pull}
        end: Any = hall.end_of(rank)
        return CallsTogether(end, ["0", "1"], rank, handlers, lambda _: None)

    workers = [calls_of(rank) for rank in range(2)]

    def give_up(rank: int) -> None:
        with pytest.raises(DeadlineExceeded):
            workers[rank].call_all(push_and_pull(rank, 2, 1, both=True), timeout_s=0.05)
        workers[rank].idle()

    def go_on(rank: int) -> None:
        with pytest.raises(NotReady, match="refused"):
            workers[rank].call_all(push_and_pull(rank, 2, 2, both=True), timeout_s=WAIT_S)
        workers[rank].idle()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(give_up, range(2)))
        for deferred in given_up:
            deferred.reply(Reply())
        list(pool.map(go_on, range(2)))
    assert not handled


def test_no_exchange_follows_one_that_was_interrupted() -> None:
    class Interrupted:
        num = 0

        def exchange(self, *_: Any, **__: Any) -> Received:
            self.num += 1
            raise KeyboardInterrupt

    exchange = Interrupted()
    calls = CallsTogether(exchange, ["0", "1"], 0, {}, lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        calls.call_all(pulls(0, 2, 1), timeout_s=WAIT_S)
    for call in (calls.idle, calls.check_whole):
        with pytest.raises(Unavailable, match="an exchange was interrupted"):
            call()
    assert exchange.num == 1


@pytest.mark.parametrize("seed", range(12))
def test_no_step_is_applied_early_and_nobody_waits_for_ever(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(2, 4)
    lengths = [rng.randint(1, 12) for _ in range(size)]
    likely, rare = rng.random(), 0.15 * rng.random()
    refused: set[tuple[int, int, int]] = set()

    def coin(*parts: int, odds: float, salt: str) -> bool:
        return random.Random(f"{seed} {salt} {parts}").random() < odds

    def is_calm(step: int) -> bool:
        return coin(step, odds=0.5, salt="calm")

    def refuses(*push: int) -> bool:
        worker, server, step = push
        is_refused = coin(*push, odds=rare, salt="refuse") and (worker, server, step) not in refused
        refused.add((worker, server, step))
        return is_refused and not is_calm(step)

    def defers(*push: int) -> bool:
        return coin(*push, odds=rare, salt="defer") and not is_calm(push[-1])

    # After a step that is not calm, some may need exchanges that others do not know of.
    def calls_both(worker: int, step: int) -> bool:
        return coin(worker, step, odds=likely, salt="both")

    train(Servers(lengths, refuses, defers), Hall(size), calls_both, meets=is_calm)
