"""Checkpoints, as docs/format/checkpoint.md specifies them."""

import datetime
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core, drawing
from trireme.checkpoint.format.arrow_arrays import to_numpy
from trireme.checkpoint.format.block_files import read_blocks
from trireme.checkpoint.format.manifest import TableFiles, read_manifest
from trireme.checkpoint.format.row_files import RowColumns, read_rows
from trireme.inspect.saved_model import RowBatch, SavedModel, SavedTable
from trireme.policy import ScorePolicy, policy_of
from trireme.protocol.wire import Array
from trireme.rows.core_table import make_core_table
from trireme.rows.wide_rows import RowLayout
from trireme.storage.storage import Storage


class CheckpointTable(SavedTable):
    def __init__(
        self, storage: Storage, table: TableFiles, are_strings: Mapping[str, bool]
    ) -> None:
        self._storage, self._schema = storage, (schema := table.schema)
        self._files = sorted(table.files, key=lambda files: files.low)
        self.name, self.num_rows = schema.name, table.num_rows
        self.salt, self.features = schema.salt, tuple(are_strings)
        self.string_features = frozenset(name for name in are_strings if are_strings[name])
        self.num_removed = sum(files.num_removed for files in table.files)
        self.num_bytes = sum(
            entry.num_bytes for files in table.files for entry in (files.rows, files.buckets)
        )
        self.class_dims = (*schema.dims, *([] if schema.head_class is None else [1]))
        self.state_planes = self._core_table.state_planes
        policy = policy_of(schema.policy)
        self.policy = policy if isinstance(policy, ScorePolicy) else None

    @property
    def comparable(self) -> Any:
        return self._schema

    def properties(self) -> dict[str, str]:
        schema = self._schema
        return {
            "dim": ", ".join(str(dim) for dim in schema.dims),
            "dtype": schema.dtype,
            "rule": str(schema.rule["name"]),
            "policy": str(schema.policy["name"]),
            "admission": "-" if schema.admission is None else str(schema.admission["name"]),
        }

    @cached_property
    def _core_table(self) -> _core.Table:
        """An empty one, for the layout of rows."""
        return make_core_table(self._schema)

    @cached_property
    def _layout(self) -> RowLayout:
        return RowLayout.of(self._schema, self._core_table)

    def rows(self, buckets: npt.NDArray[np.uint16] | None = None) -> Iterator[RowBatch]:
        schema = RowColumns.of(self._layout).schema
        for files in self._files:
            if buckets is not None and not np.any((buckets >= files.low) & (buckets <= files.high)):
                continue
            for _, batch in read_rows(self._storage, files, schema):
                if batch.num_rows:
                    yield self._rows_of(batch)

    def _rows_of(self, batch: Any) -> RowBatch:
        n = batch.num_rows
        floats = {
            name: to_numpy(batch[name].flatten()).reshape(n, -1)
            for name in ("weights", "state")
            if name in batch.schema.names
        }
        state = floats.get("state", np.empty((n, 0), np.float32))
        num_floats = state.shape[1] - self._core_table.state_counts
        statistics = np.empty(n, self._layout.statistics_type)
        for name in self._layout.statistics_type.names or ():
            statistics[name] = to_numpy(batch[name])
        return RowBatch(
            to_numpy(batch["key"]),
            to_numpy(batch["row_class"]),
            floats["weights"],
            state[:, :num_floats],
            np.ascontiguousarray(state[:, num_floats:]).view(np.uint32),
            statistics,
        )


class SavedCheckpoint(SavedModel):
    """Raises Corruption if the manifest is damaged."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._manifest = read_manifest(storage)
        self.path, self.version = storage.name, self._manifest.version
        strings = self._manifest.extra.get("strings", {})  # features whose values are known
        self.tables = {
            name: CheckpointTable(storage, table, strings.get(name, {}))
            for name, table in sorted(self._manifest.tables.items())
        }

    def headline(self) -> Iterator[str]:
        manifest = self._manifest
        since = "" if manifest.since is None else f", changes since version {manifest.since}"
        yield f"checkpoint {self.path}: {manifest.mode}, version {self.version}{since}"
        servers = "1 server" if manifest.num_servers == 1 else f"{manifest.num_servers} servers"
        num_files = sum(1 for _ in manifest.files())
        yield (
            f"saved {manifest.saved_at} by {servers}, data time {shown_time(manifest.time)};"
            f" {drawing.size(manifest.num_bytes)} in {num_files} files"
        )
        batches = sum(last for last, _ in manifest.streams.values())
        yield f"streams: {len(manifest.streams)}, with {batches:,} batches"
        specs = [block.spec for file in manifest.blocks for block in file.blocks]
        if specs:
            yield (
                f"dense: {sum(spec.size for spec in specs):,} weights of"
                f" {len({spec.param for spec in specs})} parameters in {len(specs)} blocks,"
                f" optimizer {manifest.optimizer}"
            )

    def dense(self) -> Iterator[tuple[str, int, Array]]:
        for file in self._manifest.blocks:
            ids = [block.spec.id for block in file.blocks]
            for spec, tensors, _ in read_blocks(self._storage, file, ids):
                yield spec.param, spec.start, tensors["weights"].detach().numpy().reshape(-1)


def shown_time(time: int) -> str:
    """A data time for people; "none" for 0."""
    if time == 0:
        return "none"
    return f"{datetime.datetime.fromtimestamp(time, datetime.timezone.utc):%Y-%m-%d %H:%M:%S}"
