"""Random pulls and pushes of mode bounded against the definition of its bound."""

from __future__ import annotations

from functools import partial
from random import Random

from tests.long import pick
from tests.seeds import SEED
from trireme.protocol.membership import Member, Pace
from trireme.server.pacing import Pacing


class Model:
    """Each pull waits until no other stream that has not left is behind step - bound."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.applied: dict[int, int] = {}
        self.waiting: set[tuple[int, int, int]] = set()  # stream, step, bound
        self.released: list[tuple[int, int, int]] = []

    def others(self, stream: int) -> list[int]:
        return [
            max(self.applied.get(other, 0), member.first - 1)
            for other, member in self.members.items()
            if other != stream and member.end is None
        ]

    def is_free(self, pull: tuple[int, int, int]) -> bool:
        stream, step, bound = pull
        return min(self.others(stream), default=step) >= step - bound

    def release(self) -> None:
        free = {pull for pull in self.waiting if self.is_free(pull)}
        self.waiting -= free
        self.released += free


def test_pulls_wait_as_the_bound_says() -> None:
    for number in range(pick(short=40, long=1000)):
        random = Random(f"{SEED} {number}")
        print(f"seed {SEED}: round {number}")
        pacing, model = Pacing(), Model()
        released: list[tuple[int, int, int]] = []
        ahead = dict[int, int]()
        num_streams, version = random.randint(1, 6), 0
        for _ in range(120):
            stream = random.randrange(num_streams)
            match random.choice(["members", *["push"] * 5, *["pull"] * 5]):
                case "members":
                    version += 1
                    ends = [None, None, None, random.randint(1, 20)]
                    model.members = {
                        s: Member(random.randint(1, 3), random.choice(ends))
                        for s in range(num_streams)
                        if random.random() < 0.8
                    }
                    pacing.set_members(version, model.members)
                case "push":
                    step = model.applied.get(stream, 0) + random.randint(0, 2)
                    if stream in model.members:
                        lead = max(0, step - min(model.others(stream), default=step))
                        ahead[lead] = ahead.get(lead, 0) + 1
                    model.applied[stream] = max(model.applied.get(stream, 0), step)
                    pacing.record(stream, step)
                case "pull" if stream in model.members:
                    done = max(0, model.applied.get(stream, 0) + random.randint(-2, 1))
                    pull = (stream, done + random.randint(1, 3), random.randint(1, 3))
                    if any(other[:2] == pull[:2] for other in model.waiting):
                        continue
                    model.applied[stream] = max(model.applied.get(stream, 0), done)
                    model.release()
                    is_free = model.is_free(pull)
                    pace = Pace(step=pull[1], done=done, bound=pull[2])
                    waiter = partial(released.append, pull)
                    assert pacing.when_within(stream, pace, waiter) == is_free
                    if not is_free:
                        model.waiting.add(pull)
            model.release()
            assert sorted(released) == sorted(model.released)
            assert dict(pacing.ahead) == ahead
