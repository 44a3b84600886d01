"""Writing a trained model for inference: worker 0 acts, the others wait."""

from __future__ import annotations

import io
import logging
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trireme import _core
from trireme.cluster import Cluster
from trireme.data.batch import Batch
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest, Corruption
from trireme.inference.gathering import gather_readings
from trireme.inference.graph import input_tensor
from trireme.inference.manifest import GRAPH, MANIFEST, File, Lookup, Manifest, TablePart
from trireme.nn.plan import Planner, Reading
from trireme.ps.checkpoint import SAVE_TIMEOUT_S
from trireme.ps.folders import published, written
from trireme.ps.frozen import DTYPES, encode
from trireme.table import Table
from trireme.train.checkpoint import let_first_worker
from trireme.train.graph import export_graph
from trireme.train.optimizer import DistributedOptimizer

log = logging.getLogger("trireme")


@dataclass(frozen=True)
class Export:
    """What has been written.

    path: of the folder.
    version: of the training state. rows: of all tables; of a delta, those that have changed.
    row_errors: table -> (largest, root mean square) difference of stored from trained weights.
    max_error, rms_error: of the outputs for the example batch against the trained model's.
    """

    path: str
    version: int
    rows: int
    row_errors: dict[str, tuple[float, float]]
    max_error: float
    rms_error: float


def save(
    optimizer: DistributedOptimizer, model: nn.Module, path: str | Path, example: Any, dtype: str
) -> Export:
    """Write a model for inference; every worker calls it. See Trainer.save_inference_model."""
    if dtype not in DTYPES:
        raise BadRequest(
            f"save_inference_model: expected dtype one of {', '.join(DTYPES)}, found {dtype!r}"
        )
    optimizer.flush()
    cluster = optimizer.cluster
    cluster.client.gather({}, [], purpose="save_inference_model")
    optimizer.refresh()

    def act() -> dict[str, Any]:
        return asdict(_save_base(cluster, model, Path(path), example, dtype))

    done = let_first_worker(cluster, "save_inference_model", act)
    errors = {name: (largest, rms) for name, (largest, rms) in done.pop("row_errors").items()}
    return Export(**done, row_errors=errors)


def _save_base(cluster: Cluster, model: nn.Module, path: Path, example: Any, dtype: str) -> Export:
    path = path.absolute()
    with published(path) as folder, _evaluating(model):
        trial = _Trial(cluster, model, example)
        program, inputs, outputs = export_graph(
            model, trial.batch, trial.planner.readings, trial.gathered()
        )
        packed = io.BytesIO()
        torch.export.save(program, packed)
        stored = trial.gathered(dtype)
        answers = program.module()(*(input_tensor(one, trial.batch, stored) for one in inputs))
        max_error, rms_error = _difference(outputs, answers)
        manifest = Manifest(
            id=uuid.uuid4().hex,
            follows=None,
            version=1,
            since=0,
            tables=_save_tables(cluster, trial.planner.tables, folder, dtype),
            lookups=tuple(map(_lookup, trial.planner.readings)),
            inputs=inputs,
            outputs=tuple(outputs),
            max_error=max_error,
            rms_error=rms_error,
            dense=_write(folder, GRAPH, packed.getvalue()),
        )
        _write(folder, MANIFEST, manifest.to_json().encode())
    return _reported(path, manifest)


class _Trial:
    """An example batch and the rows of its keys: what a model is exported and measured with."""

    def __init__(self, cluster: Cluster, model: nn.Module, example: Any) -> None:
        self.planner = Planner(model, pool=cluster.pool)
        self.batch: Batch = as_batch(example)
        self._pool = cluster.pool
        self._plan = self.planner.plan(self.batch, train=False)
        for table in self.planner.tables:
            cluster.ensure_table(table)
        pulled = cluster.pull({part.table.name: part.keys for part in self._plan.tables})
        self._rows = {name: _core.borrow(rows) for name, rows in pulled.rows.items()}

    def gathered(self, dtype: str = "float32") -> dict[str, Tensor]:
        """What the embedding modules return, from rows as they are stored."""
        rows = {
            name: torch.from_numpy(encode(rows_KD, dtype, name)[1])
            for name, rows_KD in self._rows.items()
        }
        return gather_readings(self.planner.readings, self.batch, self._plan, rows, self._pool)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training


def _save_tables(
    cluster: Cluster, tables: Sequence[Table], folder: Path, dtype: str
) -> tuple[TablePart, ...]:
    """Let every server write its rows into `folder`."""
    body = {
        "path": str(folder),
        "tables": [table.name for table in tables],
        "dtype": dtype,
        "since": 0,
    }
    replies = cluster.client.everywhere("export.save", body, timeout_s=SAVE_TIMEOUT_S)
    parts = zip(*(reply.body["tables"] for reply in replies), strict=True)
    saved = tuple(_merged(table, dtype, of) for table, of in zip(tables, parts, strict=True))
    for file in (file for part in saved for file in part.files):
        path = folder / file.path
        if not path.is_file() or path.stat().st_size != file.bytes:
            raise Corruption(
                f"save_inference_model: expected {path} of {file.bytes} bytes, found none or"
                " another; the folder must be on storage that all servers and worker 0 share"
            )
    return saved


def _merged(table: Table, dtype: str, parts: Sequence[Mapping[str, Any]]) -> TablePart:
    """What the servers say of one table."""
    num_rows = sum(part["rows"] for part in parts)
    squares = sum(part["sum_of_squares"] for part in parts)
    return TablePart(
        name=table.name,
        dim=table.dim,
        statistics=0,
        dtype=dtype,
        initializer=table.schema.initializer,
        seed=table.seed,
        absent=table.schema.absent,
        salt=table.salt,
        rows=num_rows,
        removed=sum(part["removed"] for part in parts),
        max_error=max(part["max_error"] for part in parts),
        rms_error=math.sqrt(squares / max(num_rows * table.dim, 1)),
        files=tuple(File(**file) for part in parts for file in part["files"]),
    )


def _lookup(reading: Reading) -> Lookup:
    return Lookup(
        reading.name, reading.table.name, reading.features, reading.mode, reading.padding_key
    )


def _write(folder: Path, name: str, data: bytes) -> File:
    with written(folder / name) as (file, entry):
        file.write(data)
    return File(path=name, **entry)


def _difference(exact: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> tuple[float, float]:
    """The largest and the root mean square difference over all outputs."""
    difference = torch.cat([(exact[name] - stored[name]).double().flatten() for name in exact])
    if difference.numel() == 0:
        return 0.0, 0.0
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


def _reported(path: Path, manifest: Manifest) -> Export:
    export = Export(
        path=str(path),
        version=manifest.version,
        rows=sum(part.rows for part in manifest.tables),
        row_errors={part.name: (part.max_error, part.rms_error) for part in manifest.tables},
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
