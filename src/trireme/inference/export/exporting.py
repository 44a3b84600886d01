"""Writing a trained model for inference: worker 0 acts, the others wait."""

from __future__ import annotations

import io
import logging
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from trireme import _core
from trireme.checkpoint.worker_side.calls import SAVE_TIMEOUT_S
from trireme.data.batch import Batch
from trireme.errors import BadRequest, Corruption
from trireme.inference.columns import batch_of
from trireme.inference.export.dense_graph import export_graph, weights_of, widened
from trireme.inference.gathering import gather_readings
from trireme.inference.graph import input_tensor
from trireme.inference.manifest import (
    GRAPH,
    MANIFEST,
    WEIGHTS,
    File,
    Lookup,
    Manifest,
    TablePart,
    read_manifest,
)
from trireme.job.cluster import Cluster
from trireme.nn.plan import Planner, Reading
from trireme.protocol.frozen_rows import DTYPES, encode
from trireme.storage.folders import published, written
from trireme.table import Table
from trireme.train.checkpointing.checkpoint import let_first_worker
from trireme.train.loop.scoring import outputs_by_name
from trireme.train.optimizer import DistributedOptimizer

log = logging.getLogger("trireme")


@dataclass(frozen=True)
class Export:
    """What has been written.

    path: of the folder.
    version: of the training state. rows: in all files; of a delta, those that have changed.
    row_errors: table -> (largest, root mean square) difference of stored from trained weights.
    max_error, rms_error: of the outputs for the example batch against the trained model's.
    """

    path: str
    version: int
    rows: int
    row_errors: dict[str, tuple[float, float]]
    max_error: float
    rms_error: float


@dataclass(frozen=True)
class Wish:
    """What to write, as Trainer.save_inference_model says.

    dtype: None: float32, or that of the export that a delta follows.
    follows: of a delta: the folder of the export that it goes on from.
    """

    model: nn.Module
    path: Path
    example: Any
    dtype: str | None
    follows: Path | None


def save(optimizer: DistributedOptimizer, wish: Wish) -> Export:
    """Write a model for inference; every worker calls it. See Trainer.save_inference_model."""
    if wish.dtype not in (None, *DTYPES):
        raise BadRequest(
            f"save_inference_model: expected dtype one of {', '.join(DTYPES)}, found {wish.dtype!r}"
        )
    optimizer.flush()
    cluster = optimizer.cluster
    cluster.client.gather({}, [], purpose="save_inference_model")
    optimizer.refresh()

    def act() -> dict[str, Any]:
        return asdict(_save(optimizer, wish))

    done = let_first_worker(cluster, "save_inference_model", act)
    errors = {name: (largest, rms) for name, (largest, rms) in done.pop("row_errors").items()}
    return Export(**done, row_errors=errors)


def _save(optimizer: DistributedOptimizer, wish: Wish) -> Export:
    cluster = optimizer.cluster
    path = wish.path.absolute()
    follows = None if wish.follows is None else read_manifest(wish.follows)
    body: dict[str, Any] = {"mode": "inference", "follows": "" if follows is None else follows.id}
    with published(path) as folder, _evaluating(wish.model):
        versions = cluster.client.ask_coordinator("coord.export", body)
        trial = _Trial(cluster, wish.model, wish.example)
        draft = _Draft(optimizer, folder, versions)
        if follows is None:
            manifest = _base(draft, trial, wish.dtype or DTYPES[0])
        else:
            manifest = _delta(draft, trial, follows, wish.dtype)
        draft.write(MANIFEST, manifest.to_json().encode())
    body |= {"id": manifest.id, "version": manifest.version}
    cluster.client.ask_coordinator("coord.published", body)
    return _reported(path, manifest)


def _base(draft: _Draft, trial: _Trial, dtype: str) -> Manifest:
    program, inputs, outputs = export_graph(
        trial.model, trial.batch, trial.planner.readings, trial.gathered()
    )
    packed = io.BytesIO()
    torch.export.save(program, packed)
    stored = trial.gathered(dtype)
    answers = program.module()(*(input_tensor(one, trial.batch, stored) for one in inputs))
    max_error, rms_error = _difference(outputs, answers)
    return Manifest(
        id=uuid.uuid4().hex,
        follows=None,
        version=draft.version,
        since=0,
        tables=draft.save_tables(trial.tables, dtype),
        lookups=tuple(map(_lookup, trial.planner.readings)),
        inputs=inputs,
        outputs=tuple(outputs),
        weights=_shapes(weights_of(trial.model)),
        max_error=max_error,
        rms_error=rms_error,
        dense=draft.write(GRAPH, packed.getvalue()),
    )


def _delta(draft: _Draft, trial: _Trial, follows: Manifest, dtype: str | None) -> Manifest:
    """The rows that have changed, and the parameters; the program is that of the base."""
    kept = follows.tables[0].dtype if follows.tables else DTYPES[0]
    if dtype not in (None, kept):
        raise BadRequest(
            f"save_inference_model: expected dtype {kept} in a delta, as in what it follows, found"
            f" {dtype}"
        )
    outputs = trial.outputs(trial.gathered())
    weights = weights_of(trial.model)
    found = (tuple(map(_lookup, trial.planner.readings)), tuple(outputs), _shapes(weights))
    expected = (follows.lookups, follows.outputs, follows.weights)
    if found != expected:
        raise BadRequest(
            f"save_inference_model: expected a model as of export {follows.id}, with lookups,"
            f" outputs and weights {expected}, found {found}"
        )
    max_error, rms_error = _difference(outputs, trial.outputs(trial.gathered(kept)))
    return replace(
        follows,
        id=uuid.uuid4().hex,
        follows=follows.id,
        version=draft.version,
        since=draft.since,
        tables=draft.save_tables(trial.tables, kept),
        max_error=max_error,
        rms_error=rms_error,
        dense=draft.write(WEIGHTS, save_tensors(weights)),
    )


class _Trial:
    """An example batch and the rows of its keys: what a model is exported and measured with.

    tables: that the model reads; of one whose features have dims of their own, those parts.
    """

    def __init__(self, cluster: Cluster, model: nn.Module, example: Any) -> None:
        self.model = model
        self.planner = Planner(model, pool=cluster.pool)
        self.batch = widened(batch_of(example))
        self._pool = cluster.pool
        self._plan = self.planner.plan(self.batch, train=False)
        self.tables = tuple(dict.fromkeys(reading.table for reading in self.planner.readings))
        for table in self.planner.tables:
            cluster.ensure_table(table)
        pulled = cluster.pull(
            {part.table.part: part.keys for part in self._plan.tables}, training=False
        )
        self._rows = {name: _core.borrow(rows) for name, rows in pulled.rows.items()}

    def gathered(self, dtype: str = "float32") -> dict[str, Tensor]:
        """What the embedding modules return, from rows as they are stored."""
        rows = {}
        for table in self.tables:
            rows_KW = self._rows[table.part].copy()
            weights = rows_KW[:, table.width - table.dim :]
            weights[:] = encode(weights, dtype, table.name)[1]
            rows[table.part] = torch.from_numpy(rows_KW)
        return gather_readings(self.planner.readings, self.batch, self._plan, rows, self._pool)

    def outputs(self, gathered: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the model returns, by name."""
        with torch.no_grad():
            batch = Batch(dict(self.batch.items()), None, dict(gathered))
            return outputs_by_name(self.model(batch))


class _Draft:
    """A folder that is being written."""

    def __init__(
        self, optimizer: DistributedOptimizer, folder: Path, versions: Mapping[str, Any]
    ) -> None:
        self._cluster, self._time = optimizer.cluster, optimizer.data_time()
        self._folder = folder
        self.version, self.since = int(versions["version"]), int(versions["since"])
        self._forget = int(versions["forget"])

    def write(self, name: str, data: bytes) -> File:
        with written(self._folder / name) as (file, entry):
            file.write(data)
        return File(path=name, **entry)

    def save_tables(self, tables: Sequence[Table], dtype: str) -> tuple[TablePart, ...]:
        """Let every server write its rows."""
        body = {
            "path": str(self._folder),
            "tables": [table.name for table in tables],
            "classes": [table.row_class for table in tables],
            "dtype": dtype,
            "version": self.version,
            "since": self.since,
            "forget": self._forget,
            "time": self._time,
        }
        client = self._cluster.client
        replies = client.everywhere("export.save", body, timeout_s=SAVE_TIMEOUT_S)
        parts = zip(*(reply.body["tables"] for reply in replies), strict=True)
        saved = tuple(_merged(table, dtype, of) for table, of in zip(tables, parts, strict=True))
        for file in (file for part in saved for file in part.files):
            path = self._folder / file.path
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise Corruption(
                    f"save_inference_model: expected {path} of {file.bytes} bytes, found none or"
                    " another; the folder must be on storage that all servers and worker 0 share"
                )
        return saved


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training


def _merged(table: Table, dtype: str, parts: Sequence[Mapping[str, Any]]) -> TablePart:
    """What the servers say of one table, or part of it."""
    num_rows = sum(part["rows"] for part in parts)
    squares = sum(part["sum_of_squares"] for part in parts)
    return TablePart(
        name=table.name,
        dim=table.dim,
        statistics=table.width - table.dim,
        dtype=dtype,
        initializer=table.schema.initializer,
        seed=table.seed,
        initial_weights=_initial_weights(table),
        initial_dtype=table.schema.dtype,
        salt=table.salt,
        rows=num_rows,
        removed=sum(part["removed"] for part in parts),
        max_error=max(part["max_error"] for part in parts),
        rms_error=math.sqrt(squares / max(num_rows * table.dim, 1)),
        files=tuple(File(**file) for part in parts for file in part["files"]),
    )


def _initial_weights(table: Table) -> int:
    """How many weights of a key without a row are initial ones."""
    if table.schema.absent == "zeros":
        return 0
    return table.dim if table.schema.head_class is None else 1


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def _lookup(reading: Reading) -> Lookup:
    return Lookup(
        name=reading.name,
        table=reading.table.name,
        dim=reading.table.dim,
        features=reading.features,
        mode=reading.mode,
        padding_key=reading.padding_key,
    )


def _difference(exact: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> tuple[float, float]:
    """The largest and the root mean square difference over all outputs."""
    difference = torch.cat([(exact[name] - stored[name]).double().flatten() for name in exact])
    if difference.numel() == 0:
        return 0.0, 0.0
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


def _row_errors(parts: Sequence[TablePart]) -> dict[str, tuple[float, float]]:
    """Of each table, over all its dims."""
    errors = {}
    for name in dict.fromkeys(part.name for part in parts):
        of_table = [part for part in parts if part.name == name]
        num_weights = sum(part.rows * part.dim for part in of_table)
        squares = sum(part.rms_error**2 * part.rows * part.dim for part in of_table)
        rms = math.sqrt(squares / max(num_weights, 1))
        errors[name] = (max(part.max_error for part in of_table), rms)
    return errors


def _reported(path: Path, manifest: Manifest) -> Export:
    export = Export(
        path=str(path),
        version=manifest.version,
        rows=sum(part.rows for part in manifest.tables),
        row_errors=_row_errors(manifest.tables),
        max_error=manifest.max_error,
        rms_error=manifest.rms_error,
    )
    log.info(
        "saved %s: version %d, %d rows; outputs differ from the model's by at most %.3g (rms %.3g)",
        path,
        export.version,
        export.rows,
        export.max_error,
        export.rms_error,
    )
    return export
