"""Rows as Fleet's accessors write them in text.

A line is a key and the numbers below. A row without a tail lacks the numbers of the tail.

    SparseAccessor, CtrCommonAccessor
        slot unseen_days delta_score show click w state..., tail: w... state...
    CtrDoubleAccessor
        unseen_days delta_score show click w state... slot, tail: state... w...

Our rows have the time of the last push in place of unseen days, and show and click as of that time;
Fleet's are as of the save. Source: files that paddlepaddle 2.6.2 writes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.errors import BadRequest
from trireme.interchange.formats.fleet_state import Betas, PartState, head_and_tail
from trireme.policy import ScorePolicy, policy_of
from trireme.protocol.wire import Array, need_list
from trireme.rows.core_table import make_core_table
from trireme.rows.row_statistics import DAY_S, faded, unseen_days
from trireme.rows.wide_rows import RowLayout, WideRows
from trireme.table import TableSchema

ACCESSORS = ("SparseAccessor", "CtrCommonAccessor", "CtrDoubleAccessor")
UNSEEN_DAYS_MAX = 1 << 15
_BOTH = ("unseen_days", "delta_score", "show", "click", "head", "head_state")
COMMON = ("slot", *_BOTH, "tail", "tail_state")
DOUBLE = (*_BOTH, "slot", "tail_state", "tail")
WIDE = ("slot", "show", "click")


class RowError(Exception):
    """An invalid row: its number, and what was expected and found."""

    def __init__(self, row: int, expected: str, actual: str) -> None:
        super().__init__(f"expected {expected}, found {actual}")
        self.row = row


def need_betas(body: Any) -> Betas:
    """body["betas"] of Adam, whose powers Fleet keeps per row. Raises BadRequest."""
    betas = need_list(body, "betas", float)
    if len(betas) != 2:
        raise BadRequest(f"Fleet's text: expected two betas, found {betas}")
    return betas[0], betas[1]


@dataclass(frozen=True)
class FleetText:
    """The format of the text of one table.

    head, tail: states of the rule. at: positions of each field in a line, not counting the key.
    num_numbers: of a line with a tail.
    """

    schema: TableSchema
    layout: RowLayout
    head: PartState
    tail: PartState
    at: dict[str, slice]
    num_numbers: int
    format: _core.RowTextFormat
    betas: Betas

    @classmethod
    def of(cls, schema: TableSchema, rows: _core.Table, accessor: str, betas: Betas) -> FleetText:
        """Raises BadRequest: an unknown accessor, a rule that Fleet does not have, or dims per
        feature.
        """
        name, dims, dim = schema.name, schema.dims, schema.dim
        if len(dims) != 1:
            raise BadRequest(
                f"Fleet's text: expected a table of one dim, found {name!r} with {dims}"
            )
        if accessor not in ACCESSORS:
            known = ", ".join(ACCESSORS)
            raise BadRequest(f"Fleet's text: expected accessor {known}, found {accessor!r}")
        head, tail = head_and_tail(schema)
        sizes = {
            "head_state": head.num_numbers,
            "tail": dim - 1,
            "tail_state": tail.num_numbers if dim > 1 else 0,
        }
        at, begin = dict[str, slice](), 0
        for field in DOUBLE if accessor == "CtrDoubleAccessor" else COMMON:
            at[field] = slice(begin, begin + sizes.get(field, 1))
            begin = at[field].stop
        num_tail = sizes["tail"] + sizes["tail_state"]
        form = _core.RowTextFormat(
            num_head=begin - num_tail,
            num_full=begin,
            wide=sorted(at[field].start for field in WIDE),
        )
        return cls(schema, RowLayout.of(schema, rows), head, tail, at, begin, form, betas)

    def read(
        self, keys: Array, numbers: Array, wide: Array, is_full: Array, time: int
    ) -> tuple[npt.NDArray[np.uint8], WideRows]:
        """Row classes (n,) and wide rows from what `_core.parse_rows` returns. time: data time in
        seconds from which unseen days count back; 0: there is none. Raises RowError: invalid
        statistics; names the row.
        """
        rows = np.zeros((len(keys), self.layout.row_bytes), np.uint8)
        weights, state = self.layout.weights(rows), self.layout.state(rows)
        weights[:, 0] = numbers[:, self.at["head"].start]
        self.head.read(numbers[:, self.at["head_state"]], state, self.betas)
        full = np.flatnonzero(is_full)
        if self.schema.dim > 1 and len(full):
            rows_with_tail = slice(None) if len(full) == len(keys) else full
            weights[rows_with_tail, 1:] = numbers[rows_with_tail, self.at["tail"]]
            tail_state = state[rows_with_tail]
            self.tail.read(numbers[rows_with_tail, self.at["tail_state"]], tail_state, self.betas)
            state[rows_with_tail] = tail_state
        self._check_state(numbers)
        self._read_statistics(numbers, wide, self.layout.statistics(rows), time)
        classes = np.zeros(len(keys), np.uint8)
        if len(full) < len(keys) and self.schema.dim > 1:
            heads = np.flatnonzero(is_full == 0)
            if self.schema.head_class is None:
                new = make_core_table(replace(self.schema, absent="initial"))
                initial = np.empty((len(heads), self.schema.dim), np.float32)
                new.lookup(np.ascontiguousarray(keys[heads]), initial, _core.Pool(1))
                weights[heads, 1:] = initial[:, 1:]
            else:
                classes[heads] = self.schema.head_class
        return classes, rows

    def _check_state(self, numbers: Array) -> None:
        """A tail that a row lacks is zeros."""
        for part, field in ((self.head, "head_state"), (self.tail, "tail_state")):
            for values in numbers[:, self.at[field]][:, part.unsigned :].T:
                _refuse(values < 0, values, f"sums of squares and powers >= 0 in its {field}")

    def _read_statistics(self, numbers: Array, wide: Array, statistics: Array, time: int) -> None:
        slots, shows, clicks = self._wide_columns(wide)
        unseen = numbers[:, self.at["unseen_days"].start]
        deltas = numbers[:, self.at["delta_score"].start]
        whole = (unseen >= 0) & (unseen <= UNSEEN_DAYS_MAX) & (unseen == np.floor(unseen))
        _refuse(~whole, unseen, f"unseen days as a whole number 0..{UNSEEN_DAYS_MAX}")
        # Fleet has -1 for a row that was never pushed for a slot.
        whole = (slots >= -1) & (slots < 2**32) & (slots == np.floor(slots))
        _refuse(~whole, slots, "a slot as a whole number from -1 to 2**32 - 1")
        _refuse(shows < 0, shows, "shows >= 0")
        _refuse(clicks < 0, clicks, "clicks >= 0")
        if time == 0:
            _refuse(unseen > 0, unseen, "0 unseen days where time in seconds (--time) is not given")
        if time:
            times = time - unseen.astype(np.int64) * DAY_S
            _refuse(times < 1, unseen, f"fewer unseen days than time {time} s has")
            statistics["time"] = times
        if self.layout.is_scored:
            # Saved shows have decayed since the last push; those of a row here have not.
            decay = _core.decay(self.schema.policy["decay_rate"], unseen.astype(np.uint32))
            statistics["show"], statistics["click"] = shows / decay, clicks / decay
            _refuse(~np.isfinite(shows / decay), unseen, "shows that are finite before they faded")
            statistics["delta_score"] = deltas
            statistics["feature"] = np.maximum(slots, 0)

    def _wide_columns(self, wide: Array) -> tuple[Array, Array, Array]:
        """Views of the slots, shows and clicks."""
        order = sorted(WIDE, key=lambda field: self.at[field].start)
        slots, shows, clicks = (wide[:, order.index(field)] for field in WIDE)
        return slots, shows, clicks

    def write(
        self, keys: Array, classes: Array, rows: WideRows, time: int
    ) -> npt.NDArray[np.uint8]:
        """The lines of these rows, as of a data time in seconds. Raises BadRequest: the table has
        no ScorePolicy.
        """
        policy = policy_of(self.schema.policy)
        if not isinstance(policy, ScorePolicy):
            raise BadRequest(
                f"Fleet's text: expected a table with a ScorePolicy, found {self.schema.name!r}"
            )
        numbers = np.zeros((len(keys), self.num_numbers), np.float32)
        wide = np.empty((len(keys), len(WIDE)))
        weights, state = self.layout.weights(rows), self.layout.state(rows)
        numbers[:, self.at["head"]] = weights[:, :1]
        self.head.write(state, numbers[:, self.at["head_state"]], self.betas)
        if self.schema.dim > 1:
            numbers[:, self.at["tail"]] = weights[:, 1:]
            self.tail.write(state, numbers[:, self.at["tail_state"]], self.betas)
        statistics = self.layout.statistics(rows)
        numbers[:, self.at["unseen_days"].start] = unseen_days(statistics, time)
        numbers[:, self.at["delta_score"].start] = statistics["delta_score"]
        slots, shows, clicks = self._wide_columns(wide)
        slots[:] = statistics["feature"]
        shows[:], clicks[:] = faded(policy, statistics, time, day_over=False)
        is_full = (classes != self.schema.head_class).astype(np.uint8)
        return _core.write_rows(keys, numbers, wide, is_full, self.format)


def _refuse(is_wrong: Array, values: Array, expected: str) -> None:
    wrong = np.flatnonzero(is_wrong)
    if len(wrong):
        raise RowError(int(wrong[0]), expected, f"{values[wrong[0]]:g}")
