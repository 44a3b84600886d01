"""A pull waits while another member is too far behind, but not for members that have left."""

from __future__ import annotations

import random

import pytest

from trireme.errors import BadRequest
from trireme.protocol.membership import Member, Pace
from trireme.server.pacing import Pacing


def group(pacing: Pacing, version: int, *ends: int | None, first: int = 1) -> None:
    pacing.set_members(version, {stream: Member(first, end) for stream, end in enumerate(ends)})


def pull(pacing: Pacing, stream: int, step: int, bound: int = 2) -> list[str]:
    """Empty until the pull is answered."""
    answers: list[str] = []
    if pacing.when_within(stream, Pace(step, step - 1, bound), lambda: answers.append("later")):
        answers.append("at once")
    return answers


def test_a_pull_waits_for_the_slowest_and_is_answered_by_its_push() -> None:
    pacing = Pacing()
    group(pacing, 1, None, None, None)
    pacing.record(2, 1)
    assert pull(pacing, 0, 2) == ["at once"]
    third = pull(pacing, 0, 3)
    assert third == []
    assert "waits for streams 1 (at step 0)" in pacing.waiting_for(0, Pace(3, 2, 2))
    pacing.record(1, 1)
    assert third == ["later"]


def test_a_stream_that_leaves_delays_no_other() -> None:
    pacing = Pacing()
    group(pacing, 1, None, None)
    ninth = pull(pacing, 0, 9)
    assert ninth == []
    group(pacing, 2, None, 1)
    assert ninth == ["later"]
    assert pull(pacing, 0, 100) == ["at once"]


def test_a_pass_begins_where_the_one_before_has_ended_for_all() -> None:
    pacing = Pacing()
    group(pacing, 1, None, None)
    pacing.record(0, 7)
    group(pacing, 2, 8, 3)
    group(pacing, 3, None, None, first=8)
    assert pull(pacing, 0, 9) == ["at once"]
    assert pull(pacing, 0, 10) == []
    assert pull(pacing, 1, 9) == ["at once"]


def test_an_older_group_is_ignored_and_a_stranger_refused() -> None:
    pacing = Pacing()
    group(pacing, 2, None, None)
    group(pacing, 1, None, 1)
    assert pull(pacing, 0, 9) == []
    with pytest.raises(BadRequest, match="expected a member of the pass, found stream 5"):
        pull(pacing, 5, 1)


def test_steps_that_a_pull_reports_count_as_applied() -> None:
    pacing = Pacing()  # of a server that has restarted
    group(pacing, 1, None, None)
    first = pull(pacing, 0, 9)
    assert pull(pacing, 1, 9) == ["at once"]
    assert first == ["later"]


@pytest.mark.parametrize("seed", range(20))
def test_random_pulls_and_pushes_never_exceed_the_bound_and_never_lock_up(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_streams, bound, num_steps = rng.randint(2, 5), rng.randint(1, 4), 60
    pacing = Pacing()
    ends: list[int | None] = [None] * num_streams
    group(pacing, 1, *ends)
    done = [0] * num_streams
    asked: list[list[str]] = [[] for _ in range(num_streams)]
    version = 1
    for _ in range(10_000):
        active = [stream for stream in range(num_streams) if ends[stream] is None]
        if not active:
            break
        # A stream acts if it has not asked yet, or has its answer.
        able = [s for s in active if not asked[s] or asked[s][0]]
        free = [s for s in able if asked[s]] + [s for s in active if not asked[s]]
        stream = rng.choice(free or active)
        if not asked[stream]:
            asked[stream] = [""]
            answered = asked[stream]

            def answer(answered: list[str] = answered) -> None:
                answered[0] = "x"

            if pacing.when_within(stream, Pace(done[stream] + 1, done[stream], bound), answer):
                answer()
        elif asked[stream][0]:
            done[stream] += 1
            pacing.record(stream, done[stream])
            asked[stream] = []
            if done[stream] == num_steps or rng.random() < 0.005:
                ends[stream] = done[stream] + 1
                version += 1
                group(pacing, version, *ends)
        active_done = [done[s] for s in range(num_streams) if ends[s] is None]
        if active_done:
            assert max(active_done) - min(active_done) <= bound
    assert None not in ends, f"stuck at {done}"
    assert 1 <= max(pacing.ahead) <= bound


@pytest.mark.parametrize("body", [{"step": 1}, {"step": 1, "done": 1, "bound": 1}, 3])
def test_an_incomplete_pace_is_refused(body: object) -> None:
    with pytest.raises(BadRequest):
        Pace.from_wire(body)
