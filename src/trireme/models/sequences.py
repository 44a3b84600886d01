"""Sequences of rows: what recall and text models make of ragged columns.

Shapes: B examples, N ids, L places of a sequence, D floats per row.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trireme.data.batch import Batch, Ragged
from trireme.models.columns import expect_same_sizes, ragged_of
from trireme.nn import Embedding
from trireme.table import Table


class Sequences(NamedTuple):
    """rows: (B, L, D), zeros where there is no id. is_there: (B, L) bool."""

    rows: Tensor
    is_there: Tensor


class SequenceRows(nn.Module):
    """The rows of the first `length` ids of a ragged column, padded with zeros.

    Args:
        rows: table of the ids.
        column: their name. length: L.
        padding_key: this id is no id: a sequence may be padded with it. None: every id is one.
    """

    def __init__(
        self, rows: Table, *, column: str, length: int, padding_key: int | None = 0
    ) -> None:
        super().__init__()
        self.embedding = Embedding(rows, features=column, padding_key=padding_key)
        self.column, self.length, self.padding_key = column, length, padding_key

    def forward(self, batch: Batch) -> Sequences:
        """Raises BadRequest: the column is not ragged."""
        column = ragged_of(batch, self.column)
        rows_ND: Tensor = self.embedding(batch)
        values, offsets_B1 = column.values, column.offsets
        places_L = torch.arange(self.length, device=values.device)
        is_there_BL = places_L < offsets_B1.diff()[:, None]
        places_BL = offsets_B1[:-1, None] - offsets_B1[0] + places_L
        # Places without an id take the row of zeros behind all others.
        index_BL = torch.where(is_there_BL, places_BL, rows_ND.shape[0])
        rows_BLD = nn.functional.pad(rows_ND, (0, 0, 0, 1))[index_BL]
        if self.padding_key is None:
            return Sequences(rows_BLD, is_there_BL)
        index_BL = torch.where(is_there_BL, places_BL + offsets_B1[0], values.shape[0])
        padded = nn.functional.pad(values, (0, 1), value=self.padding_key)
        return Sequences(rows_BLD, padded[index_BL] != self.padding_key)


class EventRows(nn.Module):
    """The rows of events that have several columns, such as item and category, side by side:
    (B, L, sum of the dims). Which events there are, the first column says.

    Args:
        tables, columns: of the parts of an event.
        length: L. padding_keys: of the columns, default 0 of all; see SequenceRows.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        columns: Sequence[str],
        *,
        length: int,
        padding_keys: Sequence[int | None] = (),
    ) -> None:
        super().__init__()
        parts = zip(tables, columns, padding_keys or [0] * len(columns), strict=True)
        self.parts = nn.ModuleList(
            SequenceRows(table, column=name, length=length, padding_key=padding)
            for table, name, padding in parts
        )
        self.columns, self.width = tuple(columns), sum(table.width for table in tables)

    def forward(self, batch: Batch) -> Sequences:
        """Raises BadRequest: a column is not ragged, or differs from the others in size."""
        expect_same_sizes(batch, self.columns)
        parts: list[Sequences] = [part(batch) for part in self.parts]
        return Sequences(torch.cat([part.rows for part in parts], 2), parts[0].is_there)


def kept(column: Ragged, is_kept: Callable[[Tensor], Tensor]) -> Ragged:
    """The bags of a column without the ids of which this is false."""
    ids_N, offsets, _ = column.cut(0, len(column.offsets) - 1)
    mask_N = is_kept(ids_N)
    ends = nn.functional.pad(mask_N.cumsum(0), (1, 0))[offsets]
    return Ragged(ids_N[mask_N], ends)


def shares_of(scores: Tensor, is_there: Tensor) -> Tensor:
    """A softmax along axis 1 over the places that are there; 0 for the others, and for all places
    where none is there.

    is_there: bool, as the scores, or with axes of size 1.
    """
    lowest = torch.finfo(scores.dtype).min
    return torch.softmax(scores.masked_fill(~is_there, lowest), 1) * is_there
