"""What the rest of a placement costs and uses at least, quickly.

A row gives each type a weight per worker: `of_cost` times its price, and a surcharge if the type
has a limit. The least weight of the stages from i on is found as the least cost is, because limits
are left out; what the first group passes on counts as parts of a worker. Each placement within the
limits weighs at most `of_cost` times its cost and the surcharges of all workers that the limits
allow. So a row with `of_cost` 1 is a bound of the cost, and one with 0 shows that no placement is
within the limits (Lagrangian relaxation). Any surcharges are right; those that bound the
most are found by steps along the subgradient, and by multiplicative weights.

In floating point; a margin far above its errors keeps a bound from being too high.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.place.group_search import Cut, GroupSearch

Floats = NDArray[np.float64]

_MARGIN = 1e-9
_NEARLY = 1 + _MARGIN
_LIMIT_MAX = 10**300  # as a float
_STEPS = 40
_ROWS_MAX = 4  # of each kind


class LowerBounds:
    """Bounds of one search.

    Attributes:
        candidates: placements that were met on the way, without what their first groups pass on.
    """

    def __init__(self, search: GroupSearch) -> None:
        self._search = search
        self._is_limited = np.array([limit is not None for limit in search.limits])
        limits = [min(limit or 0, _LIMIT_MAX) for limit in search.limits]
        self._limits = np.array(limits, np.float64)
        self._limits_or_inf = np.where(self._is_limited, self._limits, np.inf)
        self._none_used = [0.0] * len(search.limits)
        self._prices = np.array([float(price) for price in search.prices])
        columns = [np.array(cuts, dtype=object).reshape(-1, 4) for cuts in search.cuts]
        self._ends = [cuts[:, 1].astype(np.int64) for cuts in columns]
        self._numbers = [cuts[:, 2].astype(np.int64) for cuts in columns]
        self._workers = [cuts[:, 3].astype(np.float64) for cuts in columns]
        self.candidates: list[tuple[Cut, ...]] = [search.rests[0][1]]
        self._of_cost, self._weights = self._choose_rows()
        surcharges = self._weights - self._of_cost[:, None] * self._prices
        self._allowed = surcharges @ self._limits
        by_itself = self._table_of(None)
        self._tables = {
            number: (self._table_of(self._passed_on(number)), by_itself)
            for number in search.readers
        }

    def of_groups(
        self, first: int, stage: int, first_workers: tuple[float, int], used: Sequence[float]
    ) -> Floats:
        """The cost at least, with each of the cuts at `stage` as the next group; infinite where no
        placement is within the limits.

        first: type of the first group. first_workers: that it needs so far, in parts of a worker,
            and as a whole number. used: workers of each type in the groups after it.
        """
        num_used = np.asarray(used, np.float64)
        others = self._weights @ num_used
        bounds = [
            self._bound((others + self._weights[:, first] * num)[:, None] + with_next[stage])
            for num, with_next in zip(first_workers, self._tables[first], strict=True)
        ]
        numbers = self._numbers[stage]
        is_over = num_used[numbers] + self._workers[stage] > self._limits_or_inf[numbers] * _NEARLY
        return np.where(is_over, np.inf, np.maximum(*bounds))

    def of_first(self, first: int, end: int, first_workers: tuple[float, int]) -> float:
        """The cost at least, with a first group of this type that ends at this stage."""
        if end < self._search.num_stages:
            return float(self.of_groups(first, end, first_workers, self._none_used).min())
        [bound] = self._bound(self._weights[:, first, None] * first_workers[1])
        return float(bound)

    def _bound(self, weights: Floats) -> Floats:
        """(cuts,) of (rows, cuts)."""
        allowed = self._allowed[:, None]
        least = weights - allowed - _MARGIN * (weights + allowed)
        has_cost = self._of_cost > 0
        bound = least[has_cost].max(axis=0)
        return np.where((least[~has_cost] > 0).any(axis=0), np.inf, bound)

    def _passed_on(self, first: int) -> Floats:
        """The weight of the part of a worker of the first group that passes on what crosses before
        each stage, (rows, stages).
        """
        search, unit = self._search, self._search.unit(first)
        parts = [
            search.loads[first].relayed(begin) * search.rate.numerator / unit
            for begin in range(search.num_stages)
        ]
        return np.outer(self._weights[:, first], parts)

    def _table_of(self, passed_on: Floats | None) -> list[Floats]:
        """By stage, of each cut there: the least weight of it and of what follows, (rows, cuts)."""
        num = self._search.num_stages
        rest = np.zeros((len(self._weights), num + 1))
        with_next: list[Floats] = [np.empty(0)] * num
        for begin in range(num - 1, 0, -1):
            ends, numbers = self._ends[begin], self._numbers[begin]
            with_next[begin] = self._weights[:, numbers] * self._workers[begin] + rest[:, ends]
            rest[:, begin] = with_next[begin].min(axis=1)
            if passed_on is not None:
                rest[:, begin] += passed_on[:, begin]
        return with_next

    # ---- surcharges ----

    def _choose_rows(self) -> tuple[Floats, Floats]:
        """`of_cost` of each row, and (rows, types): the weights."""
        rows: list[tuple[float, Floats]] = [(1.0, self._prices)]
        if self._is_limited.any():
            rows += [(1.0, self._prices + one) for one in self._surcharges_of_cost()]
            rows += [(0.0, one) for one in self._surcharges_of_limits()]
        of_cost, weights = zip(*rows, strict=True)
        return np.array(of_cost), np.array(weights)

    def _surcharges_of_cost(self) -> list[Floats]:
        """Polyak's steps towards a cost somewhat above the bound."""
        surcharge, tried = np.zeros_like(self._prices), list[tuple[float, Floats]]()
        stretch = 0.5
        for _ in range(_STEPS):
            weight, used = self._lightest(self._prices + surcharge)
            bound = weight - float(surcharge @ self._limits)
            tried.append((bound, surcharge))
            best = max(bound for bound, _ in tried)
            too_many = np.where(self._is_limited, used - self._limits, 0.0)
            too_many = np.where((surcharge > 0) | (too_many > 0), too_many, 0.0)
            if not too_many.any():
                break
            stretch *= 0.93
            step = (best * (1 + stretch) - bound) / float(too_many @ too_many)
            surcharge = np.maximum(0.0, surcharge + step * too_many)
        return _best_of(tried)

    def _surcharges_of_limits(self) -> list[Floats]:
        """Dearer where the lightest placements have exceeded the limit, by the share of it."""
        excess, tried = np.zeros_like(self._prices), list[tuple[float, Floats]]()
        limits = self._limits_or_inf
        for _ in range(_STEPS):
            shares = np.where(self._is_limited, np.exp(excess - excess.max()), 0.0)
            surcharge = shares / shares.sum() / limits
            weight, used = self._lightest(surcharge)
            tried.append((weight, surcharge))
            excess = excess + 2.0 * used / limits / max(1.0, float((used / limits).max()))
        return _best_of(tried)

    def _lightest(self, weights: Floats) -> tuple[float, Floats]:
        """The least weight of a placement, and its workers by type."""
        num = self._search.num_stages
        rest, chosen = np.zeros(num + 1), [0] * num
        for begin in range(num - 1, -1, -1):
            each = weights[self._numbers[begin]] * self._workers[begin] + rest[self._ends[begin]]
            chosen[begin] = int(each.argmin())
            rest[begin] = each[chosen[begin]]
        cuts, begin, used = list[Cut](), 0, np.zeros_like(weights)
        while begin < num:
            cut = self._search.cuts[begin][chosen[begin]]
            cuts.append(cut)
            used[cut[2]] += cut[3]
            begin = cut[1]
        self.candidates.append(tuple(cuts))
        return float(rest[0]), used


def _best_of(tried: list[tuple[float, Any]]) -> list[Floats]:
    """Those that bound the most."""
    tried.sort(key=lambda one: -one[0])
    return [surcharge for _, surcharge in tried[:_ROWS_MAX]]
