"""The search for the cheapest placement whose first group passes on what crosses between others.

Each cut behind the second group adds to the load of the first one, so that groups are not
independent. The search is best-first. Its bound is the larger one of two, neither of which is ever
above the best: the best rest by itself, and the least sum of what the rest costs and of the parts
of a worker that its cuts cost the first group. So the first complete placement that it meets is the
best. It keeps a partial placement unless another one that ends at the same stage, with a first
group of the same type, is as good in all that matters to the rest: the load of the first group, and
the key and the workers of limited types of the groups after it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import NamedTuple

from trireme.errors import ResourceExhausted
from trireme.place.group_search import PARTIAL_MAX, Cut, GroupSearch, PlacementKey


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


class RelaySearch:
    """The search with the rate, the types and the limits of a search by groups."""

    def __init__(self, search: GroupSearch) -> None:
        self._search = search
        self._with_relayed: dict[int, list[int]] = {}

    def best(self) -> tuple[Cut, ...] | None:
        """The best placement; None: the limits allow none. Raises ResourceExhausted: there are too
        many partial ones.
        """
        kept: dict[tuple[int, int, bool], list[_Partial]] = defaultdict(list)
        heap = [one for cut in self._search.cuts(0) if (one := self._begin(cut)) is not None]
        heapq.heapify(heap)
        while heap:
            partial = heapq.heappop(heap)
            if partial.stage == self._search.num_stages:
                return partial.cuts
            rivals = kept[partial.stage, partial.cuts[0][2], len(partial.cuts) == 1]
            if any(_is_as_good(rival, partial) for rival in rivals):
                continue
            rivals.append(partial)
            for cut in self._search.cuts(partial.stage):
                longer = self._extend(partial, cut)
                if longer is not None:
                    heapq.heappush(heap, longer)
            if len(heap) > PARTIAL_MAX:
                raise ResourceExhausted(
                    f"place: expected at most {PARTIAL_MAX:,} partial placements of many groups,"
                    f" found more, of {self._search.num_stages} stages; join stages, or give fewer"
                    " types a limit"
                )
        return None

    def _begin(self, first: Cut) -> _Partial | None:
        """With a first group; None: its type has fewer workers."""
        _, end, number, _ = first
        nothing = PlacementKey(0, 0, 0, (self._search.names[number],) * end)
        load = self._search.loads[number].of_groups(0, end)[0]
        return self._partial(first, (), nothing, (0,) * len(self._search.limits), load)

    def _extend(self, partial: _Partial, cut: Cut) -> _Partial | None:
        """With one more group; None: the limits forbid it."""
        first, *others = partial.cuts
        begin, end, number, workers = cut
        load = partial.load
        if others:
            load += self._search.loads[first[2]].relayed(begin)
        before = partial.others
        key = PlacementKey(
            before.cost + workers * self._search.prices[number],
            before.workers + workers,
            before.groups + 1,
            before.names + (self._search.names[number],) * (end - begin),
        )
        used = self._search.with_workers(partial.used, number, workers)
        return self._partial(first, (*others, cut), key, used, load)

    def _partial(
        self,
        first: Cut,
        others: tuple[Cut, ...],
        key: PlacementKey,
        used: tuple[int, ...],
        load: int,
    ) -> _Partial | None:
        number, workers = first[2], self._search.workers(first[2], load)
        if not self._search.fits(self._search.with_workers(used, number, workers)):
            return None
        cuts = ((*first[:3], workers), *others)
        end = cuts[-1][1]
        rest = self._search.rests[end][0]
        alone = PlacementKey(
            workers * self._search.prices[number] + key.cost + rest.cost,
            workers + key.workers + rest.workers,
            1 + key.groups + rest.groups,
            key.names + rest.names,
        )
        cost = key.cost + self._cost_with_relayed(number, load, end, has_others=bool(others))
        bound = max(alone, PlacementKey(cost, 0, 0, ()))
        return _Partial(bound, end, key, used, load, cuts)

    def _cost_with_relayed(self, number: int, load: int, begin: int, *, has_others: bool) -> int:
        """At most what the first group, of this type, and the groups from `begin` on cost."""
        rest = self._least_with_relayed(number)[begin]
        if (
            not has_others and begin < self._search.num_stages
        ):  # the second group's boundary is its own
            rest -= self._relayed_cost(number, begin)
        own = self._search.prices[number] * load * self._search.rate.numerator
        return -(-(own + rest) // self._search.unit(number))

    def _least_with_relayed(self, number: int) -> list[int]:
        """For each stage: the least cost of the groups from there on, and of the part of a worker
        of the first group, of this type, that passes on what crosses before each of them. In units
        of the price times `unit(number)`.
        """
        if number not in self._with_relayed:
            unit, least = self._search.unit(number), [0] * (self._search.num_stages + 1)
            for begin in range(self._search.num_stages - 1, 0, -1):
                least[begin] = self._relayed_cost(number, begin) + min(
                    workers * self._search.prices[other] * unit + least[end]
                    for _, end, other, workers in self._search.cuts(begin)
                )
            self._with_relayed[number] = least
        return self._with_relayed[number]

    def _relayed_cost(self, number: int, begin: int) -> int:
        relayed = self._search.loads[number].relayed(begin)
        return self._search.prices[number] * relayed * self._search.rate.numerator


def _is_as_good(one: _Partial, other: _Partial) -> bool:
    """Whether `one` is, with any rest."""
    is_as_free = all(map(int.__le__, one.used, other.used))
    return is_as_free and one.load <= other.load and one.others <= other.others
