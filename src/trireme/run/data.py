"""From a configuration to a dataset."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trireme.data import QueueDataset, Schema
from trireme.data.sources import natural_key
from trireme.errors import BadRequest, DataError
from trireme.run.settings import DataSettings, Settings


def make_dataset(settings: Settings, part: DataSettings, schema: Schema | None) -> Iterable[Any]:
    """The data of one part, training or inference.

    Args:
        schema: of the model's inputs in their order.

    Raises:
        BadRequest: keys that do not fit together. DataError: no data there.
    """
    if schema is None:
        raise BadRequest("run: expected a Recipe with a schema, which says how to read the data")
    if part.path is None:
        raise BadRequest(f"{part.key}: expected a file, a folder or a pattern, found none")
    return QueueDataset(
        find_data(part.key, part.path),
        schema=schema,
        batch_size=part.batch_size,
        threads=part.threads,
    )


def find_data(key: str, path: str) -> list[str]:
    """A folder's files, also those in folders below, in natural order; anything else as it is."""
    if "://" in path or not Path(path).is_dir():
        return [path]
    files: list[str] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    if not files:
        raise DataError(f"{key}: expected files below {path}, found none")
    return sorted(files, key=natural_key)
