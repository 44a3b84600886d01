"""The cheapest placement that reaches a throughput: a shortest path, in whole numbers.

A job is a chain of stages; the first one reads. It is cut into groups of consecutive stages. A
group is computed by workers of one type, which do nothing else. The first group is the workers that
read, and its workers also send what the other groups need.

    seconds of a group per example = those of its stages on the type, and its bytes / the network's
    workers of a group             = ceil(throughput * seconds)
    cost                           = workers * price, summed over the groups

Since a group's workers depend on its own stages only, the best placement of the stages from i on is
the best first group and the best placement of the rest: O(stages^2 * types). Two groups of one type
side by side are never better than one, so nothing has to forbid them.

Limits on the workers of a type break this, because groups of one type share the limit. If the best
placement exceeds one, a best-first search takes over. Its bound, the best rest without limits, is
never above the best rest within them, so the first complete placement that it meets is the best. It
keeps a partial placement unless another one that ends at the same stage is at most as dear and uses
at most as many workers of every limited type.

All is computed with whole numbers and fractions of the decimals as written: equal costs are equal,
and a placement never needs one worker more because of rounding.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from trireme.errors import ResourceExhausted
from trireme.place.machine_types import MachineType

PARTIAL_MAX = 200_000
"""Partial placements that a search within limits may keep."""
_HALVINGS = 30
_SLOW = Fraction(1, 10**15)  # examples per second, for which one worker in each group is enough


def exact(number: float) -> Fraction:
    """The decimal number as which Python writes it: 0.1 is a tenth."""
    return Fraction(repr(number))


@dataclass(frozen=True, kw_only=True)
class StageChain:
    """What is to be placed. All numbers are per example, finite and >= 0.

    stages: their names, in order; the first reads.
    types: that may compute.
    seconds: name of a type -> of each stage.
    bytes_before: of each stage: what crosses the boundary before it, there and back. Before the
        first stage: between a worker that reads and the servers.
    bytes_sent_to: of each stage: what it is sent besides, and sends back, if it is not in the first
        group: its weights and their gradients.
    num_first: how many stages the first group has at least.
    """

    stages: Sequence[str]
    types: Sequence[MachineType]
    seconds: Mapping[str, Sequence[float]]
    bytes_before: Sequence[float]
    bytes_sent_to: Sequence[float]
    num_first: int = 1


@dataclass(frozen=True)
class Group:
    """The workers that compute the stages from `begin` up to, not including, `end`. seconds: that
    one needs for an example.
    """

    begin: int
    end: int
    type: MachineType
    workers: int
    seconds: Fraction

    @property
    def cost(self) -> Fraction:
        """Per hour."""
        return self.workers * exact(self.type.price)

    @property
    def rate(self) -> float:
        """Examples per second; infinite if they take no time."""
        return float(self.workers / self.seconds) if self.seconds else math.inf


@dataclass(frozen=True)
class Choice:
    """A placement of all stages."""

    groups: tuple[Group, ...]

    @cached_property
    def cost(self) -> Fraction:
        """Per hour."""
        return sum((group.cost for group in self.groups), Fraction())

    @property
    def workers(self) -> int:
        return sum(group.workers for group in self.groups)

    @property
    def slowest(self) -> Group:
        """The group that the others wait for."""
        return max(self.groups, key=lambda group: group.seconds / group.workers)

    @property
    def pace(self) -> Fraction:
        """Seconds per example of the whole job."""
        return self.slowest.seconds / self.slowest.workers

    @property
    def rate(self) -> float:
        """Examples per second that are expected."""
        return self.slowest.rate


class _Key(NamedTuple):
    """What makes one placement better than another: the smaller one is."""

    cost: int
    workers: int
    groups: int
    names: tuple[str, ...]  # of the type of each stage


_Cut = tuple[int, int, int, int]  # of a group: begin, end, number of its type, workers


class _Loads:
    """The time of groups on one type, in whole units of 1 / `per_second` seconds."""

    def __init__(self, chain: StageChain, kind: MachineType) -> None:
        network = exact(kind.network)
        seconds = [exact(value) for value in chain.seconds[kind.name]]
        before = [exact(value) / network for value in chain.bytes_before]
        sent = [exact(value) / network for value in chain.bytes_sent_to]
        self.per_second = math.lcm(*(one.denominator for one in (*seconds, *before, *sent)))
        self._seconds = self._sums(seconds)
        self._sent = self._sums(sent)
        self._before = [*(int(value * self.per_second) for value in before), 0]

    def _sums(self, values: Sequence[Fraction]) -> list[int]:
        """Of the first 0, 1, 2, ... values."""
        return [0, *itertools.accumulate(int(value * self.per_second) for value in values)]

    def of_group(self, begin: int, end: int) -> int:
        """Units per example. The first group sends what the stages after it need."""
        first, last = (end, -1) if begin == 0 else (begin, end)
        sent = self._sent[last] - self._sent[first]
        own = self._seconds[end] - self._seconds[begin]
        return own + sent + self._before[begin] + self._before[end]


class Solver:
    """Finds placements of a chain. Every method gives equal results for equal arguments."""

    def __init__(self, chain: StageChain) -> None:
        self._chain = chain
        self._num_stages = len(chain.stages)
        self._types = tuple(chain.types)
        self._loads = [_Loads(chain, kind) for kind in self._types]
        prices = [exact(kind.price) for kind in self._types]
        unit = math.lcm(*(price.denominator for price in prices))
        self._prices = [int(price * unit) for price in prices]

    def cheapest(self, rate: Fraction, *, exceeds: bool = False) -> Choice | None:
        """The choice with the lowest cost, then fewest workers, then fewest groups, then the first
        types by name, that computes `rate` examples per second, or with `exceeds` more than these;
        None: the limits allow none.

        Raises ResourceExhausted: a search within limits became too large.
        """
        search = _Search(self._loads, self._prices, self._types, rate, exceeds=exceeds)
        readers = [i for i, kind in enumerate(self._types) if kind.reads]
        search.solve_rests(self._num_stages)
        cuts = search.best_first(readers, self._chain.num_first)
        if not search.is_within_limits(cuts):
            cuts = search.best_within_limits(readers, self._chain.num_first)
        return None if cuts is None else self._choice(cuts)

    def fastest(self, rate: Fraction, *, below: Fraction | None = None) -> Choice | None:
        """The fastest choice, slower than `rate`, of a cost less than `below`; None: there is none.

        rate: that no such choice reaches.
        """
        best = self._affordable(_SLOW, below)
        if best is None:
            return None
        low, high = float(1 / best.pace), float(rate)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            faster = self._affordable(Fraction(middle), below)
            if faster is None:
                high = middle
            else:
                best, low = faster, float(1 / faster.pace)
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

    def _choice(self, cuts: Sequence[_Cut]) -> Choice:
        groups = (
            Group(
                begin,
                end,
                self._types[number],
                workers,
                Fraction(self._loads[number].of_group(begin, end), self._loads[number].per_second),
            )
            for begin, end, number, workers in cuts
        )
        return Choice(tuple(groups))


class _Search:
    """The search for one rate."""

    def __init__(
        self,
        loads: Sequence[_Loads],
        prices: Sequence[int],
        types: Sequence[MachineType],
        rate: Fraction,
        *,
        exceeds: bool,
    ) -> None:
        self._loads, self._prices = loads, prices
        self._names = [kind.name for kind in types]
        self._limits = [kind.limit for kind in types]
        self._rate, self._exceeds = rate, exceeds
        self._rests: list[tuple[_Key, tuple[_Cut, ...]]] = []  # by the stage that they begin with
        self._num_stages = 0

    # ---- without limits ----

    def solve_rests(self, num_stages: int) -> None:
        """Find the best placement of the stages from each one on that follow the first group."""
        self._num_stages = num_stages
        self._rests = [(_Key(0, 0, 0, ()), ())] * (num_stages + 1)
        everyone = range(len(self._loads))
        for begin in range(num_stages - 1, 0, -1):
            self._rests[begin] = self._best_from(begin, everyone, range(begin + 1, num_stages + 1))

    def best_first(self, readers: Sequence[int], num_first: int) -> tuple[_Cut, ...]:
        """The best placement of all stages, whatever the limits."""
        return self._best_from(0, readers, range(num_first, self._num_stages + 1))[1]

    def _best_from(
        self, begin: int, numbers: Sequence[int], ends: Sequence[int]
    ) -> tuple[_Key, tuple[_Cut, ...]]:
        best: _Cut | None = None
        least: tuple[int, int, int] | None = None
        for cut in self._cuts(begin, numbers, ends):
            rest = self._rests[cut[1]][0]
            cost = cut[3] * self._prices[cut[2]] + rest.cost
            total = (cost, cut[3] + rest.workers, 1 + rest.groups)
            if best is not None and least is not None:
                if total > least:
                    continue
                if total == least and self._names_from(cut) >= self._names_from(best):
                    continue
            best, least = cut, total
        assert best is not None
        assert least is not None
        return _Key(*least, self._names_from(best)), (best, *self._rests[best[1]][1])

    def _cuts(self, begin: int, numbers: Sequence[int], ends: Sequence[int]) -> Iterator[_Cut]:
        """The groups that begin at a stage, with the workers that the rate takes."""
        over, under = self._rate.numerator, self._rate.denominator
        for number in numbers:
            loads = self._loads[number]
            unit = loads.per_second * under
            for end in ends:
                load = loads.of_group(begin, end) * over
                workers = load // unit + 1 if self._exceeds else -(-load // unit)
                yield begin, end, number, max(workers, 1)

    def _names_from(self, cut: _Cut) -> tuple[str, ...]:
        begin, end, number, _ = cut
        return (self._names[number],) * (end - begin) + self._rests[end][0].names

    # ---- within limits ----

    def is_within_limits(self, cuts: Sequence[_Cut]) -> bool:
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

    def best_within_limits(
        self, readers: Sequence[int], num_first: int
    ) -> tuple[_Cut, ...] | None:
        """The best placement of all stages; None: the limits allow none. Raises ResourceExhausted:
        there are too many partial ones.
        """
        everyone, num_stages = range(len(self._loads)), self._num_stages
        kept: list[list[tuple[int, ...]]] = [[] for _ in range(num_stages + 1)]
        none_used = (0,) * len(self._limits)
        # (the best that can become of it, the stages placed, workers of limited types, its groups)
        heap: list[tuple[_Key, int, tuple[int, ...], tuple[_Cut, ...]]] = [
            (_Key(0, 0, 0, ()), 0, none_used, ())
        ]
        while heap:
            _, stage, used, cuts = heapq.heappop(heap)
            if stage == num_stages:
                return cuts
            if any(all(map(int.__le__, other, used)) for other in kept[stage]):
                continue
            kept[stage].append(used)
            numbers = readers if stage == 0 else everyone
            ends = range(num_first if stage == 0 else stage + 1, num_stages + 1)
            for cut in self._cuts(stage, numbers, ends):
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

    def _bound(self, cuts: Sequence[_Cut]) -> _Key:
        """The key of these groups with the best rest."""
        rest = self._rests[cuts[-1][1]][0]
        names = itertools.chain(*((self._names[n],) * (e - b) for b, e, n, _ in cuts), rest.names)
        return _Key(
            sum(workers * self._prices[number] for _, _, number, workers in cuts) + rest.cost,
            sum(cut[3] for cut in cuts) + rest.workers,
            len(cuts) + rest.groups,
            tuple(names),
        )
