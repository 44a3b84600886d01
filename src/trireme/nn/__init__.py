"""Embedding modules over tables, the planning of their lookups, and layers of click models.

Modules that pull rows from a cluster are loaded on first use; predictors do not need them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trireme.nn.cvm import CVM
from trireme.nn.data_norm import DataNorm
from trireme.nn.ids import keys_of
from trireme.nn.lookup import Lookup
from trireme.nn.planner import BatchPlan, Planner, TablePlan

if TYPE_CHECKING:
    from trireme.nn.modules import Embedding, EmbeddingBag
    from trireme.nn.onednn import use_onednn
    from trireme.nn.op import gather_rows
    from trireme.nn.pooling import sequence_pool
    from trireme.nn.stages import Stages

__all__ = [
    "BatchPlan",
    "CVM",
    "DataNorm",
    "Embedding",
    "EmbeddingBag",
    "Lookup",
    "Planner",
    "Stages",
    "TablePlan",
    "gather_rows",
    "keys_of",
    "sequence_pool",
    "use_onednn",
]

_HOMES = {
    "Embedding": "trireme.nn.modules",
    "EmbeddingBag": "trireme.nn.modules",
    "Stages": "trireme.nn.stages",
    "gather_rows": "trireme.nn.op",
    "sequence_pool": "trireme.nn.pooling",
    "use_onednn": "trireme.nn.onednn",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trireme.nn' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
