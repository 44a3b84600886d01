"""The search for the cheapest placement at one rate, of groups that are independent.

If a group's workers depend on its own stages only, the best placement of the stages from i on is
the best first group and the best placement of the rest: O(stages^2 * types). Two groups of one type
side by side are never better than one, so nothing has to forbid them.

Two things break this: limits on the workers of a type, which its groups share, and what the first
group passes on between the others. If the best placement exceeds a limit, or has no room for what
is passed on, partial_search.py finds the best one, which costs at least as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from trireme.place.choice import StageChain
from trireme.place.type_loads import TypeLoads


class PlacementKey(NamedTuple):
    """What makes one placement better than another: the smaller one is."""

    cost: int
    workers: int
    groups: int
    names: tuple[str, ...]  # of the type of each stage


Cut = tuple[int, int, int, int]  # of a group: begin, end, number of its type, workers
_Rest = tuple[PlacementKey, tuple[Cut, ...]]


def load_of_first(loads: Sequence[TypeLoads], cuts: Sequence[Cut]) -> int:
    """What the first group takes, with what it passes on between the others."""
    (begin, end, number, _), *others = cuts
    own = loads[number].of_groups(begin, end)[0]
    return own + sum(loads[number].relayed(cut[0]) for cut in others[1:])


class GroupSearch:
    """The search for one rate, or with `exceeds` for any higher one. loads, prices: of each type of
    the chain, the prices as whole numbers.
    """

    def __init__(
        self,
        chain: StageChain,
        loads: Sequence[TypeLoads],
        prices: Sequence[int],
        rate: Fraction,
        *,
        exceeds: bool,
    ) -> None:
        self.loads, self.prices = loads, prices
        self.names = [kind.name for kind in chain.types]
        self.limits = [kind.limit for kind in chain.types]
        self.rate, self._exceeds = rate, exceeds
        self.num_stages, self._num_first = len(chain.stages), chain.num_first
        self.readers = [i for i, kind in enumerate(chain.types) if kind.reads]
        self.cuts = [self._cuts(begin) for begin in range(self.num_stages)]
        nothing: _Rest = (PlacementKey(0, 0, 0, ()), ())
        self.rests = [nothing] * (self.num_stages + 1)  # the best from each stage on
        for begin in range(self.num_stages - 1, -1, -1):
            self.rests[begin] = self._best_from(begin)

    def best(self) -> tuple[Cut, ...] | None:
        """The best placement, if the groups of it are independent; else None."""
        _, cuts = self.rests[0]
        return cuts if self._is_within_limits(cuts) and self._has_room(cuts) else None

    def _has_room(self, cuts: Sequence[Cut]) -> bool:
        """Whether the first group passes on what crosses between the others without one worker
        more.
        """
        _, _, number, workers = cuts[0]
        return self.workers(number, load_of_first(self.loads, cuts)) == workers

    def _best_from(self, begin: int) -> _Rest:
        best: tuple[Cut, ...] = ()
        least: tuple[int, int, int] | None = None
        for cut in self.cuts[begin]:
            _, end, number, workers = cut
            rest = self.rests[end][0]
            cost = workers * self.prices[number] + rest.cost
            if least is not None and cost > least[0]:
                continue
            total = (cost, workers + rest.workers, 1 + rest.groups)
            if least is None or total < least:
                best, least = (cut,), total
            elif total == least and self._names_from(cut) < self._names_from(best[0]):
                best = (cut,)
        assert least is not None
        (first,) = best
        return PlacementKey(*least, self._names_from(first)), (first, *self.rests[first[1]][1])

    def _cuts(self, begin: int) -> list[Cut]:
        """The groups that begin at a stage, with the workers that the rate takes."""
        over, cuts = self.rate.numerator, list[Cut]()
        numbers = self.readers if begin == 0 else range(len(self.loads))
        first_end = self._num_first if begin == 0 else begin + 1
        for number in numbers:
            loads, unit = self.loads[number].of_groups(begin, first_end), self.unit(number)
            for end, load in enumerate(loads, first_end):
                workers = load * over // unit + 1 if self._exceeds else -(-load * over // unit)
                cuts.append((begin, end, number, workers or 1))
        return cuts

    def workers(self, number: int, load: int) -> int:
        """That a load takes on this type."""
        over, unit = load * self.rate.numerator, self.unit(number)
        return (over // unit + 1 if self._exceeds else -(-over // unit)) or 1

    def unit(self, number: int) -> int:
        """Units of load that a worker of this type has, for each unit of the rate's numerator."""
        return self.loads[number].per_second * self.rate.denominator

    def _names_from(self, cut: Cut) -> tuple[str, ...]:
        begin, end, number, _ = cut
        return (self.names[number],) * (end - begin) + self.rests[end][0].names

    def _is_within_limits(self, cuts: Sequence[Cut]) -> bool:
        used = (0,) * len(self.limits)
        for _, _, number, workers in cuts:
            used = self.with_workers(used, number, workers)
        return self.fits(used)

    def with_workers(self, used: tuple[int, ...], number: int, workers: int) -> tuple[int, ...]:
        """Workers of each limited type, 0 of the others, with those of one more group."""
        if self.limits[number] is None:
            return used
        return (*used[:number], used[number] + workers, *used[number + 1 :])

    def fits(self, used: Sequence[int]) -> bool:
        limits = zip(used, self.limits, strict=True)
        return all(limit is None or num <= limit for num, limit in limits)
