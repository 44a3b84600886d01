"""The search for the cheapest placement whose groups depend on each other.

Groups of one type share its limit, and each cut behind the second group adds to the load of the
first one, which passes on what crosses there. The search is best-first. Its bound is the larger one
of two, neither of which is ever above the best: the best rest by itself, and those of
lower_bounds.py. So the first complete placement that it meets is the best. It keeps a partial
placement unless another one that ends at the same stage is as good with any rest. Of the extensions
of a partial placement it makes only those whose turn comes: most never do.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from trireme.errors import ResourceExhausted
from trireme.place.group_search import Cut, GroupSearch, PlacementKey
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


class _Extensions:
    """What a partial placement can be extended to, the most hopeful first. costs: of each, at
    least; infinite: it is not possible. make: the one with this place in `costs`; None: the limits
    forbid it.
    """

    def __init__(self, costs: Floats, make: Callable[[int, float], _Partial | None]) -> None:
        num_possible = int((costs < math.inf).sum())
        order = np.argsort(costs, kind="stable")[:num_possible]
        self._left: Iterator[tuple[int | None, float]] = zip(
            order.tolist(), costs[order].tolist(), strict=True
        )
        self._make = make
        self._advance()

    def _advance(self) -> None:
        self._next, self._cost = next(self._left, (None, math.inf))

    @property
    def bound(self) -> PlacementKey | None:
        """None of those that are left has a smaller key; None: nothing is left."""
        return None if self._next is None else PlacementKey(math.ceil(self._cost), 0, 0, ())

    def pop(self) -> _Partial | None:
        assert self._next is not None
        made = self._make(self._next, self._cost)
        self._advance()
        return made


class PartialSearch:
    """The search with the rate, the types and the limits of a search by groups."""

    def __init__(self, search: GroupSearch) -> None:
        self._search = search
        self._bounds = LowerBounds(search)
        self._rivals = {number: _rivals_of(search, number) for number in search.readers}

    def best(self) -> tuple[Cut, ...] | None:
        """The best placement; None: the limits allow none. Raises ResourceExhausted: there are too
        many partial ones.
        """
        heap: list[tuple[PlacementKey, int, _Partial | _Extensions]] = []
        numbers = itertools.count()  # of two with one bound the older one comes first

        def push(one: _Partial | _Extensions | None) -> None:
            if one is not None and (bound := one.bound) is not None:
                heapq.heappush(heap, (bound, next(numbers), one))

        push(self._first_groups())
        num_kept = 0
        while heap:
            _, _, one = heapq.heappop(heap)
            if isinstance(one, _Extensions):
                push(one.pop())
                push(one)
                continue
            if one.stage == self._search.num_stages:
                return one.cuts
            if self._rivals[one.cuts[0][2]][one.stage].add(one):
                num_kept += 1
                push(self._extensions(one))
            if num_kept + len(heap) > PARTIAL_MAX:
                raise ResourceExhausted(
                    f"place: expected at most {PARTIAL_MAX:,} partial placements of many groups,"
                    f" found more, of {self._search.num_stages} stages; join stages, or give fewer"
                    " types a limit"
                )
        return None

    def _first_groups(self) -> _Extensions:
        """Of nothing: the first groups."""
        search, costs = self._search, list[Floats]()
        for number in search.readers:
            whole = [cut[3] for cut in search.cuts[0] if cut[2] == number]
            loads = search.loads[number].of_groups(0, search.num_stages + 1 - len(whole))
            parts = [self._parts(number, load) for load in loads]
            costs.append(self._bounds.of_first_groups(number, np.array(parts), np.array(whole)))

        def make(i: int, cost: float) -> _Partial | None:
            first = search.cuts[0][i]
            _, end, number, _ = first
            load = search.loads[number].of_groups(0, end)[0]
            nothing = PlacementKey(0, 0, 0, (search.names[number],) * end)
            return self._partial(first, (), nothing, (0,) * len(search.limits), load, cost)

        return _Extensions(np.concatenate(costs), make)

    def _extensions(self, partial: _Partial) -> _Extensions:
        """With one more group."""
        search, (first, *others) = self._search, partial.cuts
        number, begin, load = first[2], partial.stage, partial.load
        if others:
            load += search.loads[number].relayed(begin)
        workers = search.workers(number, load)
        used = [0.0] * len(search.limits)
        for cut in others:
            used[cut[2]] += cut[3]
        costs = self._bounds.of_groups(number, begin, self._parts(number, load), workers, used)
        before = partial.others

        def make(i: int, cost: float) -> _Partial | None:
            cut = search.cuts[begin][i]
            _, end, kind, num = cut
            key = PlacementKey(
                before.cost + num * search.prices[kind],
                before.workers + num,
                before.groups + 1,
                before.names + (search.names[kind],) * (end - begin),
            )
            now_used = search.with_workers(partial.used, kind, num)
            now_first = (*first[:3], workers)
            return self._partial(now_first, (*others, cut), key, now_used, load, cost)

        return _Extensions(costs, make)

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
    ) -> _Partial | None:
        """None: the limits forbid it. cost: that it has at least, to the end."""
        _, _, number, workers = first
        if not self._search.fits(self._search.with_workers(used, number, workers)):
            return None
        end = others[-1][1] if others else first[1]
        rest = self._search.rests[end][0]
        alone = PlacementKey(
            workers * self._search.prices[number] + key.cost + rest.cost,
            workers + key.workers + rest.workers,
            1 + key.groups + rest.groups,
            key.names + rest.names,
        )
        bound = max(alone, PlacementKey(math.ceil(cost), 0, 0, ()))
        return _Partial(bound, end, key, used, load, (first, *others))


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
