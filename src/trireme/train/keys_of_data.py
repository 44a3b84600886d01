"""The keys that a pass over data needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.data.foreign import as_batch
from trireme.nn import Planner
from trireme.protocol.routing import Keys
from trireme.table import RowClassId

_PENDING_KEYS = 1 << 22


def keys_of_data(
    batches: Iterable[Any], planner: Planner
) -> dict[RowClassId, npt.NDArray[np.uint64]]:
    """The distinct keys that the batches need of each row class, ascending."""
    pending: dict[RowClassId, list[Keys]] = {}
    for source in batches:
        for class_id, keys_K in planner.plan(as_batch(source), train=False).keys().items():
            parts = pending.setdefault(class_id, [])
            parts.append(keys_K)
            if sum(map(len, parts[1:])) > max(_PENDING_KEYS, len(parts[0])):
                pending[class_id] = [np.unique(np.concatenate(parts))]
    return {class_id: np.unique(np.concatenate(parts)) for class_id, parts in pending.items()}
