"""Which rows of a table a save takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trireme.checkpoint.format.modes import MODES
from trireme.checkpoint.format.row_writer import ChooseRows
from trireme.checkpoint.server_side.hot_rows import HotBudget, bins_of
from trireme.errors import BadRequest
from trireme.protocol.row_selection import selected
from trireme.protocol.wire import need
from trireme.server.state import ServedTable


@dataclass(frozen=True)
class RowsToSave:
    """mode: of the save. time: data time at which rows are judged. budgets: of a hot set."""

    mode: str
    time: int
    budgets: Mapping[str, HotBudget]

    @staticmethod
    def from_wire(body: Mapping[str, Any], server: int) -> RowsToSave:
        budgets = {}
        for name, budget in need(body, "budgets", dict).items():
            match budget:
                case [int(bin), list(servers)] if 0 <= server < len(servers):
                    budgets[str(name)] = HotBudget(bin, *_two_numbers(servers[server]))
                case _:
                    raise BadRequest(f"checkpoint: expected a bin and shares, found {budget!r}")
        mode = need(body, "mode", str)
        if mode not in MODES:
            raise BadRequest(f"checkpoint: expected a mode of {MODES}, found {mode!r}")
        return RowsToSave(mode, need(body, "time", int), budgets)

    def of(self, table: ServedTable) -> ChooseRows | None:
        """Which rows of the table to save; None: all that the version asks for."""
        schema = table.schema
        if self.mode == "hot":
            if schema.name not in self.budgets:
                raise BadRequest(
                    f"checkpoint: expected a budget of table {schema.name!r}, which was made"
                    f" after rows were counted, found those of {sorted(self.budgets)}"
                )
            budget, newest = self.budgets[schema.name], table.rows.version
            return lambda statistics: budget.spend(bins_of(statistics, newest))
        if self.mode in ("base", "delta") and schema.is_scored:
            day_over = self.mode == "base"  # a base is of the end of the day
            return lambda statistics: selected(schema, statistics, self.mode, self.time, day_over)
        return None


def _two_numbers(values: Any) -> tuple[int, int]:
    match values:
        case [int(above), int(within)]:
            return above, within
    raise BadRequest(f"checkpoint: expected two numbers as a share, found {values!r}"[:200])
