"""The rows of one row class in a pass: a block, and where each key is in it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trireme import _core
from trireme.device import BlockLayout, RowBlock
from trireme.device.block_statistics import UpdateFacts
from trireme.errors import BadRequest
from trireme.protocol.columns import fleet_scale
from trireme.protocol.routing import Keys
from trireme.rows.wide_rows import WideRows
from trireme.table import TableSchema
from trireme.train.modes.device_pass.key_slots import ABSENT, KeySlots, Slots
from trireme.worker.gradients import TableGradient
from trireme.worker.whole_rows import ReadPart, rows_per_message


def check_schema(schema: TableSchema) -> None:
    """Raises BadRequest: whether and when rows are made or removed depends on what only the table
    knows, or a block cannot hold the rows.
    """
    for is_found, expected in (
        (schema.admission is not None, "a table that admits every key, found an admission filter"),
        (schema.policy.get("max_rows") is not None, "a policy without max_rows, found one"),
        (schema.policy.get("max_bytes") is not None, "a policy without max_bytes, found one"),
    ):
        if is_found:
            raise BadRequest(f"begin_pass: table {schema.name!r}: expected {expected}")
    BlockLayout.of(schema)


def rows_or_new(part: ReadPart, layout: BlockLayout, keys_K: Keys, pool: _core.Pool) -> WideRows:
    """The part that was read of these keys, with initial rows for those without."""
    new = np.flatnonzero(~part.is_present)
    if not len(new):
        return part.rows
    weights = np.empty((len(new), layout.dim), np.float32)
    layout.core.lookup(keys_K[part.positions[new]], weights, pool, layout.row_class)
    rows = part.rows if part.rows.flags.writeable else np.array(part.rows)
    rows[new] = layout.new_rows(weights)
    return rows


class BlockOfKeys:
    """One thread uses it at a time. Shapes: U keys, K of them, D weights.

    slots: of the rows of `block`.
    version: that updated rows are stamped with.
    """

    def __init__(
        self, schema: TableSchema, slots: KeySlots, block: RowBlock, version: int, pool: _core.Pool
    ) -> None:
        self._schema, self._block, self._version, self._pool = schema, block, version, pool
        self.slots = slots
        self._last: tuple[Keys, Slots] | None = None  # those of the last lookup
        self._planned: dict[int, tuple[Keys, Slots]] = {}  # of batches to come, by id()

    def following(
        self, keys_U: Keys, lacking: npt.NDArray[np.intp], rows: WideRows, version: int
    ) -> BlockOfKeys:
        """The block of other keys. Those that both have stay on the device. lacking: positions of
        the keys whose rows come from elsewhere.
        """
        to = np.delete(np.arange(len(keys_U)), lacking)
        slots = torch.from_numpy(self.slots.find(keys_U[to])).to(self._block.device)
        block = self._block.moved(slots, self._as_slots(to), len(keys_U))
        block.fill(self._as_slots(lacking), rows)
        slots_U = KeySlots(keys_U, self._pool)
        return BlockOfKeys(self._schema, slots_U, block, version, self._pool)

    def _as_slots(self, positions: npt.NDArray[np.intp]) -> Tensor:
        return torch.from_numpy(positions.astype(np.int32)).to(self._block.device)

    def __len__(self) -> int:
        """U."""
        return len(self._block)

    def plan(self, keys_K: Keys) -> None:
        """Find the slots of a batch to come, of which `find` will ask. Any thread, while no slots
        change.
        """
        self._planned[id(keys_K)] = keys_K, self.slots.find(keys_K)

    def forget_plans(self) -> None:
        """No batch that was planned will come."""
        self._planned.clear()

    def find(self, keys_K: Keys) -> Slots:
        """(K,): see KeySlots.find."""
        if self._last is None or self._last[0] is not keys_K:
            planned = self._planned.pop(id(keys_K), None)
            self._last = planned or (keys_K, self.slots.find(keys_K))
        return self._last[1]

    def weights(self, keys_K: Keys) -> Tensor:
        """(K, D) on the device. Raises BadRequest: a key is not of the pass."""
        return self._block.weights(self._index(keys_K))

    def weights_at(self, slots: Slots) -> Tensor:
        return self._block.weights(torch.from_numpy(slots).to(self._block.device))

    def _index(self, keys_K: Keys) -> Tensor:
        slots = self.find(keys_K)
        if len(slots) and slots.min() == ABSENT:
            key = keys_K[slots == ABSENT][0]
            raise BadRequest(
                f"pass on a device: expected keys of the data that it began with, found {key} of"
                f" table {self._schema.name!r}; begin a pass with all data that it trains on"
            )
        return torch.from_numpy(slots).to(self._block.device)

    def update(self, gradient: TableGradient, examples: int, time: int) -> None:
        """Make one step of the table's rule. examples: of the batch."""
        device, columns = self._block.device, gradient.columns
        grads = gradient.gradients.to(device)
        show_click = columns.get("show_click")
        if self._schema.is_scored and self._schema.rule.get("scale") == "fleet":
            scale = fleet_scale(self._schema.rule, columns["show_click"], examples)
            grads = grads * torch.from_numpy(scale).to(device)
        features = columns.get("feature")
        facts = UpdateFacts(
            time=time,
            version=self._version,
            show_click=None if show_click is None else torch.from_numpy(show_click).to(device),
            features=None
            if features is None
            else torch.from_numpy(features.view(np.int32)).to(device),
        )
        self._block.update_distinct(self._index(gradient.keys), grads, gradient.values, facts)

    def changed(self) -> Iterator[tuple[Keys, WideRows]]:
        """The keys whose rows have been updated, and these rows, part by part."""
        is_changed = self._block.is_changed.cpu().numpy()
        wide, num_rows = self.wide_rows, rows_per_message(self._block.layout.wide.row_bytes)
        for begin in range(0, len(is_changed), num_rows):
            part = slice(begin, begin + num_rows)
            if wide is not None and is_changed[part].all():  # a server here needs no copy
                yield self.slots.keys[part], wide[part]
            elif len(slots := begin + np.flatnonzero(is_changed[part])):
                yield self.slots.keys[slots], self._block.raw_rows(self._as_slots(slots))

    @property
    def wide_rows(self) -> WideRows | None:
        """See RowBlock."""
        return self._block.wide_rows
