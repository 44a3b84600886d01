"""The search for the cheapest placement whose groups depend on each other.

Groups of one type share its limit, and each cut behind the second group adds to the load of the
first one, which passes on what crosses there. The search is best-first. Its bound is the larger one
of two, neither of which is ever above the best: the best rest by itself, and those of
lower_bounds.py. So the first complete placement that it meets is the best. It keeps a partial
placement unless its bound is above a placement that is known, or another one that ends at the same
stage is as good with any rest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trireme.errors import ResourceExhausted
from trireme.place.group_search import Cut, GroupSearch, PlacementKey, load_of_first
from trireme.place.lower_bounds import Floats, LowerBounds

PARTIAL_MAX = 200_000
"""Partial placements that a search may keep."""
_ROUNDED = 1 + 1e-12  # more than a float differs from the whole number that it was made of


class _Partial(NamedTuple):
    """A placement of the first stages.

    bound: no placement that begins so has a smaller key. stage: the first that is not placed.
    others: the key of the groups after the first, but with the names of all. used: their workers of
    each limited type. load: of the first group, in units of its type.
    """

    bound: PlacementKey
    stage: int
    others: PlacementKey
    used: tuple[int, ...]
    load: int
    cuts: tuple[Cut, ...]


class PartialSearch:
    """The search with the rate, the types and the limits of a search by groups."""

    def __init__(self, search: GroupSearch) -> None:
        self._search = search
        self._bounds = LowerBounds(search)
        self._rivals = {number: _rivals_of(search, number) for number in search.readers}
        costs = [
            cost for cuts in self._bounds.candidates if (cost := self._cost_of(cuts)) is not None
        ]
        self._cost_max = min(costs, default=math.inf)

    def best(self) -> tuple[Cut, ...] | None:
        """The best placement; None: the limits allow none. Raises ResourceExhausted: there are too
        many partial ones.
        """
        heap = [one for cut in self._search.cuts[0] for one in self._begin(cut)]
        heapq.heapify(heap)
        num_tried = 0
        while heap:
            partial = heapq.heappop(heap)
            if partial.stage == self._search.num_stages:
                return partial.cuts
            num_tried += 1
            if self._search.has_limits and num_tried.bit_count() == 1:
                self._complete(partial)
            if self._rivals[partial.cuts[0][2]][partial.stage].add(partial):
                for longer in self._extensions(partial):
                    heapq.heappush(heap, longer)
            if num_tried + len(heap) > PARTIAL_MAX:
                raise ResourceExhausted(
                    f"place: expected at most {PARTIAL_MAX:,} partial placements of many groups,"
                    f" found more, of {self._search.num_stages} stages; join stages, or give fewer"
                    " types a limit"
                )
        return None

    def _complete(self, partial: _Partial) -> None:
        """Go on with the most hopeful extension of each: its cost, if it comes to the end, is one
        that the best does not exceed.
        """
        longer: _Partial | None = partial
        while longer is not None and longer.stage < self._search.num_stages:
            longer = min(self._extensions(longer), default=None)
        if longer is not None:
            self._cost_max = min(self._cost_max, longer.bound.cost)

    def _cost_of(self, cuts: Sequence[Cut]) -> float | None:
        """With what the first group passes on; None: the limits forbid it."""
        search, used = self._search, (0,) * len(self._search.limits)
        number = cuts[0][2]
        workers = search.workers(number, load_of_first(search.loads, cuts))
        all_workers = [(number, workers), *((cut[2], cut[3]) for cut in cuts[1:])]
        for number, workers in all_workers:
            used = search.with_workers(used, number, workers)
        if not search.fits(used):
            return None
        return sum(workers * search.prices[number] for number, workers in all_workers)

    def _begin(self, first: Cut) -> Iterator[_Partial]:
        """With a first group, if there can be a best placement."""
        _, end, number, workers = first
        load = self._search.loads[number].of_groups(0, end)[0]
        cost = self._bounds.of_first(number, end, (self._parts(number, load), workers))
        if self._is_hopeful(np.array(cost)):
            nothing = PlacementKey(0, 0, 0, (self._search.names[number],) * end)
            used = (0,) * len(self._search.limits)
            yield from self._partial(first, (), nothing, used, load, cost)

    def _extensions(self, partial: _Partial) -> Iterator[_Partial]:
        """With one more group, where there can be a best placement."""
        search, (first, *others) = self._search, partial.cuts
        number, begin, load = first[2], partial.stage, partial.load
        if others:
            load += search.loads[number].relayed(begin)
        workers = search.workers(number, load)
        used = [0.0] * len(search.limits)
        for cut in others:
            used[cut[2]] += cut[3]
        costs = self._bounds.of_groups(number, begin, (self._parts(number, load), workers), used)
        before = partial.others
        for i in np.flatnonzero(self._is_hopeful(costs)):
            cut = search.cuts[begin][i]
            _, end, kind, num = cut
            key = PlacementKey(
                before.cost + num * search.prices[kind],
                before.workers + num,
                before.groups + 1,
                before.names + (search.names[kind],) * (end - begin),
            )
            now_used = search.with_workers(partial.used, kind, num)
            first = (*first[:3], workers)
            yield from self._partial(first, (*others, cut), key, now_used, load, float(costs[i]))

    def _is_hopeful(self, cost: Floats) -> NDArray[np.bool_]:
        return (cost < math.inf) & (cost <= self._cost_max * _ROUNDED)

    def _parts(self, number: int, load: int) -> float:
        """Workers that a load takes, not rounded up."""
        return load * self._search.rate.numerator / self._search.unit(number)

    def _partial(
        self,
        first: Cut,
        others: tuple[Cut, ...],
        key: PlacementKey,
        used: tuple[int, ...],
        load: int,
        cost: float,
    ) -> Iterator[_Partial]:
        """Nothing: the limits forbid it. cost: that it has at least, to the end."""
        _, _, number, workers = first
        if not self._search.fits(self._search.with_workers(used, number, workers)):
            return
        end = others[-1][1] if others else first[1]
        rest = self._search.rests[end][0]
        alone = PlacementKey(
            workers * self._search.prices[number] + key.cost + rest.cost,
            workers + key.workers + rest.workers,
            1 + key.groups + rest.groups,
            key.names + rest.names,
        )
        bound = max(alone, PlacementKey(math.ceil(cost), 0, 0, ()))
        yield _Partial(bound, end, key, used, load, (first, *others))


class _Rivals:
    """Partial placements that end at one stage, whose first groups have one type.

    relayed_max: what the first group may still have to pass on, if each stage were a group.
    """

    def __init__(self, search: GroupSearch, number: int, relayed_max: int) -> None:
        self._search, self._number, self._relayed_max = search, number, relayed_max
        self._all: list[_Partial] = []
        self._floats: Floats = np.empty((16, 2 + len(search.limits)))
        self._most: list[tuple[PlacementKey, tuple[int, ...]]] = []
        self._most_floats: Floats = np.empty((16, 1 + len(search.limits)))

    def add(self, partial: _Partial) -> bool:
        """Keep it, unless another is as good; whether it is kept."""
        num = len(self._all)
        values = np.array([partial.others.cost, partial.load, *partial.used], np.float64)
        for i in np.flatnonzero((self._floats[:num] <= values * _ROUNDED).all(axis=1)):
            if self._is_as_good(self._all[i], partial):
                return False
        least_key, least_used = self._total(partial, partial.load)
        least = np.array([least_key.cost, *least_used], np.float64)
        for i in np.flatnonzero((self._most_floats[:num] <= least * _ROUNDED).all(axis=1)):
            key, used = self._most[i]
            if key <= least_key and all(map(int.__le__, used, least_used)):
                return False
        if num == len(self._floats):
            self._floats = np.concatenate([self._floats, np.empty_like(self._floats)])
            self._most_floats = np.concatenate(
                [self._most_floats, np.empty_like(self._most_floats)]
            )
        key, used = self._total(partial, partial.load + self._relayed_max)
        self._floats[num], self._most_floats[num] = values, [key.cost, *used]
        self._all.append(partial)
        self._most.append((key, used))
        return True

    def _is_as_good(self, one: _Partial, other: _Partial) -> bool:
        """Whether `one` is, with any rest."""
        # Behind a first group alone the next one's boundary is its own, and nothing is passed on.
        if len(one.cuts) > 1 and len(other.cuts) == 1 and self._relayed_max:
            return False
        is_as_free = all(map(int.__le__, one.used, other.used))
        return is_as_free and one.load <= other.load and one.others <= other.others

    def _total(self, partial: _Partial, load: int) -> tuple[PlacementKey, tuple[int, ...]]:
        """The key and the workers of limited types with a first group of this load."""
        workers = self._search.workers(self._number, load)
        key = PlacementKey(
            partial.others.cost + workers * self._search.prices[self._number],
            partial.others.workers + workers,
            partial.others.groups,
            partial.others.names,
        )
        return key, self._search.with_workers(partial.used, self._number, workers)


def _rivals_of(search: GroupSearch, number: int) -> list[_Rivals]:
    """Of each stage, with a first group of this type."""
    relayed = [search.loads[number].relayed(begin) for begin in range(search.num_stages)]
    sums = itertools.accumulate(reversed(relayed))
    return [_Rivals(search, number, relayed_max) for relayed_max in sums][::-1]
