"""A planned batch on the device of the model: its columns, its positions and the rows of its keys.

Strings stay on the CPU, and so does the plan's part for the push.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trireme import accelerator
from trireme.data.batch import Batch, Strings
from trireme.nn.planner import BatchPlan
from trireme.table import RowClassId

Rows = Mapping[RowClassId, Tensor]


def device_of(*modules: nn.Module) -> torch.device:
    """Where the embedding modules within these modules return rows: `model.to()` moves them. Raises
    BadRequest: on several devices.
    """
    parts = [part for module in modules for part in module.modules()]
    devices = [getattr(part, "rows_device", None) for part in parts]
    on_devices = [device for device in devices if device is not None]
    return accelerator.common_device(on_devices, "embedding modules of a model")


def devices_of(model: nn.Module) -> set[torch.device]:
    """Where the model computes: the devices of its parameters, and where it returns rows."""
    return {parameter.device for parameter in model.parameters()} | {device_of(model)}


class SentBatch:
    """A batch on its way to the device of `link`, with its plan; the rows of its keys follow."""

    def __init__(self, link: accelerator.Link, batch: Batch, plan: BatchPlan) -> None:
        self._link, self._batch, self._plan = link, batch, plan
        self._sent = _SentTree(link, (batch, dict(plan.positions)))
        self._rows: _SentTree | None = None

    def send_rows(self, rows: Rows) -> None:
        """Begin to copy the rows that were pulled, on the CPU or there already."""
        self._rows = _SentTree(self._link, dict(rows))

    def receive(self) -> tuple[Batch, BatchPlan, Rows]:
        """For what this thread computes from now on. Requires: `send_rows`."""
        assert self._rows is not None
        rows: Rows = self._rows.receive()
        batch, positions = self._sent.receive()
        if batch is self._batch:
            return batch, self._plan, rows
        batch.stream, batch.position = self._batch.stream, self._batch.position
        batch.epoch = self._batch.epoch
        return batch, self._plan.at(positions), rows


class _SentTree:
    """Tensors in containers, on their way to the device; itself if that is the CPU."""

    def __init__(self, link: accelerator.Link, tree: Any) -> None:
        self._tree = tree
        self._sent: accelerator.Sent | None = None
        if link.is_host:
            return
        self._leaves, self._spec = pytree.tree_flatten(
            tree, is_leaf=lambda one: isinstance(one, Strings)
        )
        distinct = {id(leaf): leaf for leaf in self._leaves if isinstance(leaf, Tensor)}
        self._ids = list(distinct)
        self._sent = link.send(list(distinct.values()))

    def receive(self) -> Any:
        if self._sent is None:
            return self._tree
        moved = dict(zip(self._ids, self._sent.receive(), strict=True))
        leaves = [moved.get(id(leaf), leaf) for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)
