"""The twin of a model: the same modules and initial weights, with torch's own embeddings.

Every table becomes one nn.Embedding (sparse gradients) with a row for each key of the data, found
by binary search; the rows learn with the torch optimizer that the table's rule names.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import trireme as tr
from benchmarks.harness import BenchError
from trireme.nn.ids import Columns, read_ids
from trireme.nn.modules import TableModule

_READER = "twin"


class PlainRows(nn.Module):
    """Replaces the modules of one table: a row for each of K sorted keys, and one of zeros."""

    def __init__(self, table: tr.Table, keys_K: np.ndarray[Any, Any]) -> None:
        super().__init__()
        self.keys_K = keys_K
        self.rows = nn.Embedding(len(keys_K) + 1, table.dim, padding_idx=len(keys_K), sparse=True)
        initial = tr.nn.Embedding(table, features="key").eval()
        with torch.no_grad():
            self.rows.weight[:-1] = initial({"key": torch.from_numpy(keys_K)})

    def index(self, ids_N: np.ndarray[Any, Any], padding: int | None) -> Tensor:
        """(N,) rows of the ids."""
        index_N = np.searchsorted(self.keys_K, ids_N)
        if padding is not None:
            index_N[ids_N == np.uint64(padding).view(np.int64)] = len(self.keys_K)
        return torch.from_numpy(index_N)


class PlainLookup(nn.Module):
    """Replaces one module: nn.Embedding's or nn.EmbeddingBag's function on the ids of a batch."""

    def __init__(self, module: TableModule, rows: PlainRows) -> None:
        super().__init__()
        self.features, self.padding = module.features, module.padding_key
        self.mode = getattr(module, "mode", None)
        self.table = rows

    def forward(self, batch: Columns) -> Tensor:
        ids = read_ids(batch, self.features, _READER)
        index = self.table.index(ids.values, self.padding)
        weight, zeros = self.table.rows.weight, self.table.rows.padding_idx
        if self.mode is None:
            return nn.functional.embedding(index, weight, zeros, sparse=True)
        offsets = torch.from_numpy(ids.bounds())
        bags = nn.functional.embedding_bag(
            index,
            weight,
            offsets,
            mode=self.mode,
            sparse=True,
            include_last_offset=True,
            padding_idx=zeros,
        )
        return bags.view(len(self.features), ids.num_examples, -1).transpose(0, 1)


def make_twin(
    model: nn.Module, batches: Iterable[Columns], lr: float
) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The twin and its optimizers: Adam at `lr` for the dense part, and one for each table's rows.

    Args:
        batches: have all ids that the twin will read. Some may lack the features of some modules.
    """
    modules = [part for part in model.modules() if isinstance(part, TableModule)]
    keys_by_table: dict[str, list[np.ndarray[Any, Any]]] = {part.table.name: [] for part in modules}
    for batch in batches:
        for part in (part for part in modules if set(part.features) <= set(batch.keys())):
            keys_by_table[part.table.name].append(read_ids(batch, part.features, _READER).values)
    tables = {part.table.name: part.table for part in modules}
    plain = {
        name: PlainRows(table, np.unique(np.concatenate(keys_by_table[name])))
        for name, table in tables.items()
    }
    twin = copy.deepcopy(model)
    dense = list(twin.parameters())
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if isinstance(child, TableModule):
                setattr(parent, name, PlainLookup(child, plain[child.table.name]))
    optimizers = [_rows_optimizer(table, plain[name].rows) for name, table in tables.items()]
    if dense:
        optimizers.append(torch.optim.Adam(dense, lr=lr))
    return twin, optimizers


def _rows_optimizer(table: tr.Table, rows: nn.Embedding) -> torch.optim.Optimizer:
    rule = table.optimizer
    if isinstance(rule, tr.optim.Adam):
        return torch.optim.SparseAdam(rows.parameters(), rule.lr, rule.betas, rule.eps)
    if isinstance(rule, tr.optim.Adagrad) and not rule.shared:
        start = rule.initial_accumulator_value
        return torch.optim.Adagrad(
            rows.parameters(), rule.lr, initial_accumulator_value=start, eps=rule.eps
        )
    raise BenchError(f"twin: expected a rule that torch has too, found {rule}")
