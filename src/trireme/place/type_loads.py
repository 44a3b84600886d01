"""What groups of stages take of a worker's time, as whole numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from trireme.place.choice import StageChain, exact
from trireme.place.machine_types import MachineType


class TypeLoads:
    """The time of groups on one type, in whole units of 1 / `per_second` seconds."""

    def __init__(self, chain: StageChain, kind: MachineType) -> None:
        wire = 1 / exact(kind.network)
        moved = wire + exact(chain.seconds_per_byte.get(kind.name, 0.0))
        seconds = [exact(value) for value in chain.seconds[kind.name]]
        before = [exact(value) * moved for value in chain.bytes_before]
        before[0] = exact(chain.bytes_before[0]) * wire  # "pull" and "push" have the rest of it
        sent = [exact(value) * moved for value in chain.bytes_sent_to]
        self.per_second = math.lcm(*(one.denominator for one in (*seconds, *before, *sent)))
        own, self._sent = self._sums(seconds), self._sums(sent)
        self._before = [*(int(value * self.per_second) for value in before), 0]
        ends = range(len(own))
        # What depends on where a group ends, and on where it begins.
        self._first_ends = [own[i] - self._sent[i] + self._before[i] for i in ends]
        self._ends = [own[i] + self._sent[i] + self._before[i] for i in ends]
        self._begins = [self._before[i] - own[i] - self._sent[i] for i in ends]
        self._begins[0] = self._before[0] + self._sent[-1]

    def _sums(self, values: Sequence[Fraction]) -> list[int]:
        """Of the first 0, 1, 2, ... values."""
        return [0, *itertools.accumulate(int(value * self.per_second) for value in values)]

    def of_groups(self, begin: int, end: int) -> list[int]:
        """Units per example of the groups that begin at a stage and end at `end` or later. The
        first group sends what the stages after it need.
        """
        base = self._begins[begin]
        ends = self._first_ends if begin == 0 else self._ends
        return [base + load for load in ends[end:]]

    def relayed(self, begin: int) -> int:
        """Units per example that it takes the first group to pass on, between two groups after it,
        what crosses before the stage `begin`: it receives that and sends it.
        """
        return 2 * self._before[begin]
