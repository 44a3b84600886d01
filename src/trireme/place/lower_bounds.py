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

from trireme.place.group_search import GroupSearch

Floats = NDArray[np.float64]

_MARGIN = 1e-9
_NEARLY = 1 + _MARGIN
_LIMIT_MAX = 10**300  # as a float
_STEPS = 40
_ROWS_MAX = 4  # of each kind


class LowerBounds:
    """Bounds of one search. Shapes: a row has a weight for each type, a cut is a next group."""

    def __init__(self, search: GroupSearch) -> None:
        self._search = search
        self._is_limited = np.array([limit is not None for limit in search.limits])
        limits = [min(limit or 0, _LIMIT_MAX) for limit in search.limits]
        self._limits = np.array(limits, np.float64)
        self._limits_or_inf = np.where(self._is_limited, self._limits, np.inf)
        self._prices = np.array([float(price) for price in search.prices])
        self._workers, self._forbidden = _tables_of_cuts(search)
        self._num_of_cost, self._weights = self._choose_rows()
        surcharges = self._weights.copy()
        surcharges[: self._num_of_cost] -= self._prices
        allowed = surcharges @ self._limits
        self._allowed = allowed[:, None, None] * _NEARLY
        nothing = np.zeros((len(self._weights), search.num_stages))
        lightest = np.stack([self._lightest_groups(weights)[0] for weights in self._weights])
        # By type of the first group: with what it passes on as parts of a worker, and without.
        self._rests = {
            number: np.stack(
                [_rests_of(lightest, self._passed_on(number)), _rests_of(lightest, nothing)], axis=2
            )
            for number in search.readers
        }

    def of_first_groups(self, first: int, parts: Floats, whole: Floats) -> Floats:
        """(ends,): the cost at least, with a first group of this type that ends at each stage that
        it may end at. parts, whole: (ends,), as `of_groups`.
        """
        rests = self._rests[first][0][:, :, -len(parts) :]  # (rows, 2, ends)
        return self._bound(self._weights[:, first, None, None] * np.stack([parts, whole]) + rests)

    def of_groups(
        self, first: int, stage: int, parts: float, whole: int, used: Sequence[float]
    ) -> Floats:
        """(cuts,): the cost at least, with each of the cuts at `stage` as the next group; infinite
        where no placement is within the limits.

        first: type of the first group. parts, whole: workers that it needs so far, in parts of a
            worker, and as a whole number. used: workers of each type in the groups after it.
        """
        workers = self._workers[:, stage, stage + 1 :]  # (types, ends)
        num_used = np.array(used, np.float64)
        before = self._weights @ num_used
        first_weights = self._weights[:, first]
        fixed = np.stack([before + first_weights * parts, before + first_weights * whole], axis=1)
        with_next = self._weights[:, :, None] * workers  # (rows, types, ends)
        rests = self._rests[first][1][:, :, None, stage + 1 :]  # (rows, 2, 1, ends)
        weights = fixed[:, :, None, None] + with_next[:, None] + rests
        num_used[first] += whole
        is_over = num_used[:, None] + workers > self._limits_or_inf[:, None] * _NEARLY
        bounds = self._bound(weights.reshape(*weights.shape[:2], -1))
        return np.where(is_over.ravel(), np.inf, bounds)

    def _bound(self, weights: Floats) -> Floats:
        """(cuts,) of (rows, 2, cuts)."""
        least = weights * (1 - _MARGIN) - self._allowed
        bound: Floats = least[: self._num_of_cost].max(axis=(0, 1))
        if self._num_of_cost < len(least):
            bound[(least[self._num_of_cost :] > 0).any(axis=(0, 1))] = np.inf
        return bound

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

    # ---- surcharges ----

    def _choose_rows(self) -> tuple[int, Floats]:
        """How many rows bound the cost, which come first, and (rows, types): the weights."""
        rows = [self._prices]
        if not self._is_limited.any():
            return 1, np.array(rows)
        rows += [self._prices + one for one in self._surcharges_of_cost()]
        num_of_cost = len(rows)
        return num_of_cost, np.array([*rows, *self._surcharges_of_limits()])

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
        lightest, weighed = self._lightest_groups(weights)
        rest, ends = np.zeros(num + 1), [0] * num
        for begin in range(num - 1, -1, -1):
            each = lightest[begin, begin + 1 :] + rest[begin + 1 :]
            least = int(each.argmin())
            rest[begin], ends[begin] = each[least], begin + 1 + least
        begin, used = 0, np.zeros_like(weights)
        while begin < num:
            end = ends[begin]
            number = int(weighed[:, begin, end].argmin())
            used[number] += self._workers[number, begin, end]
            begin = end
        return float(rest[0]), used

    def _lightest_groups(self, weights: Floats) -> tuple[Floats, Floats]:
        """(begins, ends): the least weight of a group; (types, begins, ends): that on each type."""
        weighed = weights[:, None, None] * self._workers + self._forbidden
        return weighed.min(axis=0), weighed


def _rests_of(lightest: Floats, passed_on: Floats) -> Floats:
    """(2, rows, stages + 1): the least weight from each stage on, if the second group begins there,
    and if a later one does, before which the first group passes something on.

    lightest: (rows, begins, ends): of a group. passed_on: (rows, stages).
    """
    num_rows, num, _ = lightest.shape
    second, later = rests = np.zeros((2, num_rows, num + 1))
    for begin in range(num - 1, 0, -1):
        after = lightest[:, begin, begin + 1 :] + later[:, begin + 1 :]
        second[:, begin] = after.min(axis=1)
        later[:, begin] = second[:, begin] + passed_on[:, begin]
    return rests


def _tables_of_cuts(search: GroupSearch) -> tuple[Floats, Floats]:
    """(types, begins, ends): the workers of each group; and infinite where there is no such group,
    else 0.
    """
    num = search.num_stages
    workers = np.zeros((len(search.loads), num, num + 1))
    forbidden = np.full_like(workers, np.inf)
    for begin, cuts in enumerate(search.cuts):
        _, ends, numbers, of_cuts = zip(*cuts, strict=True)
        workers[numbers, begin, ends] = of_cuts
        forbidden[numbers, begin, ends] = 0.0
    return workers, forbidden


def _best_of(tried: list[tuple[float, Any]]) -> list[Floats]:
    """Those that bound the most."""
    tried.sort(key=lambda one: -one[0])
    return [surcharge for _, surcharge in tried[:_ROWS_MAX]]
