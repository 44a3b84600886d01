"""Random pushes, saves and loads of dense blocks agree with a dict, and marks that were handed out
never change.
"""

from __future__ import annotations

import random

import numpy as np

from tests.seeds import SEED, named_in_failure
from trireme.protocol.block_spec import cut
from trireme.server.block_slice import BlockSlice
from trireme.server.block_store import BlockStore

NUM_HISTORIES, NUM_STEPS, NUM_STREAMS = 150, 60, 4
BLOCK = 4
GROUP = {"lr": 1.0}


class Model:
    """A store of blocks whose weights count the pushes, beside what it should hold."""

    def __init__(self, number: int) -> None:
        self.random = random.Random(f"{SEED} {number}")
        specs = cut("p", 6 * BLOCK, 0, BLOCK)
        self.ids = [spec.id for spec in specs]
        self.sequences = dict.fromkeys(range(NUM_STREAMS), 0) | {1: 1}
        self.marks = {block_id: {1: 1} for block_id in self.ids}
        self.counts = dict.fromkeys(self.ids, 0)
        self.kept: list[tuple[str, list[BlockSlice], dict[int, int], int]] = []
        self.store = BlockStore()
        self.store.create("SGD", [GROUP], specs, np.zeros(6 * BLOCK, np.float32), {1: 1})

    def step(self) -> None:
        acts = [self.push, self.push, self.advance, self.keep, self.restore, self.forget]
        self.random.choice(acts)()

    def new_ids(self) -> list[tuple[int, int]]:
        """Of one push or several, some of which have been applied before."""
        ids = []
        for stream in self.random.sample(range(NUM_STREAMS), self.random.choice([1, 1, 2])):
            self.sequences[stream] += self.random.choice([0, 1, 1])
            ids.append((stream, max(1, self.sequences[stream])))
        return ids

    def push(self) -> None:
        ids, share = self.new_ids(), self.random.choice([0.3, 0.8, 1])
        some = [block_id for block_id in self.ids if self.random.random() < share]
        if self.random.random() < 0.5:
            self.store.apply([GROUP], some, np.full(BLOCK * len(some), -1, np.float32), ids)
        else:
            self.store.add(some, np.ones(BLOCK * len(some), np.float32), ids)
        for block_id in some:
            if all(self.marks[block_id].get(stream, 0) < number for stream, number in ids):
                self.counts[block_id] += 1
                self.raise_marks(block_id, ids)

    def advance(self) -> None:
        ids = self.new_ids()
        self.store.advance(ids)
        for block_id in self.ids:
            self.raise_marks(block_id, ids)

    def raise_marks(self, block_id: str, ids: list[tuple[int, int]]) -> None:
        marks = self.marks[block_id]
        self.marks[block_id] = marks | {s: max(number, marks.get(s, 0)) for s, number in ids}

    def keep(self) -> None:
        block_id = self.random.choice(self.ids)
        slices = self.store.slices_of(block_id)
        self.kept.append((block_id, slices, self.marks[block_id], self.counts[block_id]))

    def restore(self) -> None:
        if self.kept:
            block_id, slices, marks, count = self.random.choice(self.kept)
            self.store.restore(block_id, slices)
            self.marks[block_id], self.counts[block_id] = marks, count

    def forget(self) -> None:
        if self.random.random() < 0.2:
            self.store.forget_marks()
            self.marks = {block_id: {} for block_id in self.ids}

    def check(self) -> None:
        for stream in range(NUM_STREAMS):
            newest = max(marks.get(stream, 0) for marks in self.marks.values())
            assert self.store.newest_mark(stream) == newest
        assert {block_id: self.store.marks_of(block_id) for block_id in self.ids} == self.marks
        counts = np.repeat([self.counts[block_id] for block_id in self.ids], BLOCK)
        np.testing.assert_array_equal(self.store.read(self.ids), counts)
        for _, slices, marks, _ in self.kept:
            assert [block_slice.marks for block_slice in slices] == [marks]


def test_marks_of_blocks_agree_with_a_dict() -> None:
    number = 0
    with named_in_failure(lambda: f"history {number}"):
        for number in range(NUM_HISTORIES):
            model = Model(number)
            for _ in range(NUM_STEPS):
                model.step()
                if model.random.random() < 0.1:
                    model.check()
            model.check()
