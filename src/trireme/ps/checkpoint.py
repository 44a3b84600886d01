"""Checkpoints on the servers' side: each server writes and reads the buckets and blocks it owns.

Training goes on meanwhile: each bucket is of one moment, with the marks of that moment, so a
restart neither loses nor repeats an update that the checkpoint holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors

from trireme import _core
from trireme.errors import Corruption, SchemaMismatch, writing
from trireme.ps.manifest import inside, read_manifest, verify_file, written
from trireme.ps.routing import Keys
from trireme.ps.rows import RowLayout
from trireme.ps.shard import Handler, ServedTable, Shard
from trireme.ps.wire import Array, need, need_list
from trireme.rpc import Reply, Request
from trireme.table import TableSchema

BUCKETS_PER_FILE = 256
BATCH_BYTES = 4 << 20

Marks = dict[int, int]


class CheckpointHandlers:
    """The methods `checkpoint.save` and `checkpoint.load`; paths stay under `root`."""

    def __init__(self, shard: Shard, root: Path) -> None:
        self._shard = shard
        self._root = root

    def handlers(self) -> dict[str, Handler]:
        return {"checkpoint.save": self._on_save, "checkpoint.load": self._on_load}

    def _on_save(self, request: Request) -> Reply:
        folder = self._folder(request)
        with writing(f"checkpoint: cannot write {folder}"):
            return Reply(save_shard(self._shard, folder))

    def _on_load(self, request: Request) -> Reply:
        is_part = request.body.get("parameters") is not None
        parameters = need_list(request.body, "parameters", str) if is_part else None
        load_shard(self._shard, self._folder(request), parameters)
        return Reply()

    def _folder(self, request: Request) -> Path:
        hint = "--root or TRIREME_ROOT of the servers says where checkpoints may be"
        return inside(self._root, need(request.body, "path", str), hint)


# ---- saving ----


def save_shard(shard: Shard, folder: Path) -> dict[str, Any]:
    """Write this server's files into `folder`; returns its part of the manifest."""
    # First: what is written from now on holds at least the batches up to these positions. What it
    # holds beyond them, its marks tell from what a run that goes on from here repeats.
    streams = shard.applied_streams()
    owned = shard.map().owned_by(shard.index)
    tables = {}
    for number, (name, table) in enumerate(sorted(shard.tables.items())):
        files = [
            _save_buckets(table, folder, Path("rows") / str(number), buckets)
            for buckets in _runs(owned)
        ]
        tables[name] = {"schema": table.schema.to_wire(), "files": files}
    return {
        "tables": tables,
        "blocks": _save_blocks(shard, folder),
        "streams": streams,
    }


def _runs(buckets: Array) -> Iterator[Array]:
    """Owned buckets in files' worth: consecutive numbers within one aligned range."""
    if len(buckets) == 0:
        return
    breaks = np.flatnonzero(
        (np.diff(buckets) != 1)
        | (buckets[1:] // BUCKETS_PER_FILE != buckets[:-1] // BUCKETS_PER_FILE)
    )
    yield from np.split(buckets, breaks + 1)


def row_schema(layout: RowLayout) -> pa.Schema:
    """Columns of a row file. Weights and state are fixed-size lists of float32."""
    statistics = layout.statistics_type
    columns = {
        "key": pa.uint64(),
        "row_class": pa.uint8(),
        "weights": pa.list_(pa.float32(), layout.dim),
        "state": pa.list_(pa.float32(), layout.state_floats),
        **{name: pa.from_numpy_dtype(statistics[name]) for name in statistics.names or ()},
    }
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


def _save_buckets(table: ServedTable, folder: Path, under: Path, buckets: Array) -> dict[str, Any]:
    low, high = int(buckets[0]), int(buckets[-1])
    path = under / f"{low:04d}-{high:04d}.arrow"
    layout = RowLayout.of(table.schema, table.rows)
    arrow = row_schema(layout)
    num_rows, marks = 0, list[tuple[int, int, Marks]]()
    with written(folder / path) as (file, entry):
        sink = pa.PythonFile(file, mode="w")
        with pa.ipc.new_file(sink, arrow) as writer:
            pending, pending_bytes = list[tuple[Array, ...]](), 0
            for bucket in range(low, high + 1):
                content = table.rows.snapshot(bucket)
                marks.append((bucket, bucket, content.marks))
                if len(content.keys):
                    pending.append((content.keys, content.classes, content.rows))
                    pending_bytes += content.rows.nbytes
                    num_rows += len(content.keys)
                if pending_bytes >= BATCH_BYTES:
                    writer.write_batch(_record_batch(layout, arrow, pending))
                    pending, pending_bytes = [], 0
            if pending:
                writer.write_batch(_record_batch(layout, arrow, pending))
    return {
        **entry,
        "path": str(path),
        "buckets": [low, high],
        "rows": num_rows,
        "marks": _merge_runs(marks),
    }


def _record_batch(
    layout: RowLayout, arrow: pa.Schema, parts: list[tuple[Array, ...]]
) -> pa.RecordBatch:
    """Whole buckets, one after the other."""
    keys, classes, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
    statistics = layout.statistics(rows)
    return pa.record_batch(
        [
            pa.array(keys),
            pa.array(classes),
            _float_lists(layout.weights(rows), arrow.field("weights").type),
            _float_lists(layout.state(rows), arrow.field("state").type),
            *(pa.array(np.ascontiguousarray(statistics[name])) for name in arrow.names[4:]),
        ],
        schema=arrow,
    )


def _float_lists(values: Array, kind: pa.DataType) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    if kind.list_size == 0:
        return pa.array([[]] * len(values), type=kind)
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)


def _merge_runs(marks: list[tuple[int, int, Marks]]) -> list[list[Any]]:
    """[first bucket, last bucket, [[stream, sequence], ...]] with neighbours of equal marks in
    one.
    """
    runs: list[list[Any]] = []
    for low, high, of in marks:
        pairs = [[stream, of[stream]] for stream in sorted(of)]
        if runs and runs[-1][2] == pairs:
            runs[-1][1] = high
        else:
            runs.append([low, high, pairs])
    return runs


def _save_blocks(shard: Shard, folder: Path) -> dict[str, Any]:
    """All blocks of this server, of one moment."""
    with shard.blocks_locked():
        specs = shard.blocks.specs()
        tensors = {
            f"{spec.id}/{name}": tensor
            for spec in specs
            for name, tensor in shard.blocks.state_of(spec.id).items()
        }
        marks = {spec.id: dict(shard.blocks.marks[spec.id]) for spec in specs}
    if not specs:
        return {"optimizer": None, "files": [], "blocks": {}}
    path = Path("blocks") / f"server-{shard.index}.safetensors"
    with written(folder / path) as (file, entry):
        file.write(save_tensors(tensors))
    blocks = {
        spec.id: {"spec": spec.to_wire(), "marks": sorted(marks[spec.id].items())} for spec in specs
    }
    return {
        "optimizer": shard.blocks.class_name,
        "files": [{**entry, "path": str(path), "blocks": sorted(blocks)}],
        "blocks": blocks,
    }


# ---- loading ----


def load_shard(shard: Shard, folder: Path, parameters: Collection[str] | None = None) -> None:
    """Replace the rows and blocks that this server owns by those of the checkpoint.

    Args:
        parameters: None: everything, with the marks, so that training goes on where it stood.
            Names: only the blocks of these, and only the tables that this server and the
            checkpoint have; streams begin anew.

    Raises:
        Corruption: a file is missing or damaged.
        SchemaMismatch: a table, a block or the optimizer differs from the one declared.
    """
    manifest = read_manifest(folder)
    owned = set(shard.map().owned_by(shard.index).tolist())
    absent = shard.tables.keys() - manifest["tables"].keys()
    wanted = manifest["tables"]
    if parameters is not None:
        wanted = {name: part for name, part in wanted.items() if name in shard.tables}
        for name in absent:
            _forget_marks(shard.tables[name], owned)
    elif absent:
        raise SchemaMismatch(
            f"checkpoint {folder}: expected tables {sorted(shard.tables)},"
            f" found no {sorted(absent)}"
        )
    for part in wanted.values():
        shard.create_table(TableSchema.from_wire(part["schema"]))
    keep_marks = parameters is None
    for name, part in wanted.items():
        table = shard.tables[name]
        for entry in part["files"]:
            low, high = entry["buckets"]
            if not owned.isdisjoint(range(low, high + 1)):
                _load_buckets(table, folder, entry, owned, keep_marks=keep_marks)
    _load_blocks(shard, folder, manifest["blocks"], parameters)
    streams = {
        int(stream): (int(last), tuple(int(number) for number in at))
        for stream, last, at in manifest["streams"]
        if keep_marks
    }
    shard.reset_streams(streams)


def _forget_marks(table: ServedTable, buckets: Collection[int]) -> None:
    for bucket in buckets:
        content = table.rows.snapshot(bucket)
        table.rows.restore(bucket, content.keys, content.classes, content.rows, {})


def _load_buckets(
    table: ServedTable,
    folder: Path,
    entry: Mapping[str, Any],
    owned: set[int],
    *,
    keep_marks: bool,
) -> None:
    path = verify_file(folder, entry)
    marks_of: dict[int, Marks] = {
        bucket: {int(stream): int(sequence) for stream, sequence in pairs if keep_marks}
        for low, high, pairs in entry["marks"]
        for bucket in range(low, high + 1)
    }
    loaded = set[int]()
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        layout = RowLayout.of(table.schema, table.rows)
        expected = row_schema(layout)
        if reader.schema != expected:
            raise SchemaMismatch(f"{path}: expected columns {expected}, found {reader.schema}")
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            for bucket, keys, classes, rows in _buckets_of(layout, batch):
                if bucket in loaded or bucket not in marks_of:
                    raise Corruption(f"{path}: bucket {bucket} is there twice or not announced")
                loaded.add(bucket)
                if bucket in owned:
                    table.rows.restore(bucket, keys, classes, rows, marks_of[bucket])
    for bucket, marks in marks_of.items():
        if bucket in owned and bucket not in loaded:
            table.rows.restore(bucket, *_no_rows(table.rows), marks)


def _buckets_of(
    layout: RowLayout, batch: pa.RecordBatch
) -> Iterator[tuple[int, Keys, Array, Array]]:
    """The buckets of a record batch, which holds whole buckets one after the other."""
    keys = batch["key"].to_numpy()
    buckets = np.empty(len(keys), dtype=np.uint16)
    _core.buckets(keys, buckets)
    classes = batch["row_class"].to_numpy()
    weights, state = (
        batch[name].flatten().to_numpy().reshape(len(keys), -1) for name in ("weights", "state")
    )
    statistics = np.empty(len(keys), layout.statistics_type)
    for name in layout.statistics_type.names or ():
        statistics[name] = batch[name].to_numpy()
    rows = layout.join(weights, state, statistics)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(buckets)) + 1, [len(keys)]])
    for low, high in itertools.pairwise(starts):
        yield (
            int(buckets[low]),
            keys[low:high].copy(),
            classes[low:high].copy(),
            rows[low:high],
        )


def _no_rows(rows: _core.Table) -> tuple[Keys, Array, Array]:
    return (
        np.empty(0, dtype=np.uint64),
        np.empty(0, dtype=np.uint8),
        np.empty((0, rows.row_bytes), dtype=np.uint8),
    )


def _load_blocks(
    shard: Shard,
    folder: Path,
    part: Mapping[str, Any],
    parameters: Collection[str] | None,
) -> None:
    with shard.blocks_locked():
        blocks = shard.blocks
        wanted = {spec.id for spec in blocks.specs()}
        if parameters is not None:
            for block_id in wanted:
                blocks.marks[block_id] = {}
            wanted = {spec.id for spec in blocks.specs() if spec.param in parameters}
        if not wanted:
            return
        if part["optimizer"] != blocks.class_name:
            raise SchemaMismatch(
                f"checkpoint {folder}: its optimizer is {part['optimizer']},"
                f" the model's is {blocks.class_name}"
            )
        missing = wanted - part["blocks"].keys()
        if missing:
            raise SchemaMismatch(
                f"checkpoint {folder}: expected blocks {sorted(missing)}, found none of them"
            )
        for entry in part["files"]:
            mine = [block_id for block_id in entry["blocks"] if block_id in wanted]
            if not mine:
                continue
            tensors = load_file(verify_file(folder, entry))
            for block_id in mine:
                saved = part["blocks"][block_id]["marks"] if parameters is None else []
                marks = {int(s): int(n) for s, n in saved}
                prefix = f"{block_id}/"
                of_block = {
                    name.removeprefix(prefix): tensor
                    for name, tensor in tensors.items()
                    if name.startswith(prefix)
                }
                blocks.restore(block_id, of_block, marks)
