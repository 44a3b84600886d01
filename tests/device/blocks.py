"""Blocks and the tables of the core that they are compared with."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import trireme as tr
from tests.tables import POOL, buckets_of, random_keys
from trireme import _core
from trireme.device import BlockLayout, RowBlock
from trireme.device.block_statistics import UpdateFacts
from trireme.optim import Rule, rule_values, values_of_group
from trireme.rows.core_table import make_core_table
from trireme.table import Table

OPTIM = tr.optim
RULES: dict[str, Rule] = {
    "sgd": OPTIM.SGD(lr=0.1, weight_decay=0.01),
    "momentum": OPTIM.SGD(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": OPTIM.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": OPTIM.Adagrad(lr=0.1, initial_accumulator_value=0.1, weight_decay=0.01),
    "shared adagrad": OPTIM.Adagrad(lr=0.1, shared=True, weight_decay=0.01),
    "adam": OPTIM.Adam(lr=0.01, weight_decay=0.01),
    "row adam": OPTIM.Adam(lr=0.01, bias_correction="row", betas=(0.8, 0.99)),
    "shared adam": OPTIM.Adam(lr=0.01, shared=True, weight_decay=0.01),
    "shared row adam": OPTIM.Adam(lr=0.01, shared=True, bias_correction="row"),
    "ftrl": OPTIM.FTRL(lr=0.1, l1=0.2, l2=0.1),
    "count": OPTIM.Count(),
    "fleet sgd": OPTIM.FleetSGD(),
    "fleet adagrad": OPTIM.FleetAdagrad(shared=False),
    "shared fleet adagrad": OPTIM.FleetAdagrad(),
    "fleet adagrad v2": OPTIM.FleetAdagradV2(),
    "fleet adam": OPTIM.FleetAdam(lr=0.01),
    "shared fleet adam": OPTIM.FleetSharedAdam(lr=0.01),
}
DIMS = (1, 5, 16, 37)


class Place(NamedTuple):
    """Where a block is, and what computes on it."""

    device: str
    kernels: str

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels: a hundred programs take 0.2 s."""
        return self == ("cpu", "triton")


HERE = Place("cpu", "auto")
NO_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no module triton: pip install triton"
)
PLACES = [
    pytest.param(Place("cpu", "torch"), id="cpu-torch"),
    pytest.param(Place("cpu", "core"), id="cpu-core"),
    pytest.param(Place("cpu", "triton"), id="cpu-triton", marks=NO_TRITON),
    pytest.param(Place("cuda", "torch"), id="cuda-torch", marks=pytest.mark.gpu),
    pytest.param(Place("cuda", "triton"), id="cuda-triton", marks=[pytest.mark.gpu, NO_TRITON]),
]


class Twin:
    """A table of the core, and a block of all its rows; slot i is of keys[i]."""

    def __init__(self, rule: Rule, *, dim: int = 5, num_rows: int = 40, **options: Any) -> None:
        declared = Table("t", dim=dim, optimizer=rule, seed=3, **options)
        self.rule, self.schema, self.num_steps = rule, declared.schema, 0
        self.rng = np.random.default_rng(7)
        self.core = make_core_table(self.schema)
        keys = random_keys(self.rng, num_rows)
        self.keys = keys[np.argsort(buckets_of(keys), kind="stable")]
        self._create()

    def _create(self) -> None:
        """Give every key a row, by an update with gradients of 0."""
        grads = np.zeros((len(self.keys), self.core.dim), np.float32)
        columns: dict[str, Any] = {}
        if self.schema.is_scored:
            columns["show_click"] = np.ones((len(self.keys), 2), np.float32)
        values = _core.RuleValues(lr=0.0)
        self.core.update(self.keys, grads, [(0, 1)], values, POOL, **columns)

    def block(self, place: Place = HERE, **options: Any) -> RowBlock:
        layout = BlockLayout.of(self.schema)
        return RowBlock(layout, self.raw_rows(), place.device, kernels=place.kernels, **options)

    def raw_rows(self) -> np.ndarray:
        """Wide rows of the table, in the order of keys."""
        row_of: dict[int, np.ndarray] = {}
        for bucket in np.unique(buckets_of(self.keys)).tolist():
            content = self.core.snapshot(bucket)
            row_of.update(zip(content.keys.tolist(), content.rows, strict=True))
        return np.stack([row_of[key] for key in self.keys.tolist()])

    def draw(self, num_ids: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of random ids, some equal, and a gradient for each."""
        slots = torch.from_numpy(self.rng.integers(0, len(self.keys), num_ids).astype(np.int32))
        grads = self.rng.standard_normal((num_ids, self.core.dim)).astype(np.float32)
        return slots, torch.from_numpy(grads)

    def values(self, **changed: Any) -> dict[str, Any]:
        """Those of the next step."""
        self.num_steps += 1
        group = dataclasses.replace(self.rule, **changed).group()
        return values_of_group(group, self.num_steps)

    def update_core(
        self,
        slots: torch.Tensor,
        grads: torch.Tensor,
        values: dict[str, Any],
        facts: UpdateFacts | None = None,
    ) -> None:
        """Update distinct rows of the table."""
        facts = facts or UpdateFacts()
        columns: dict[str, Any] = {"time": facts.time, "version": facts.version}
        if facts.show_click is not None:
            columns["show_click"] = facts.show_click.numpy()
        if facts.features is not None:
            columns["features"] = facts.features.numpy().view(np.uint32)
        ids = [(0, self.num_steps + 1)]
        keys = self.keys[slots.numpy()]
        self.core.update(keys, grads.numpy(), ids, rule_values(values), POOL, **columns)
