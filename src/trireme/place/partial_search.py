"""The search for the cheapest placement whose groups depend on each other.

Groups of one type share its limit, and each cut behind the second group adds to the load of the
first one, which passes on what crosses there. The search is best-first. Its bound is the best rest
by itself, which is never above the best one within the limits. So the first complete placement that
it reaches is the best. It drops a partial placement if another one that ends at the same stage is
as good with any rest.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from trireme.errors import ResourceExhausted
from trireme.place.group_search import Cut, GroupSearch, PlacementKey

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

    def best(self) -> tuple[Cut, ...] | None:
        """The best placement; None: the limits allow none. Raises ResourceExhausted: there are too
        many partial ones.
        """
        heap: list[tuple[PlacementKey, int, _Partial]] = []
        numbers = itertools.count()  # of two with one bound the older one comes first
        rivals = dict[tuple[int, int, bool], _Rivals]()
        num_kept = 0
        extensions = self._first_groups()
        while True:
            for partial in extensions:
                if partial is not None:
                    heapq.heappush(heap, (partial.bound, next(numbers), partial))
            if num_kept + len(heap) > PARTIAL_MAX:
                raise ResourceExhausted(
                    f"place: expected at most {PARTIAL_MAX:,} partial placements of many groups,"
                    f" found more, of {self._search.num_stages} stages; join stages, or give fewer"
                    " types a limit"
                )
            if not heap:
                return None
            _, _, one = heapq.heappop(heap)
            if one.stage == self._search.num_stages:
                return one.cuts
            # Behind a first group alone the next one's boundary is its own: nothing is passed on.
            kind = (one.cuts[0][2], one.stage, len(one.cuts) > 1)
            is_kept = rivals.setdefault(kind, _Rivals(len(one.used))).add(one)
            num_kept += is_kept
            extensions = self._extensions(one) if is_kept else iter(())

    def _first_groups(self) -> Iterator[_Partial | None]:
        search = self._search
        for first in search.cuts[0]:
            _, end, number, _ = first
            load = search.loads[number].of_groups(0, end)[0]
            nothing = PlacementKey(0, 0, 0, (search.names[number],) * end)
            yield self._partial(first, (), nothing, (0,) * len(search.limits), load)

    def _extensions(self, partial: _Partial) -> Iterator[_Partial | None]:
        """With one more group."""
        search, before, (first, *others) = self._search, partial.others, partial.cuts
        number, begin, load = first[2], partial.stage, partial.load
        if others:
            load += search.loads[number].relayed(begin)
        first = (*first[:3], search.workers(number, load))
        for cut in search.cuts[begin]:
            _, end, kind, num = cut
            key = PlacementKey(
                before.cost + num * search.prices[kind],
                before.workers + num,
                before.groups + 1,
                before.names + (search.names[kind],) * (end - begin),
            )
            used = search.with_workers(partial.used, kind, num)
            yield self._partial(first, (*others, cut), key, used, load)

    def _partial(
        self,
        first: Cut,
        others: tuple[Cut, ...],
        key: PlacementKey,
        used: tuple[int, ...],
        load: int,
    ) -> _Partial | None:
        """None: the limits forbid it."""
        _, _, number, workers = first
        if not self._search.fits(self._search.with_workers(used, number, workers)):
            return None
        end = others[-1][1] if others else first[1]
        rest = self._search.rests[end][0]
        bound = PlacementKey(
            workers * self._search.prices[number] + key.cost + rest.cost,
            workers + key.workers + rest.workers,
            1 + key.groups + rest.groups,
            key.names + rest.names,
        )
        return _Partial(bound, end, key, used, load, (first, *others))


class _Rivals:
    """Partial placements that end at one stage, whose first groups have one type."""

    def __init__(self, num_types: int) -> None:
        self._all: list[_Partial] = []
        self._floats = np.empty((16, 2 + num_types))

    def add(self, partial: _Partial) -> bool:
        """Keep it, unless another is as good with any rest; whether it is kept."""
        num = len(self._all)
        values = np.array([partial.others.cost, partial.load, *partial.used], np.float64)
        for i in np.flatnonzero((self._floats[:num] <= values * _ROUNDED).all(axis=1)):
            one = self._all[i]
            is_as_free = all(map(int.__le__, one.used, partial.used))
            if is_as_free and one.load <= partial.load and one.others <= partial.others:
                return False
        if num == len(self._floats):
            self._floats = np.concatenate([self._floats, np.empty_like(self._floats)])
        self._floats[num] = values
        self._all.append(partial)
        return True
