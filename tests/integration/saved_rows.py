"""Reads the rows of a checkpoint with plain Arrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trireme.checkpoint.format.manifest import read_manifest
from trireme.storage.storage import open_storage


def saved_rows(checkpoint: Path) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Per table its columns, sorted by key."""
    manifest = read_manifest(open_storage(checkpoint, None))
    tables = {}
    for name, part in manifest.tables.items():
        columns: dict[str, list[Any]] = {}
        for files in part.files:
            with pa.memory_map(str(checkpoint / files.rows.path)) as source:
                table = pa.ipc.open_file(source).read_all()
            for column in table.column_names:
                columns.setdefault(column, []).append(_values(table[column].combine_chunks()))
        joined = {column: np.concatenate(parts) for column, parts in columns.items()}
        order = np.argsort(joined["key"])
        tables[name] = {column: values[order] for column, values in joined.items()}
    return tables


def _values(column: Any) -> np.ndarray[Any, Any]:
    if pa.types.is_fixed_size_list(column.type):
        values = column.flatten().to_numpy()
        return np.asarray(values).reshape(len(column), column.type.list_size)
    return np.asarray(column.to_numpy(zero_copy_only=False))
