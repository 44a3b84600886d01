"""How many rows of a hot set each server may save, from the rows per bin that servers count."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def hot_budgets(counts: Sequence[Mapping[str, Any]], hot: float) -> dict[str, list[Any]]:
    """Table -> [bin, [rows above that bin and in it that each server may save]].

    Args:
        counts: of each server: table -> [bins, rows in each].
        hot: a number of rows, or a share of them.
    """
    budgets: dict[str, list[Any]] = {}
    for name in {name for server in counts for name in server}:
        bins = [dict(zip(*server.get(name, ([], [])), strict=True)) for server in counts]
        all_bins = sum(map(Counter, bins), Counter[int]())
        total = all_bins.total()
        wanted = int(hot * total) if type(hot) is float else min(int(hot), total)
        above, last = 0, 0
        for last in sorted(all_bins, reverse=True):
            if above + all_bins[last] >= wanted:
                break
            above += all_bins[last]
        budgets[name] = [last, _server_budgets(bins, last, wanted - above)]
    return budgets


def _server_budgets(bins: Sequence[Mapping[int, int]], last: int, left: int) -> list[list[int]]:
    """All rows above the last bin; of the rows in it `left`, those of the first servers first."""
    budgets = []
    for server in bins:
        within = min(left, server.get(last, 0))
        left -= within
        budgets.append([sum(number for bin, number in server.items() if bin > last), within])
    return budgets
