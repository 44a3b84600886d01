"""Embedding modules over tables, the planning of their lookups, and layers of click models.

Modules that pull rows from a cluster are loaded on first use; predictors do not need them.
"""

from typing import TYPE_CHECKING

from trireme.lazy_names import lazy_names
from trireme.nn.cvm import CVM
from trireme.nn.data_norm import DataNorm
from trireme.nn.ids import keys_of
from trireme.nn.lookup import Lookup
from trireme.nn.planner import BatchPlan, Planner, TablePlan

if TYPE_CHECKING:
    from trireme.nn.modules import Embedding, EmbeddingBag
    from trireme.nn.onednn import use_onednn
    from trireme.nn.op import gather_rows
    from trireme.nn.pooling import sequence_pad, sequence_pool
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
    "sequence_pad",
    "sequence_pool",
    "use_onednn",
]

__getattr__, __dir__ = lazy_names(__name__)
