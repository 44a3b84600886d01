"""The search for the cheapest placement at one rate.

Since a group's workers depend on its own stages only, the best placement of the stages from i on is
the best first group and the best placement of the rest: O(stages^2 * types). Two groups of one type
side by side are never better than one, so nothing has to forbid them.

Limits on the workers of a type break this, because groups of one type share the limit. If the best
placement exceeds one, a best-first search takes over. Its bound, the best rest without limits, is
never above the best rest within them, so the first complete placement that it meets is the best. It
keeps a partial placement unless another one that ends at the same stage is at most as dear and uses
at most as many workers of every limited type.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from trireme.errors import ResourceExhausted
from trireme.place.choice import StageChain, exact
from trireme.place.machine_types import MachineType

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
        self._loads, self._prices = loads, prices
        self._names = [kind.name for kind in chain.types]
        self._limits = [kind.limit for kind in chain.types]
        self._rate, self._exceeds = rate, exceeds
        self._num_stages, self._num_first = len(chain.stages), chain.num_first
        self._readers = [i for i, kind in enumerate(chain.types) if kind.reads]
        nothing: _Rest = (PlacementKey(0, 0, 0, ()), ())
        self._rests = [nothing] * (self._num_stages + 1)  # the best from each stage on
        for begin in range(self._num_stages - 1, 0, -1):
            self._rests[begin] = self._best_from(begin)

    def best(self) -> tuple[Cut, ...] | None:
        """The best placement; None: the limits allow none. Raises ResourceExhausted: there are too
        many partial ones.
        """
        _, cuts = self._best_from(0)
        return cuts if self._is_within_limits(cuts) else self._best_within_limits()

    # ---- without limits ----

    def _best_from(self, begin: int) -> _Rest:
        best: tuple[Cut, ...] = ()
        least: tuple[int, int, int] | None = None
        for cut in self._cuts(begin):
            _, end, number, workers = cut
            rest = self._rests[end][0]
            cost = workers * self._prices[number] + rest.cost
            if least is not None and cost > least[0]:
                continue
            total = (cost, workers + rest.workers, 1 + rest.groups)
            if least is None or total < least:
                best, least = (cut,), total
            elif total == least and self._names_from(cut) < self._names_from(best[0]):
                best = (cut,)
        assert least is not None
        (first,) = best
        return PlacementKey(*least, self._names_from(first)), (first, *self._rests[first[1]][1])

    def _cuts(self, begin: int) -> Iterator[Cut]:
        """The groups that begin at a stage, with the workers that the rate takes."""
        over, under = self._rate.numerator, self._rate.denominator
        numbers = self._readers if begin == 0 else range(len(self._loads))
        first_end = self._num_first if begin == 0 else begin + 1
        for number in numbers:
            loads = self._loads[number]
            unit = loads.per_second * under
            for end, load in enumerate(loads.of_groups(begin, first_end), first_end):
                workers = load * over // unit + 1 if self._exceeds else -(-load * over // unit)
                yield begin, end, number, workers or 1

    def _names_from(self, cut: Cut) -> tuple[str, ...]:
        begin, end, number, _ = cut
        return (self._names[number],) * (end - begin) + self._rests[end][0].names

    # ---- within limits ----

    def _is_within_limits(self, cuts: Sequence[Cut]) -> bool:
        used = (0,) * len(self._limits)
        for _, _, number, workers in cuts:
            used = self._with(used, number, workers)
        return self._fits(used)

    def _with(self, used: tuple[int, ...], number: int, workers: int) -> tuple[int, ...]:
        """Workers of each limited type, 0 of the others, with those of one more group."""
        if self._limits[number] is None:
            return used
        return (*used[:number], used[number] + workers, *used[number + 1 :])

    def _fits(self, used: Sequence[int]) -> bool:
        limits = zip(used, self._limits, strict=True)
        return all(limit is None or num <= limit for num, limit in limits)

    def _best_within_limits(self) -> tuple[Cut, ...] | None:
        num_stages = self._num_stages
        kept: list[list[tuple[int, ...]]] = [[] for _ in range(num_stages + 1)]
        none_used = (0,) * len(self._limits)
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
            for cut in self._cuts(stage):
                now_used = self._with(used, cut[2], cut[3])
                if self._fits(now_used):
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
        rest = self._rests[cuts[-1][1]][0]
        names = itertools.chain(*((self._names[n],) * (e - b) for b, e, n, _ in cuts), rest.names)
        return PlacementKey(
            sum(workers * self._prices[number] for _, _, number, workers in cuts) + rest.cost,
            sum(cut[3] for cut in cuts) + rest.workers,
            len(cuts) + rest.groups,
            tuple(names),
        )
