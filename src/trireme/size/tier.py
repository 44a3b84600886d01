"""Estimates for a table with rows on SSD: what a budget of memory holds, and what the disks take.

The factors are measured (docs/tiers.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from trireme import _core
from trireme.drawing import size
from trireme.rows.core_table import needed_bytes, own_bytes
from trireme.size.estimate import Need

INDEX_BYTES = 3 << 18  # of few rows in memory: the first lines of each bucket
COLD_ROW_BYTES = 4.0  # of memory, for a row on SSD: 3.3 when filled, 3.9 after many turnovers
HOT_ROW_BYTES = 8.0  # beside a row in memory: index and use count
WRITTEN_PER_EVICTED = 1.8  # write amplification, at most
FILE_BYTES_PER_ROW_BYTE = 1.55  # files are cleaned when 65 % is left
PAGE_HEADER_BYTES = 32


@dataclass(frozen=True)
class TierNeed:
    """need: of a server. memory_bytes: its budget for this table."""

    need: Need
    memory_bytes: float

    @property
    def fixed(self) -> float:
        """Bytes of memory beside rows and what finds those on SSD."""
        return self._fixed(self.memory_bytes)

    def _fixed(self, memory_bytes: float) -> float:
        own = own_bytes(int(memory_bytes), self._row_bytes_max)
        return own + INDEX_BYTES + self.need.marks + self.need.pending

    @property
    def _row_bytes_max(self) -> int:
        return max(self.need.table.class_bytes)

    @cached_property
    def least(self) -> int:
        """The smallest budget: all rows on SSD, and some room. Buffers grow with it, slowly."""
        least, smaller = 0, -1
        while smaller < least:
            own = self._fixed(least) + COLD_ROW_BYTES * self.need.num_rows
            least, smaller = needed_bytes(own), least
        return least

    @property
    def hot_rows(self) -> int:
        """How many rows fit into memory."""
        hot = self.need.row_bytes + HOT_ROW_BYTES - COLD_ROW_BYTES
        left = self.memory_bytes - self.fixed - COLD_ROW_BYTES * self.need.num_rows
        return int(min(max(left / hot, 0), self.need.num_rows))

    @property
    def page_row_bytes(self) -> float:
        """Bytes of a page for each of its rows."""
        page_bytes = _core.ssd_page_bytes(self._row_bytes_max)
        return page_bytes / ((page_bytes - PAGE_HEADER_BYTES) // (self.need.row_bytes + 1))

    @property
    def disk(self) -> float:
        """Bytes of the files with rows."""
        cold = self.need.num_rows - self.hot_rows
        return cold * self.page_row_bytes * FILE_BYTES_PER_ROW_BYTE

    def days_of_wear(self, evicted_per_s: float, endurance_bytes: float) -> float:
        """Until disks have taken what they endure."""
        per_day = evicted_per_s * self.page_row_bytes * WRITTEN_PER_EVICTED * 86_400
        return endurance_bytes / per_day


IN_MEMORY = "tiers: all rows are in memory here; --memory B estimates a table with rows on SSD"


def of_tier(tier: TierNeed, evicted_per_s: float | None, endurance_bytes: float) -> Iterator[str]:
    """Lines about a table with rows on SSD."""
    need = tier.need
    yield f"with {size(tier.memory_bytes)} of memory on each server (--memory), and rows on SSD:"
    if tier.memory_bytes < tier.least:
        yield (
            f"  too little: it takes at least {size(tier.least)}, for what finds {need.num_rows:,}"
            f" rows on SSD ({COLD_ROW_BYTES} B each) and buffers"
        )
        return
    share = tier.hot_rows / max(need.num_rows, 1)
    yield f"  rows in memory    {tier.hot_rows:,} ({share:.1%}); at least needed {size(tier.least)}"
    yield f"  files on SSD      {size(tier.disk)}; with --durability leave room for twice that"
    if evicted_per_s:
        days = tier.days_of_wear(evicted_per_s, endurance_bytes)
        yield (
            f"  wear              {evicted_per_s:,.0f} rows/s that leave memory write"
            f" {size(evicted_per_s * tier.page_row_bytes * WRITTEN_PER_EVICTED)}/s:"
            f" {days:,.0f} days until {endurance_bytes / 1e12:g} TB"
        )
    else:
        yield (
            "  wear              --evicted_rows N tells the days; see"
            " trireme_table_ssd_evicted_rows_total"
        )
