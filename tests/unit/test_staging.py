"""Sync training applies a step once, in stream order, when all members have declared it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from trireme.errors import BadRequest, Internal, ResourceExhausted
from trireme.protocol.clipping import Clip, NormReply
from trireme.protocol.membership import Member, Stop
from trireme.protocol.wire import Push
from trireme.rpc import Deferred, Reply
from trireme.server.journal import Journal
from trireme.server.staging import Staging


def push(stream: int, step: int) -> Push:
    return Push(
        stream=stream,
        sequence=step,
        incarnation=1,
        step=step,
        staged=True,
        computed_at=0,
        examples=1,
        position=(),
        time=0,
        map_version=1,
        tables=[],
        blocks=None,
    )


class Applied:
    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int]]] = []
        self.norms: list[float | None] = []
        self.staging = Staging(self._apply, lambda pushes: len(pushes))

    def declare(self, stream: int, step: int) -> None:
        self.staging.declare(stream, step)
        self.staging.apply_complete()

    def _apply(self, pushes: list[Push], norm: float | None) -> None:
        self.steps.append([push.id for push in pushes])
        self.norms.append(norm)


@pytest.fixture
def applied() -> Applied:
    made = Applied()
    made.staging.set_members(1, {0: Member(1, None), 1: Member(1, None)})
    return made


def test_step_is_applied_when_the_last_member_declares_it_in_stream_order(applied: Applied) -> None:
    staging = applied.staging
    staging.stage(push(1, 1))
    staging.stage(push(0, 1))
    applied.declare(1, 1)
    assert applied.steps == []
    applied.declare(0, 1)
    assert applied.steps == [[(0, 1), (1, 1)]]


def test_staging_again_changes_nothing_before_and_after_the_step(applied: Applied) -> None:
    staging = applied.staging
    for _ in range(2):
        staging.stage(push(0, 1))
        staging.stage(push(1, 1))
    applied.declare(0, 1)
    applied.declare(1, 1)
    staging.stage(push(0, 1))
    assert applied.steps == [[(0, 1), (1, 1)]]


def test_a_stream_that_leaves_is_not_waited_for_and_its_staged_push_counts(
    applied: Applied,
) -> None:
    staging = applied.staging
    for step in (1, 2):
        staging.stage(push(0, step))
        if step == 1:
            staging.stage(push(1, 1))
            staging.set_members(2, {0: Member(1, None), 1: Member(1, 2)})
        applied.declare(0, step)
    assert applied.steps == [[(0, 1), (1, 1)], [(0, 2)]]


def test_waiters_run_when_their_step_has_been_applied(applied: Applied) -> None:
    staging = applied.staging
    woken: list[int] = []
    staging.stage(push(0, 1))
    staging.stage(push(1, 1))
    assert not staging.when_applied(0, 1, lambda: woken.append(1))
    applied.declare(0, 1)
    assert staging.waiting_for() == "step 1 waits for streams [1]"
    applied.declare(1, 1)
    assert woken == [1]
    assert staging.when_applied(0, 1, lambda: woken.append(2))


def test_all_streams_stop_after_the_step_that_one_names_the_last(applied: Applied) -> None:
    staging = applied.staging
    staging.stage(push(0, 1))
    staging.stage(replace(push(1, 1), stops="told"))
    applied.declare(1, 1)
    assert staging.stop is None  # not reported before all have declared the step
    applied.declare(0, 1)
    assert staging.stop == Stop(1, "told")
    again = Applied().staging
    again.install(staging.state())
    assert again.stop == Stop(1, "told")
    staging.set_members(2, {0: Member(1, 2), 1: Member(1, None)})
    assert staging.stop == Stop(1, "told"), "it is of the pass, which continues"
    staging.set_members(3, {0: Member(2, None), 1: Member(2, None)})
    assert staging.stop is None


def test_a_push_that_is_not_staged_delays_no_step() -> None:
    body, arrays = replace(push(0, 1), stops="told").to_wire()
    assert Push.from_wire(body, arrays).stops == "told"
    for wrong in ({"staged": False}, {"stops": "a\nb"}, {"stops": "x" * 201}, {"stops": None}):
        with pytest.raises(BadRequest, match="stops"):
            Push.from_wire({**body, **wrong}, arrays)


def test_an_older_group_is_ignored(applied: Applied) -> None:
    staging = applied.staging
    staging.set_members(3, {0: Member(1, None)})
    staging.set_members(2, {0: Member(1, None), 1: Member(1, None)})
    staging.stage(push(0, 1))
    applied.declare(0, 1)
    assert applied.steps == [[(0, 1)]]


def test_a_step_that_is_not_next_or_not_a_members_is_refused(applied: Applied) -> None:
    with pytest.raises(BadRequest, match="step 1 is being staged"):
        applied.staging.stage(push(0, 2))
    with pytest.raises(BadRequest, match="stream 7 is None"):
        applied.staging.stage(push(7, 1))
    with pytest.raises(BadRequest, match="stream 0 says that step 1 is staged"):
        applied.declare(0, 1)


NORM = Clip("norm", 1.0)


def test_a_step_that_is_clipped_by_its_norm_waits_for_that(applied: Applied) -> None:
    staging, reported = applied.staging, list[str]()
    for stream in (0, 1):
        staging.stage(replace(push(stream, 1), clip=NORM))
    assert not staging.when_complete(0, 1, lambda: reported.append("complete"))
    applied.declare(0, 1)
    assert reported == []
    applied.declare(1, 1)
    assert (reported, applied.steps) == (["complete"], [])
    assert staging.when_complete(0, 1, reported.clear)
    assert staging.norm_of(1) == NormReply(2, None, False)
    assert staging.waiting_for() == "step 1 waits for its norm"
    with pytest.raises(BadRequest, match="expected a member of the pass, found stream 7"):
        staging.when_complete(7, 1, reported.clear)
    assert not staging.when_applied(0, 1, lambda: reported.append("applied"))
    staging.set_norm(1, 0.5)
    applied.declare(0, 1)
    assert reported == ["complete", "applied"]
    assert (applied.steps, applied.norms) == ([[(0, 1), (1, 1)]], [0.5])
    # A late request gets the same norm; a late other norm changes nothing.
    assert staging.norm_of(1) == NormReply(None, 0.5, True)
    staging.set_norm(1, 7.0)
    staging.apply_complete()
    assert len(applied.steps) == 1
    other = Applied().staging
    other.install(staging.state())
    assert other.norm_of(1) == NormReply(None, 0.5, True)
    assert other.norm_of(0) == NormReply(None, None, True)


def test_streams_that_leave_are_no_reason_to_apply_a_step_without_its_norm(
    applied: Applied,
) -> None:
    staging = applied.staging
    for stream in (0, 1):
        staging.stage(replace(push(stream, 1), clip=NORM))
    staging.set_members(2, {0: Member(1, 2), 1: Member(1, 2)})
    assert applied.steps == []
    staging.set_norm(1, 3.0)
    applied.declare(1, 1)
    assert applied.norms == [3.0]


def test_different_clipping_of_workers_is_refused(applied: Applied) -> None:
    applied.staging.stage(replace(push(0, 1), clip=NORM))
    for clip in (None, Clip("norm", 2.0), Clip("value", 1.0)):
        with pytest.raises(BadRequest, match=r"clips by Clip.* they must agree"):
            applied.staging.stage(replace(push(1, 1), clip=clip))


def test_an_answer_that_fails_does_not_take_the_others_with_it(applied: Applied) -> None:
    answers: list[object] = []

    def no_memory() -> Reply:
        raise MemoryError

    def broken() -> Reply:
        raise ValueError("a bug")

    applied.staging.set_members(2, {stream: Member(1, None) for stream in range(3)})
    for stream, make in enumerate((no_memory, broken, Reply)):
        deferred = Deferred()
        deferred.bind(answers.append)
        waiter = partial(Journal().answer_when_kept, deferred, make)
        applied.staging.when_applied(stream, 1, waiter)
    for stream in range(3):
        applied.staging.stage(push(stream, 1))
        applied.declare(stream, 1)
    assert [type(answer) for answer in answers] == [ResourceExhausted, Internal, Reply]


def test_a_stream_waits_once_and_a_stranger_not_at_all(applied: Applied) -> None:
    staging, woken = applied.staging, list[int]()
    for number in range(3):  # a repeated pull
        assert not staging.when_applied(0, 1, partial(woken.append, number))
    assert staging.num_held()["waiting"] == 1
    with pytest.raises(BadRequest, match="expected a member of the pass, found stream 7"):
        staging.when_applied(7, 1, lambda: None)
    for stream in (0, 1):
        staging.stage(push(stream, 1))
        applied.declare(stream, 1)
    assert woken == [2]
