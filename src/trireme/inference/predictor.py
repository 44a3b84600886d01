"""The Predictor: a trained model that answers from the files of an export. Shapes: B examples, K
distinct keys of a batch, W floats per row.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trireme import _core
from trireme.data.batch import Batch
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest
from trireme.inference.dense_program import DenseProgram, load_program, update_program
from trireme.inference.export_manifest import ExportedTable, ExportManifest, unchanged_export
from trireme.inference.gathering import gather_lookups
from trireme.inference.row_layers import Layers, map_rows, merge_deltas
from trireme.nn.lookup import LookupSpec
from trireme.nn.onednn import check_onednn
from trireme.nn.planner import BatchPlan, Planner
from trireme.policy import ScorePolicy
from trireme.table import RowClassId, Table
from trireme.threads import checked_threads

TableKey = tuple[str, int]
"""Name and dim of an ExportedTable."""

DELTAS_MAX = 8
"""Most deltas that a lookup searches one after the other; more are merged into one."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """The answer of a model for a batch.

    outputs: by name, each (B, ...) as the trained model returns it; a single tensor is "output".
    num_keys: distinct keys, summed over tables. num_missing: those without a row, which get initial
        weights, as in training. version: of the training state.
    """

    outputs: dict[str, Tensor]
    num_keys: int
    num_missing: int
    version: int


@dataclass(frozen=True, eq=False)
class _ServedVersion:
    """All that an answer depends on. Replaced as a whole, never changed. `id` and `version` are
    those of the export that was opened or applied last.
    """

    id: str
    version: int
    layers: Mapping[TableKey, Layers]
    tables: Mapping[TableKey, _core.FrozenTable]
    program: DenseProgram


class Predictor:
    """A trained model from a folder that `trireme.inference.export.export_model` wrote.

    Rows stay in the files, which are mapped: processes on one machine share their pages, and
    nothing is loaded before it is looked up. The files must not be changed while they are in use.

    Threads: any may predict, also while one applies a delta; each answer is of one version.

    Args:
        folder: a base export.
        threads: that look keys up; 0: one per core.
        verify: read all files first and compare their checksums. Lengths and structure are always
            checked.
        use_onednn: let oneDNN compute the products of linear layers, as `trireme.nn.use_onednn`
            does in training.

    Raises:
        BadRequest: no export there, or a delta, or one that is replaced meanwhile; nothing for
            oneDNN. Corruption: a missing or damaged file; named.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        threads: int = 0,
        verify: bool = True,
        use_onednn: bool = False,
    ) -> None:
        folder = Path(folder)
        if use_onednn:
            check_onednn()
        self._pool, self._verify = _core.Pool(checked_threads(threads)), verify
        self._applying = threading.Lock()
        with unchanged_export(folder) as manifest:
            if manifest.is_delta:
                raise BadRequest(
                    f"Predictor: expected a base, found the delta {folder};"
                    " open its base and apply() it"
                )
            layers = {
                (part.name, part.dim): (map_rows(folder, part, has_flags=False, verify=verify),)
                for part in manifest.tables
            }
            program = load_program(folder, manifest, verify=verify, use_onednn=use_onednn)
        self.manifest = manifest
        self._planner = Planner.of_specs(_specs(manifest), pool=self._pool)
        self._served = self._serve(manifest, layers, program)

    @property
    def version(self) -> int:
        """Version of the training state that answers now."""
        return self._served.version

    @property
    def columns(self) -> dict[str, str]:
        """What a batch must have: name -> "strings", "integers" or "ids", or dtype and shape."""
        return self.manifest.columns

    def __repr__(self) -> str:
        columns = ", ".join(f"{name}: {kind}" for name, kind in self.columns.items())
        return f"Predictor(version {self.version}, {columns})"

    def predict(self, batch: Any) -> Prediction:
        """Run the model on a batch.

        Args:
            batch: a Batch; or a mapping of names to tensors, NumPy arrays, Ragged, pairs (values,
                offsets) or lists of lists of ids; or whatever else a Trainer takes. Columns that
                the model does not read, such as labels, are ignored.

        Raises:
            BadRequest: a column is missing or has another form than in training; named. DataError:
                a column that the model reads has NaN or infinity, which a Trainer refuses in the
                same columns; a Batch is taken as it is.
        """
        served = self._served
        is_checked = isinstance(batch, Batch)
        batch = as_batch(batch)
        with torch.inference_mode():
            plan = self._planner.plan(batch, train=False)
            rows, num_missing = self._rows(served, plan)
            gathered = gather_lookups(self._planner.specs, batch, plan, rows, self._pool)
            outputs = served.program(batch, gathered, is_checked=is_checked)
        num_keys = sum(len(part.keys) for part in plan.tables)
        return Prediction(outputs, num_keys, num_missing, served.version)

    def apply(self, folder: str | Path) -> None:
        """Move to the version of a delta: changed rows, removed rows, and the dense part.
        Predictions that run meanwhile are of the version before.

        Raises:
            BadRequest: no export there, or one that does not follow the last one, or is replaced
                meanwhile. Corruption: a missing or damaged file. Nothing has changed then.
        """
        folder = Path(folder)
        with self._applying:
            served = self._served
            with unchanged_export(folder) as delta:
                _check_follows(folder, delta, self.manifest, served)
                layers = {}
                for part in delta.tables:
                    new = map_rows(folder, part, has_flags=True, verify=self._verify)
                    *deltas, base = served.layers[part.name, part.dim]
                    deltas = [new, *deltas]
                    if len(deltas) > DELTAS_MAX:
                        deltas = [merge_deltas(deltas)]
                    layers[part.name, part.dim] = (*deltas, base)
                program = update_program(served.program, folder, delta, verify=self._verify)
            self._served = self._serve(delta, layers, program)

    def _serve(
        self, export: ExportManifest, layers: Mapping[TableKey, Layers], program: DenseProgram
    ) -> _ServedVersion:
        tables = {
            (table.name, table.dim): _frozen_table(table, layers[table.name, table.dim])
            for table in self.manifest.tables
        }
        return _ServedVersion(export.id, export.version, layers, tables, program)

    def _rows(
        self, served: _ServedVersion, plan: BatchPlan
    ) -> tuple[dict[RowClassId, Tensor], int]:
        """`Table.class_id` -> (K, W) rows; and how many keys have none."""
        rows, num_missing = {}, 0
        for part in plan.tables:
            rows_KW = torch.empty(len(part.keys), part.table.width)
            table = served.tables[part.table.name, part.table.dim]
            num_missing += table.lookup(part.keys, rows_KW.numpy(), self._pool)
            rows[part.table.class_id] = rows_KW
        return rows, num_missing


def _frozen_table(part: ExportedTable, layers: Layers) -> _core.FrozenTable:
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


def _specs(manifest: ExportManifest) -> list[LookupSpec]:
    tables = {part.name: _table(part, manifest) for part in manifest.tables}
    return [
        LookupSpec(
            tables[lookup.table].of_feature(lookup.features[0]),
            lookup.features,
            lookup.mode,
            lookup.padding_key,
        )
        for lookup in manifest.lookups
    ]


def _table(part: ExportedTable, manifest: ExportManifest) -> Table:
    """The table as planning needs it: the form of its keys, and the width of its rows."""
    policy = ScorePolicy(pulls_statistics=True) if part.statistics else None
    dims = {
        feature: lookup.dim
        for lookup in manifest.lookups
        if lookup.table == part.name
        for feature in lookup.features
    }
    table = Table(part.name, dims=dims, salt=part.salt, policy=policy)
    are_strings = dict.fromkeys(manifest.texts, True) | dict.fromkeys(manifest.integers, False)
    table.features.restore(are_strings)
    return table


def _check_follows(
    folder: Path, delta: ExportManifest, base: ExportManifest, served: _ServedVersion
) -> None:
    if not delta.is_delta:
        raise BadRequest(f"Predictor.apply: expected a delta, found the base {folder}")
    if delta.follows != served.id:
        raise BadRequest(
            f"Predictor.apply: expected a delta that follows version {served.version}, export"
            f" {served.id}, found {folder}, which follows version {delta.since}, export"
            f" {delta.follows}"
        )
    in_base, in_delta = _fixed(base), _fixed(delta)
    for what, expected in in_base.items():
        if in_delta[what] != expected:
            raise BadRequest(
                f"Predictor.apply: expected {what} as in the base, {expected}, found"
                f" {in_delta[what]} in {folder}"
            )


def _fixed(manifest: ExportManifest) -> dict[str, object]:
    """What a base and its deltas have in common."""
    tables = [
        replace(table, rows=0, removed=0, max_error=0.0, rms_error=0.0, files=())
        for table in manifest.tables
    ]
    names = ("lookups", "inputs", "outputs", "weights")
    return {**{name: getattr(manifest, name) for name in names}, "tables": tables}
