"""The search for the cheapest placement at one rate.

If a group's workers depend on its own stages only, the best placement of the stages from i on is
the best first group and the best placement of the rest: O(stages^2 * types). Two groups of one type
side by side are never better than one, so nothing has to forbid them.

Limits on the workers of a type break this, because groups of one type share the limit. If the best
placement exceeds one, a best-first search takes over. Its bound, the best rest without limits, is
never above the best rest within them, so the first complete placement that it meets is the best. It
keeps a partial placement unless another one that ends at the same stage is at most as dear and uses
at most as many workers of every limited type.

What the first group passes on between the others breaks it too. If the best placement without that
has no room for it, relay_search.py finds the best one with it, which costs at least as much.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from trireme.errors import ResourceExhausted
from trireme.place.choice import StageChain
from trireme.place.type_loads import TypeLoads

PARTIAL_MAX = 200_000
"""Partial placements that a search within limits may keep."""


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
        self._readers = [i for i, kind in enumerate(chain.types) if kind.reads]
        nothing: _Rest = (PlacementKey(0, 0, 0, ()), ())
        self.rests = [nothing] * (self.num_stages + 1)  # the best from each stage on
        for begin in range(self.num_stages - 1, 0, -1):
            self.rests[begin] = self._best_from(begin)

    def best(self) -> tuple[Cut, ...] | None:
        """The best placement if the first group passed nothing on; None: the limits allow none.
        Raises ResourceExhausted: there are too many partial ones.
        """
        _, cuts = self._best_from(0)
        return cuts if self._is_within_limits(cuts) else self._best_within_limits()

    def has_room(self, cuts: Sequence[Cut]) -> bool:
        """Whether the first group passes on what crosses between the others without one worker
        more.
        """
        _, _, number, workers = cuts[0]
        return self.workers(number, load_of_first(self.loads, cuts)) == workers

    # ---- each group by itself ----

    def _best_from(self, begin: int) -> _Rest:
        best: tuple[Cut, ...] = ()
        least: tuple[int, int, int] | None = None
        for cut in self.cuts(begin):
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

    def cuts(self, begin: int) -> Iterator[Cut]:
        """The groups that begin at a stage, with the workers that the rate takes."""
        over = self.rate.numerator
        numbers = self._readers if begin == 0 else range(len(self.loads))
        first_end = self._num_first if begin == 0 else begin + 1
        for number in numbers:
            loads, unit = self.loads[number].of_groups(begin, first_end), self.unit(number)
            for end, load in enumerate(loads, first_end):
                workers = load * over // unit + 1 if self._exceeds else -(-load * over // unit)
                yield begin, end, number, workers or 1

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

    # ---- within limits ----

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

    def _best_within_limits(self) -> tuple[Cut, ...] | None:
        num_stages = self.num_stages
        kept: list[list[tuple[int, ...]]] = [[] for _ in range(num_stages + 1)]
        none_used = (0,) * len(self.limits)
        # (the best that can become of it, the stages placed, workers of limited types, its groups)
        heap: list[tuple[PlacementKey, int, tuple[int, ...], tuple[Cut, ...]]] = [
            (PlacementKey(0, 0, 0, ()), 0, none_used, ())
        ]
        while heap:
            _, stage, used, cuts = heapq.heappop(heap)
            if stage == num_stages:
                return cuts
            if any(all(map(int.__le__, other, used)) for other in kept[stage]):
                continue
            kept[stage].append(used)
            for cut in self.cuts(stage):
                now_used = self.with_workers(used, cut[2], cut[3])
                if self.fits(now_used):
                    now = (*cuts, cut)
                    heapq.heappush(heap, (self._bound(now), cut[1], now_used, now))
            if len(heap) > PARTIAL_MAX:
                raise ResourceExhausted(
                    f"place: expected at most {PARTIAL_MAX:,} partial placements to keep within the"
                    f" limits, found more, of {num_stages} stages; give fewer types a limit, or"
                    " join stages"
                )
        return None

    def _bound(self, cuts: Sequence[Cut]) -> PlacementKey:
        """The key of these groups with the best rest."""
        rest = self.rests[cuts[-1][1]][0]
        names = itertools.chain(*((self.names[n],) * (e - b) for b, e, n, _ in cuts), rest.names)
        return PlacementKey(
            sum(workers * self.prices[number] for _, _, number, workers in cuts) + rest.cost,
            sum(cut[3] for cut in cuts) + rest.workers,
            len(cuts) + rest.groups,
            tuple(names),
        )
