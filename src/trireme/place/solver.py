"""The cheapest placement that reaches a throughput, and the next ones.

A job is a chain of stages; the first one reads. It is cut into groups of consecutive stages. A
group is computed by workers of one type, which do nothing else. The first group is the workers that
read, and its workers also send what the other groups need.

    seconds of a group per example = those of its stages on the type, and of moving its bytes; of
                                     the first group, also of passing on the bytes between others
    workers of a group             = ceil(throughput * seconds)
    cost                           = workers * price, summed over the groups

A byte takes its time on the network, and a worker's to send or receive it.

All is computed with whole numbers and fractions of the decimals as written: equal costs are equal,
and a placement never needs one worker more because of rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from trireme.place.choice import Choice, Group, StageChain, exact
from trireme.place.group_search import Cut, GroupSearch, load_of_first
from trireme.place.partial_search import PartialSearch
from trireme.place.type_loads import TypeLoads

_HALVINGS = 20
"""Beside one for each bit of the number of workers: then hardly a placement is left between."""
_SLOW = Fraction(1, 10**15)  # examples per second, for which one worker in each group is enough


class Solver:
    """Finds placements of a chain. Every method gives equal results for equal arguments."""

    def __init__(self, chain: StageChain) -> None:
        self._chain = chain
        self._types = tuple(chain.types)
        self._loads = [TypeLoads(chain, kind) for kind in self._types]
        prices = [exact(kind.price) for kind in self._types]
        end = len(chain.stages)
        all_in_one = (Fraction(load.of_groups(0, end)[0], load.per_second) for load in self._loads)
        self._longest = max(all_in_one)  # seconds per example of one group
        unit = math.lcm(*(price.denominator for price in prices))
        self._prices = [int(price * unit) for price in prices]

    def cheapest(self, rate: Fraction, *, exceeds: bool = False) -> Choice | None:
        """The choice with the lowest cost, then fewest workers, then fewest groups, then the first
        types by name, that computes `rate` examples per second, or with `exceeds` more than these;
        None: the limits allow none.

        Raises ResourceExhausted: the search became too large.
        """
        search = GroupSearch(self._chain, self._loads, self._prices, rate, exceeds=exceeds)
        cuts = search.best() or PartialSearch(search).best()
        return None if cuts is None else self.choice_of(cuts)

    def fastest(self, rate: Fraction, *, below: Fraction | None = None) -> Choice | None:
        """The fastest choice, slower than `rate`, of a cost less than `below`; None: there is none.

        rate: that no such choice reaches.
        """
        best = self._affordable(_SLOW, below)
        if best is None:
            return None
        low, high = 1 / best.pace, rate
        for _ in range(_HALVINGS + int(rate * self._longest).bit_length()):
            middle = (low + high) / 2
            faster = self._affordable(middle, below)
            if faster is None:
                high = middle
            else:
                best, low = faster, 1 / faster.pace
        while (faster := self._affordable(1 / best.pace, below, exceeds=True)) is not None:
            best = faster
        return best

    def _affordable(
        self, rate: Fraction, below: Fraction | None, *, exceeds: bool = False
    ) -> Choice | None:
        choice = self.cheapest(rate, exceeds=exceeds)
        if choice is None or (below is not None and choice.cost >= below):
            return None
        return choice

    def choice_of(self, cuts: Sequence[Cut]) -> Choice:
        """The placement of these groups, with so many workers."""
        loads = [self._loads[number].of_groups(begin, end)[0] for begin, end, number, _ in cuts]
        loads[0] = load_of_first(self._loads, cuts)
        groups = (
            Group(
                begin,
                end,
                self._types[number],
                workers,
                Fraction(load, self._loads[number].per_second),
            )
            for (begin, end, number, workers), load in zip(cuts, loads, strict=True)
        )
        return Choice(tuple(groups))
