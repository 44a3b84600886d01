"""Write a trained model for inference: every worker calls, worker 0 acts."""

from __future__ import annotations

import copy
import io
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from trireme import accelerator
from trireme.checkpoint.worker_side.server_operations import SAVE_TIMEOUT_S
from trireme.errors import BadRequest, Corruption, check_choice
from trireme.inference.dense_program import input_tensor
from trireme.inference.export.dense_part import export_program, program_weights
from trireme.inference.export.example import ExampleBatch
from trireme.inference.export_manifest import (
    MANIFEST,
    PROGRAM,
    WEIGHTS,
    ExportedTable,
    ExportFile,
    ExportManifest,
    ModuleLookup,
    read_manifest,
)
from trireme.nn.lookup import LookupSpec
from trireme.nn.on_device import device_of
from trireme.rows.frozen_rows import DTYPES
from trireme.storage.atomic_folder import new_folder
from trireme.storage.checked_file import written_for_mapping
from trireme.table import Table
from trireme.train.first_worker import let_first_worker
from trireme.train.loop.scoring import in_mode
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.trainer import Trainer, optimizer_of

log = logging.getLogger("trireme")


@dataclass(frozen=True)
class Export:
    """What was written.

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


def export_model(
    trainer: Trainer | DistributedOptimizer,
    path: str | Path,
    *,
    batch: Any,
    follows: str | Path | None = None,
    dtype: str | None = None,
    model: nn.Module | None = None,
) -> Export:
    """Write a trained model for `trireme.inference.Predictor`. Every worker calls it.

    Args:
        trainer: a trainer, or the optimizer of a plain loop.
        path: a new folder, on storage that servers and worker 0 share.
        batch: worker 0's: an example of the batches to predict, with some ids of each feature.
        follows: None: write everything, a base. The folder of an export: write a delta, what has
            changed since then (rows, removed keys, the dense part), for Predictor.apply.
        dtype: of stored weights: "float32", "float16", or "int8" with a scale per row. None:
            float32; in a delta that of the export it follows.
        model: write this part of the model in place of the whole.

    Raises:
        BadRequest: the folder exists or is outside the servers' root; torch.export cannot take the
            model; weights that the dtype cannot hold; a delta that follows no export of this run,
            for example one written before a checkpoint was loaded; a pass on a device.
    """
    if dtype is not None:
        check_choice("export_model", DTYPES, dtype=dtype)
    optimizer = optimizer_of(trainer)
    optimizer.mode.check_between_passes("export_model")
    exported = optimizer.model if model is None else model
    optimizer.flush()
    cluster = optimizer.cluster
    cluster.client.coordinator.gather({}, [], purpose="export_model")
    optimizer.refresh()

    def act() -> dict[str, Any]:
        return asdict(_export(optimizer, exported, Path(path).absolute(), batch, follows, dtype))

    done = let_first_worker(cluster, "export_model", act)
    errors = {name: (largest, rms) for name, (largest, rms) in done.pop("row_errors").items()}
    return Export(**done, row_errors=errors)


def _export(
    optimizer: DistributedOptimizer,
    model: nn.Module,
    path: Path,
    batch: Any,
    follows: str | Path | None,
    dtype: str | None,
) -> Export:
    cluster, model = optimizer.cluster, _on_host(model, optimizer.tables)
    previous = None if follows is None else read_manifest(Path(follows))
    body: dict[str, Any] = {"mode": "inference", "follows": "" if previous is None else previous.id}
    with new_folder(path) as folder, in_mode(model, training=False):
        versions = cluster.client.servers.ask("coord.export", body, aside=True).body
        example = ExampleBatch(cluster, model, batch)
        writer = _FolderWriter(optimizer, Path(folder), versions)
        if previous is None:
            manifest = _write_base(writer, example, dtype or DTYPES[0])
        else:
            manifest = _write_delta(writer, example, previous, dtype)
        writer.write(MANIFEST, manifest.to_json().encode())
    body |= {"id": manifest.id, "version": manifest.version}
    cluster.client.servers.ask("coord.published", body, aside=True)
    export = _export_of(path, manifest)
    log.info(
        "saved %s: version %d, %d rows; outputs differ from the model's by at most %.3g (rms %.3g)",
        *(path, export.version, export.rows, export.max_error, export.rms_error),
    )
    return export


def _on_host(model: nn.Module, tables: Sequence[Table]) -> nn.Module:
    """The model on the CPU, where an export predicts; a copy if it is elsewhere."""
    on_devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if on_devices | {device_of(model)} <= {accelerator.HOST}:
        return model
    return copy.deepcopy(model, {id(table): table for table in tables}).to(accelerator.HOST)


def _write_base(writer: _FolderWriter, example: ExampleBatch, dtype: str) -> ExportManifest:
    program, inputs, outputs = export_program(example)
    packed = io.BytesIO()
    torch.export.save(program, packed)
    stored = example.gathered(dtype)
    answers = program.module()(*(input_tensor(one, example.batch, stored) for one in inputs))
    max_error, rms_error = _difference(outputs, answers)
    return ExportManifest(
        id=uuid.uuid4().hex,
        follows=None,
        version=writer.version,
        since=0,
        tables=writer.save_tables(example.tables, dtype),
        lookups=tuple(map(_module_lookup, example.planner.specs)),
        inputs=inputs,
        outputs=tuple(outputs),
        weights=_shapes(program_weights(example.model)),
        max_error=max_error,
        rms_error=rms_error,
        dense=writer.write(PROGRAM, packed.getvalue()),
        texts=example.texts,
        integers=example.integers,
    )


def _write_delta(
    writer: _FolderWriter, example: ExampleBatch, previous: ExportManifest, dtype: str | None
) -> ExportManifest:
    """The rows that have changed, and the parameters; the program is that of the base."""
    kept = previous.tables[0].dtype if previous.tables else DTYPES[0]
    if dtype not in (None, kept):
        raise BadRequest(
            f"export_model: expected dtype {kept} in a delta, as in what it follows, found {dtype}"
        )
    outputs = example.outputs(example.gathered())
    weights = program_weights(example.model)
    lookups = tuple(map(_module_lookup, example.planner.specs))
    actual = (lookups, tuple(outputs), _shapes(weights))
    expected = (previous.lookups, previous.outputs, previous.weights)
    if actual != expected:
        raise BadRequest(
            f"export_model: expected a model as of export {previous.id}, with lookups, outputs and"
            f" weights {expected}, found {actual}"
        )
    max_error, rms_error = _difference(outputs, example.outputs(example.gathered(kept)))
    return replace(
        previous,
        id=uuid.uuid4().hex,
        follows=previous.id,
        version=writer.version,
        since=writer.since,
        tables=writer.save_tables(example.tables, kept),
        max_error=max_error,
        rms_error=rms_error,
        dense=writer.write(WEIGHTS, save_tensors(weights)),
    )


class _FolderWriter:
    """Writes the folder of an export, and has the servers write their rows there."""

    def __init__(
        self, optimizer: DistributedOptimizer, folder: Path, versions: Mapping[str, Any]
    ) -> None:
        self._client, self._time = optimizer.cluster.client, optimizer.data_time.seconds()
        self._folder = folder
        self.version, self.since = int(versions["version"]), int(versions["since"])
        self._forget = int(versions["forget"])

    def write(self, name: str, data: bytes) -> ExportFile:
        with written_for_mapping(self._folder, name) as (file, entry):
            file.write(data)
        return ExportFile(**entry)

    def save_tables(self, tables: Sequence[Table], dtype: str) -> tuple[ExportedTable, ...]:
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
        replies = self._client.servers.everywhere("export.save", body, timeout_s=SAVE_TIMEOUT_S)
        by_table = zip(*(reply.body["tables"] for reply in replies), strict=True)
        saved = tuple(
            _exported_table(table, dtype, shards)
            for table, shards in zip(tables, by_table, strict=True)
        )
        for file in (file for table in saved for file in table.files):
            path = self._folder / file.path
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise Corruption(
                    f"export_model: expected {path} of {file.bytes} bytes, found none or another;"
                    " the folder must be on storage that all servers and worker 0 share"
                )
        return saved


def _exported_table(table: Table, dtype: str, shards: Sequence[Mapping[str, Any]]) -> ExportedTable:
    """One table, or part of it, from what each server has written of it."""
    num_rows = sum(shard["rows"] for shard in shards)
    squares = sum(shard["sum_of_squares"] for shard in shards)
    return ExportedTable(
        name=table.name,
        dim=table.dim,
        statistics=table.width - table.dim,
        dtype=dtype,
        initializer=table.schema.initializer,
        seed=table.seed,
        initial_weights=_num_initial_weights(table),
        initial_dtype=table.schema.dtype,
        salt=table.salt,
        rows=num_rows,
        removed=sum(shard["removed"] for shard in shards),
        max_error=max(shard["max_error"] for shard in shards),
        rms_error=math.sqrt(squares / max(num_rows * table.dim, 1)),
        files=tuple(ExportFile(**file) for shard in shards for file in shard["files"]),
    )


def _num_initial_weights(table: Table) -> int:
    """How many weights of a key without a row are initial ones; the others are zeros."""
    if table.schema.absent == "zeros":
        return 0
    return table.dim if table.schema.head_class is None else 1


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def _module_lookup(spec: LookupSpec) -> ModuleLookup:
    return ModuleLookup(
        name=spec.name,
        table=spec.table.name,
        dim=spec.table.dim,
        features=spec.features,
        mode=spec.mode,
        padding_key=spec.padding_key,
    )


def _difference(exact: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> tuple[float, float]:
    """The largest and the root mean square difference over all outputs. Raises BadRequest: they
    are not finite.
    """
    differences = {name: (exact[name].double() - stored[name].double()).flatten() for name in exact}
    for name, one in differences.items():
        if not one.isfinite().all():
            raise BadRequest(
                "export_model: expected finite outputs for the example batch, found others in"
                f" {name!r}"
            )
    difference = torch.cat(list(differences.values()))
    if difference.numel() == 0:
        return 0.0, 0.0
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


def _export_of(path: Path, manifest: ExportManifest) -> Export:
    errors = {}
    for name in dict.fromkeys(table.name for table in manifest.tables):
        parts = [table for table in manifest.tables if table.name == name]
        num_weights = sum(part.rows * part.dim for part in parts)
        squares = sum(part.rms_error**2 * part.rows * part.dim for part in parts)
        rms = math.sqrt(squares / max(num_weights, 1))
        errors[name] = (max(part.max_error for part in parts), rms)
    return Export(
        path=str(path),
        version=manifest.version,
        rows=sum(table.rows for table in manifest.tables),
        row_errors=errors,
        max_error=manifest.max_error,
        rms_error=manifest.rms_error,
    )
