"""A sync step over buckets and blocks of which a checkpoint has left some with some of its pushes:
each gets what it lacks, once.
"""

from __future__ import annotations

from random import Random

import numpy as np

import trireme as tr
from tests.long import pick
from tests.seeds import SEED
from trireme import _core
from trireme.optim import values_of_group
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.membership import Member, PassMembers
from trireme.protocol.routing import NUM_BUCKETS, BucketMap
from trireme.protocol.wire import BlocksPush, Push, TablePush
from trireme.rpc import Request
from trireme.server.state import ServerState

RULE = tr.optim.SGD(lr=1.0)
GROUPS = [{"lr": 1.0}]
NUM_STREAMS, SEQUENCE, NUM_KEYS, NUM_BLOCKS = 4, 7, 300, 6
WEIGHT = 1 / NUM_STREAMS  # of a push in the step: all have as many examples


def request(method: str, body: dict[str, object] | None = None) -> Request:
    return Request(1, method, body or {}, [], "test", "test", "", float("inf"))


class Uneven:
    """A server whose buckets and blocks have seen random ones of the pushes of the next step.

    Stream s pushes 2**s as the gradient of everything, so sums tell which pushes were applied.
    """

    def __init__(self, random: Random, streams: list[int]) -> None:
        self.random, self.streams = random, streams
        self.state = ServerState(_core.Pool(1))
        specs = [BlockSpec("w", 4 * i, 4, 0) for i in range(NUM_BLOCKS)]
        ids = [spec.id for spec in specs]
        self.blocks = ids
        self.state.assignment.adopt("", BucketMap.even(("a:1",)).with_blocks(ids), 0)
        self.version = self.state.assignment.map().version
        self.state.create_table(
            tr.Table("t", dim=1, optimizer=RULE, initializer=tr.initializer.Constant(0.0)).schema
        )
        zeros = np.zeros(4 * NUM_BLOCKS, np.float32)
        create = request("ps.create_blocks", {"map": self.version})
        self.state.create_blocks("SGD", GROUPS, specs, zeros, create)
        self.keys = np.arange(NUM_KEYS, dtype=np.uint64)
        self.marks = np.zeros((NUM_STREAMS, NUM_BUCKETS + NUM_BLOCKS), np.uint64)
        for stream in range(NUM_STREAMS):
            self.state.streams[stream].last = SEQUENCE - 1
            may_be_ahead = stream in streams
            self.marks[stream] = [
                SEQUENCE - 1 + random.choice([0, 0, 1, 2]) * may_be_ahead
                for _ in self.marks[stream]
            ]
            self.state.tables["t"].rows.set_marks(stream, self.marks[stream, :NUM_BUCKETS])
        for number, block_id in enumerate(ids):
            marks = self.marks[:, NUM_BUCKETS + number].tolist()
            [part] = self.state.blocks.slices_of(block_id)
            part = type(part)(part.start, part.tensors, dict(enumerate(marks)))
            self.state.blocks.restore(block_id, [part])

    def push(self, stream: int, sequence: int) -> None:
        gradient = np.full((NUM_KEYS, 1), 2.0**stream, np.float32)
        push = Push(
            stream=stream, sequence=sequence, incarnation=1, step=sequence - SEQUENCE + 1,
            staged=True, computed_at=0, examples=8, position=(sequence,), time=0,
            map_version=self.version,
            tables=[TablePush("t", self.keys, gradient, values_of_group(RULE.group(), 1))],
            blocks=BlocksPush(GROUPS, np.full(4 * NUM_BLOCKS, 2.0**stream, np.float32), []),
        )  # fmt: skip
        body, arrays = push.to_wire()
        asked = Request(1, "ps.push", body, arrays, "test", "test", "", float("inf"))
        self.state.push(push, asked)

    def step(self, sequence: int) -> None:
        for stream in self.random.sample(range(NUM_STREAMS), NUM_STREAMS):
            self.push(stream, sequence)
        with self.state.lock:
            for stream in range(NUM_STREAMS):
                self.state.staging.declare(stream, sequence - SEQUENCE + 1)
        self.state.apply_steps()

    def expected(self, last: int) -> np.ndarray:
        """(buckets and blocks,) their weights, when all pushes up to `last` have been applied."""
        missing = np.maximum(last - self.marks.astype(np.int64), 0)
        sums: np.ndarray = (missing * 2.0 ** np.arange(NUM_STREAMS)[:, None]).sum(0) * -WEIGHT
        return sums


def test_each_bucket_and_block_gets_what_it_lacks() -> None:
    for number in range(pick(short=6, long=100)):
        random = Random(f"{SEED} {number}")
        streams = random.sample(range(NUM_STREAMS), random.randint(0, NUM_STREAMS))
        print(f"seed {SEED}: round {number}, ahead: {streams}")
        served = Uneven(random, streams)
        members = {stream: Member(1, None) for stream in range(NUM_STREAMS)}
        served.state.adopt_members(PassMembers(1, members, True), request("ps.group"))
        for last in range(SEQUENCE, SEQUENCE + 4):
            served.step(last)
            expected = served.expected(last)
            rows, _ = served.state.tables["t"].read(0, served.keys, 0, served.state.pool)
            _core.buckets(served.keys, buckets := np.empty(NUM_KEYS, np.uint16))
            assert rows[:, 0].tolist() == expected[buckets].tolist()
            blocks = served.state.blocks.read(served.blocks).reshape(NUM_BLOCKS, 4)
            assert (blocks == expected[NUM_BUCKETS:, None]).all()
            for stream in range(NUM_STREAMS):
                actual = served.state.tables["t"].rows.marks(stream)
                assert (actual == np.maximum(served.marks[stream, :NUM_BUCKETS], last)).all()
