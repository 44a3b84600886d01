"""The gradients of the rows that forward passes have looked up since the last step."""

from collections.abc import Iterable, Mapping
from typing import Any

from trireme import _core
from trireme.optim import values_of_group
from trireme.protocol.columns import merge
from trireme.protocol.gradients import TableGradient
from trireme.table import RowClassId
from trireme.worker.lookups import PendingLookups


def row_gradients(
    lookups: PendingLookups, groups: Iterable[Mapping[str, Any]], num_steps: int, pool: _core.Pool
) -> dict[RowClassId, TableGradient]:
    """Per `Table.class_id` the rows with a gradient; lookups of the same are merged, their
    gradients summed. groups: of the tables. num_steps: which step this is, for rules that ask.
    """
    gradients: dict[RowClassId, TableGradient] = {}
    for group in groups:
        # Not what torch has added to the group: the dense optimizer's defaults, betas say.
        own = {name: group[name] for name in group["table"].optimizer.group()}
        values = values_of_group(own, num_steps)
        for table in group["table"].parts:
            parts = [
                (entry.keys, gradients_KD, entry.columns, 1.0)
                for entry in lookups.entries
                if entry.table.class_id == table.class_id
                and (gradients_KD := entry.gradients()) is not None
            ]
            if parts:
                keys_K, gradients_KD, columns = merge(parts, pool)
                gradients[table.class_id] = TableGradient(keys_K, gradients_KD, values, columns)
    return gradients
