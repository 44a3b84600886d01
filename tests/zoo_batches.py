"""Batches for models of the zoo whose columns depend on each other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trireme.data import Batch, Ragged


def _column(values: torch.Tensor) -> Ragged:
    """One bag for each row."""
    num, size = values.shape
    return Ragged(values.flatten(), torch.arange(num + 1) * size)


def _dpin(num: int = 6) -> Batch:
    ids = {"hist_item": 30, "hist_cat": 30, "target_item": 1, "target_cat": 1}
    columns = {name: _column(torch.randint(1, 50, (num, size))) for name, size in ids.items()}
    position = _column(torch.randint(1, 4, (num, 1)))
    return Batch({**columns, "target_pos": position, "label": (torch.arange(num) % 2).float()})


def _sign(num: int = 6) -> Batch:
    nodes, pairs = torch.randint(0, 50, (num, 2)), torch.tensor([[0, 0, 0, 1, 1, 1]])
    label = torch.eye(2)[torch.arange(num) % 2]
    columns = {"nodes": _column(nodes), "edges": _column(pairs.repeat(num, 1))}
    return Batch({**columns, "ends": _column(nodes[:, pairs[0]]), "label": label})


def _maml(num: int = 1) -> Batch:
    columns = {}
    for part, size in (("support", 5), ("query", 75)):
        columns[part] = torch.randn(num, size * 28 * 28)
        columns[f"{part}_label"] = torch.arange(5.0).repeat(num, size // 5)
    return Batch(columns)


def _metaheac(num: int = 2) -> Batch:
    columns = {}
    for part in ("support", "query"):
        users = [
            torch.cat([torch.randint(0, 50, (4 * 57,)), torch.full((4 * 7,), 3), torch.arange(24)])
            for _ in range(5 * num)
        ]
        columns[part] = _column(torch.cat(users).view(num, -1))
        columns[f"{part}_label"] = _column((torch.arange(20) % 2).repeat(num, 1))
    return Batch(columns)


OWN_BATCHES: dict[str, Callable[..., Batch]] = {
    "dpin": _dpin,
    "maml": _maml,
    "metaheac": _metaheac,
    "sign": _sign,
}
"""By model: a batch of so many examples, or of a default."""
