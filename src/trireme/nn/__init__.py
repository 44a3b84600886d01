"""Embedding modules over tables, and the planning of their lookups."""

from trireme.nn.modules import Embedding, EmbeddingBag
from trireme.nn.op import Lookup, gather_rows
from trireme.nn.plan import Plan, Planner, TablePlan

__all__ = ["Embedding", "EmbeddingBag", "Lookup", "Plan", "Planner", "TablePlan", "gather_rows"]
