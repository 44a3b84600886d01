"""The Predictor: what a trained model answers, from the files of an export.

Shapes: B examples, K distinct keys of a batch, W floats per row.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trireme import _core
from trireme.errors import BadRequest
from trireme.inference.columns import batch_of
from trireme.inference.gathering import gather_readings
from trireme.inference.graph import DenseGraph, load_graph, updated_graph
from trireme.inference.layers import Layers, map_rows, merge_deltas
from trireme.inference.manifest import Manifest, TablePart, read_manifest
from trireme.nn.plan import Plan, Planner, Reading
from trireme.policy import ScorePolicy
from trireme.table import RowClassId, Table

Part = tuple[str, int]
"""Name and dim of a TablePart."""

DELTAS_MAX = 8
"""Deltas that a lookup asks one after the other; more are merged into one."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model makes of a batch.

    outputs: by name, each (B, ...) as the trained model returns it; "output" where that is one
        tensor.
    num_keys: distinct keys that were looked up, per table and added up.
    num_missing: those of them without a row; they were answered as in training.
    version: of the training state that answered.
    """

    outputs: dict[str, Tensor]
    num_keys: int
    num_missing: int
    version: int


@dataclass(frozen=True, eq=False)
class _State:
    """All that an answer depends on. Never changed, only replaced.

    id, version: of the export that was opened or applied last.
    """

    id: str
    version: int
    layers: Mapping[Part, Layers]
    tables: Mapping[Part, _core.FrozenTable]
    graph: DenseGraph


class Predictor:
    """A trained model from a folder that `Trainer.save_inference_model` wrote.

    Rows stay in the files, which are mapped: processes on one machine share their pages, and
    nothing is loaded before it is looked up. The files must not be changed while they are in use.

    Threads: any may predict, also while one applies deltas: an answer is of one version.

    Args:
        folder: a base export.
        threads: that look keys up; 0: as many as there are cores.
        verify: whether to read all files first and compare their checksums. Lengths and structure
            are checked in any case.

    Raises:
        BadRequest: there is no export, or it is a delta.
        Corruption: a file is missing or damaged; the message names it.
    """

    def __init__(self, folder: str | Path, *, threads: int = 0, verify: bool = True) -> None:
        folder = Path(folder)
        self.manifest = manifest = read_manifest(folder)
        if manifest.is_delta:
            raise BadRequest(
                f"Predictor: expected a base, found the delta {folder};"
                " open its base and apply() it"
            )
        self._pool = _core.Pool(threads or _num_cores())
        self._planner = Planner.of_readings(_readings(manifest), pool=self._pool)
        self._verify = verify
        self._applying = threading.Lock()
        layers = {
            (part.name, part.dim): (map_rows(folder, part, has_flags=False, verify=verify),)
            for part in manifest.tables
        }
        graph = load_graph(folder, manifest, verify=verify)
        self._state = _State(manifest.id, manifest.version, layers, self._tables(layers), graph)

    @property
    def version(self) -> int:
        """Of the training state that answers now."""
        return self._state.version

    def predict(self, batch: Any) -> Prediction:
        """What the trained model answers for a batch.

        Args:
            batch: a Batch; or a mapping of names to tensors, NumPy arrays, Ragged, pairs (values,
                offsets) or lists of lists of ids; or what else a Trainer takes. Columns that the
                model does not read, labels say, may be there.

        Raises:
            BadRequest: a column is missing or has another form than in training; the message names
                it.
        """
        state = self._state
        batch = batch_of(batch)
        with torch.inference_mode():
            plan = self._planner.plan(batch, train=False)
            rows, num_missing = self._rows(state, plan)
            gathered = gather_readings(self._planner.readings, batch, plan, rows, self._pool)
            outputs = state.graph(batch, gathered)
        num_keys = sum(len(part.keys) for part in plan.tables)
        return Prediction(outputs, num_keys, num_missing, state.version)

    def apply(self, folder: str | Path) -> None:
        """Go on to the version of a delta: rows that have changed, rows removed, and the dense
        part. Predictions that run meanwhile are of the version before.

        Raises:
            BadRequest: no export, or one that does not follow the export applied last.
            Corruption: a file is missing or damaged. Nothing has changed then.
        """
        folder = Path(folder)
        with self._applying:
            state = self._state
            delta = read_manifest(folder)
            _check_follows(folder, delta, self.manifest, state)
            layers = {}
            for part in delta.tables:
                new = map_rows(folder, part, has_flags=True, verify=self._verify)
                *deltas, base = state.layers[part.name, part.dim]
                deltas = [new, *deltas]
                if len(deltas) > DELTAS_MAX:
                    deltas = [merge_deltas(deltas)]
                layers[part.name, part.dim] = (*deltas, base)
            graph = updated_graph(state.graph, folder, delta, verify=self._verify)
            self._state = _State(delta.id, delta.version, layers, self._tables(layers), graph)

    def _tables(self, layers: Mapping[Part, Layers]) -> dict[Part, _core.FrozenTable]:
        return {
            (part.name, part.dim): _frozen_table(part, layers[part.name, part.dim])
            for part in self.manifest.tables
        }

    def _rows(self, state: _State, plan: Plan) -> tuple[dict[RowClassId, Tensor], int]:
        """`Table.class_id` -> (K, W), and how many keys had no row."""
        rows, num_missing = {}, 0
        for part in plan.tables:
            rows_KW = torch.empty(len(part.keys), part.table.width)
            table = state.tables[part.table.name, part.table.dim]
            num_missing += table.lookup(part.keys, rows_KW.numpy(), self._pool)
            rows[part.table.class_id] = rows_KW
        return rows, num_missing


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _frozen_table(part: TablePart, layers: Layers) -> _core.FrozenTable:
    kind, a, b = part.initializer
    return _core.FrozenTable(
        list(layers),
        initializer=kind,
        init_a=a,
        init_b=b,
        seed=part.seed,
        initial_weights=part.initial_weights,
        dtype=part.initial_dtype,
    )


def _readings(manifest: Manifest) -> list[Reading]:
    tables = {part.name: _table(part, manifest) for part in manifest.tables}
    return [
        Reading(
            tables[lookup.table].of_feature(lookup.features[0]),
            lookup.features,
            lookup.mode,
            lookup.padding_key,
        )
        for lookup in manifest.lookups
    ]


def _table(part: TablePart, manifest: Manifest) -> Table:
    """As far as planning needs it: what keys are, and how wide rows."""
    policy = ScorePolicy(pulls_statistics=True) if part.statistics else None
    dims = {
        feature: lookup.dim
        for lookup in manifest.lookups
        if lookup.table == part.name
        for feature in lookup.features
    }
    return Table(part.name, dims=dims, salt=part.salt, policy=policy)


def _check_follows(folder: Path, delta: Manifest, base: Manifest, state: _State) -> None:
    if not delta.is_delta:
        raise BadRequest(f"Predictor.apply: expected a delta, found the base {folder}")
    if delta.follows != state.id:
        raise BadRequest(
            f"Predictor.apply: expected a delta that follows version {state.version}, export"
            f" {state.id}, found {folder}, which follows version {delta.since}, export"
            f" {delta.follows}"
        )
    for field in ("lookups", "inputs", "outputs", "weights"):
        ours, found = getattr(base, field), getattr(delta, field)
        if ours != found:
            raise BadRequest(
                f"Predictor.apply: expected {field} as in the base, {ours}, found {found} in"
                f" {folder}"
            )
    ours, found = (
        [replace(t, rows=0, removed=0, max_error=0.0, rms_error=0.0, files=()) for t in m.tables]
        for m in (base, delta)
    )
    if ours != found:
        raise BadRequest(
            f"Predictor.apply: expected tables as in the base, {ours}, found {found} in {folder}"
        )
