"""A step of sync training is applied when all its members have declared it, in stream order,
once.
"""

from __future__ import annotations

import pytest

from trireme.errors import BadRequest
from trireme.ps.staging import Member, Staging
from trireme.ps.wire import Push


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
        export_version=0,
        tables=[],
        blocks=None,
    )


class Applied:
    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int]]] = []
        self.staging = Staging(lambda pushes: self.steps.append([p.id for p in pushes]))


@pytest.fixture
def applied() -> Applied:
    made = Applied()
    made.staging.set_group(1, {0: Member(1, None), 1: Member(1, None)})
    return made


def test_step_is_applied_when_the_last_member_declares_it_in_stream_order(applied: Applied) -> None:
    staging = applied.staging
    staging.stage(push(1, 1))
    staging.stage(push(0, 1))
    staging.declare(1, 1)
    assert applied.steps == []
    staging.declare(0, 1)
    assert applied.steps == [[(0, 1), (1, 1)]]


def test_staging_again_changes_nothing_before_and_after_the_step(applied: Applied) -> None:
    staging = applied.staging
    for _ in range(2):
        staging.stage(push(0, 1))
        staging.stage(push(1, 1))
    staging.declare(0, 1)
    staging.declare(1, 1)
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
            staging.set_group(2, {0: Member(1, None), 1: Member(1, 2)})
        staging.declare(0, step)
    assert applied.steps == [[(0, 1), (1, 1)], [(0, 2)]]


def test_waiters_run_when_their_step_has_been_applied(applied: Applied) -> None:
    staging = applied.staging
    woken: list[int] = []
    staging.stage(push(0, 1))
    staging.stage(push(1, 1))
    assert not staging.when_applied(1, lambda: woken.append(1))
    staging.declare(0, 1)
    assert staging.waiting_for() == "step 1 waits for streams [1]"
    staging.declare(1, 1)
    assert woken == [1]
    assert staging.when_applied(1, lambda: woken.append(2))


def test_an_older_group_is_ignored(applied: Applied) -> None:
    staging = applied.staging
    staging.set_group(3, {0: Member(1, None)})
    staging.set_group(2, {0: Member(1, None), 1: Member(1, None)})
    staging.stage(push(0, 1))
    staging.declare(0, 1)
    assert applied.steps == [[(0, 1)]]


def test_a_step_that_is_not_next_or_not_a_members_is_refused(applied: Applied) -> None:
    with pytest.raises(BadRequest, match="step 1 is being staged"):
        applied.staging.stage(push(0, 2))
    with pytest.raises(BadRequest, match="stream 7 is None"):
        applied.staging.stage(push(7, 1))
    with pytest.raises(BadRequest, match="stream 0 says that step 1 is staged"):
        applied.staging.declare(0, 1)
