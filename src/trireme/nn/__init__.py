"""Embedding modules over tables, the planning of their lookups, and layers of click models."""

from trireme.nn.cvm import CVM
from trireme.nn.data_norm import DataNorm
from trireme.nn.modules import Embedding, EmbeddingBag
from trireme.nn.op import Lookup, gather_rows
from trireme.nn.plan import Plan, Planner, TablePlan
from trireme.nn.pooling import sequence_pool

__all__ = [
    "CVM",
    "DataNorm",
    "Embedding",
    "EmbeddingBag",
    "Lookup",
    "Plan",
    "Planner",
    "TablePlan",
    "gather_rows",
    "sequence_pool",
]
