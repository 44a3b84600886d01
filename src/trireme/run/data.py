"""Datasets from a configuration."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from trireme.config import Config
from trireme.data import Content, InMemoryDataset, InsId, QueueDataset, Schema, multislot
from trireme.data.schema import Field
from trireme.data.sources import filesystem, find_files, folders_below, natural_key, reason
from trireme.errors import BadRequest, DataError, is_file, looking
from trireme.fleet.fs_client import fs_client_options
from trireme.fleet.reader_command import reader_command
from trireme.job.cluster import Cluster
from trireme.run.files import load_file
from trireme.run.rec_dataset import ExampleDataset, ReaderConfig
from trireme.run.settings import DataSettings, Settings
from trireme.train import Evaluation, Recipe
from trireme.train.gather_arrays import gather_arrays

log = logging.getLogger("trireme")


@dataclass(frozen=True)
class ReaderOptions:
    """What a Recipe or an Evaluation says of its class RecDataset: see there."""

    files_are_one: bool = False
    reader_config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Recipe | Evaluation) -> ReaderOptions:
        return cls(source.files_are_one, source.reader_config)


_PLAIN = ReaderOptions()
_RANKS = re.compile(r"\b(get_rank|get_world_size|worker_index|worker_num|PADDLE_TRAINER\w+)\b")


def make_dataset(
    config: Config,
    settings: Settings,
    part: DataSettings,
    schema: Schema | None,
    cluster: Cluster,
    reader: ReaderOptions = _PLAIN,
) -> Iterable[Any]:
    """The dataset of training or of inference. Every worker calls it.

    Args:
        schema: of the model's inputs in order; without a format the text is MultiSlot.
        reader: how a class RecDataset gets files and configuration.

    Raises:
        BadRequest: contradicting keys. DataError: no data.
    """
    if not part.paths:
        raise BadRequest(f"{part.key}: expected a file, a folder or a pattern, found none")
    files = [file for path in part.paths for file in find_data(part.key, path, settings)]
    dataset = dataset_of(files, config, settings, part, schema, cluster, reader)
    assert dataset is not None  # find_data has found files
    if isinstance(dataset, InMemoryDataset):
        dataset.load_into_memory()
    return dataset


def dataset_of(
    files: list[str],
    config: Config,
    settings: Settings,
    part: DataSettings,
    schema: Schema | None,
    cluster: Cluster,
    reader: ReaderOptions = _PLAIN,
) -> Iterable[Any] | None:
    """The dataset of these files, not loaded yet; None without files. Every worker calls it.

    Raises: as make_dataset.
    """
    if schema is None:
        raise BadRequest("run: expected a Recipe with a schema, which describes the data")
    own_files = not _are_shared(part.key, files, settings, cluster)
    if not files:
        return None
    if settings.reader_type == "DataLoader":
        examples = _examples(config, part, files, schema, reader, own_files=own_files)
        if not own_files and cluster.num_workers > 1 and cluster.worker == 0:
            _warn_of_ranks(part)
        return examples
    options: dict[str, Any] = {
        "schema": _text_schema(schema, settings),
        "batch_size": part.batch_size,
        "threads": part.threads,
        "own_files": own_files,
        "storage_options": fs_client_options(**settings.fs_client)[1] or None,
        "pipe_command": _pipe_command(config, settings, part),
    }
    if settings.reader_type == "QueueDataset":
        return QueueDataset(files, **options)
    return InMemoryDataset(files, **options, cluster=cluster)


def find_data(key: str, path: str, settings: Settings) -> list[str]:
    """The files of a location: all below a folder, in natural order, or the matches of a pattern.

    Below a folder, names that begin with "." or "_" are skipped, as in Hadoop and Spark: _SUCCESS
    is a mark, not data. A class RecDataset gets what lies in a folder, files and folders, as in
    PaddleRec: it may read a folder of images for itself.
    """
    path, fs_options = located(path, settings)
    try:
        if "://" not in path and Path(path).is_dir():
            files = _entries(path) if settings.reader_type == "DataLoader" else _walk(path)
            if not files:
                raise DataError(f"expected files below {path}, found none")
            return files
        below = list(files_below(path, fs_options)) if "://" in path else []
        return below or [file.path for file in find_files(path, fs_options)]
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def located(path: str, settings: Settings) -> tuple[str, Mapping[str, Any]]:
    """A location of data with the prefix of runner.fs_client, and the options to access it."""
    prefix, options = fs_client_options(**settings.fs_client)
    if prefix and "://" not in path:
        path = f"{prefix}/{path.lstrip('/')}"
    return path, options


def files_below(location: str, options: Mapping[str, Any]) -> dict[str, int]:
    """The files below a folder with their bytes, in natural order; empty if there is no folder.

    Hidden files are skipped as in find_data.
    """
    if "://" not in location:
        return _sizes(_walk(location)) if os.path.isdir(location) else {}
    where, path = filesystem(location, options)
    where.invalidate_cache()
    try:
        listed = where.find(path, detail=True) if where.isdir(path) else {}
    except Exception as error:
        raise DataError(f"run: cannot list {location!r}: {reason(error)}") from error
    names = [name for name in listed if not _is_hidden(name.removeprefix(path))]
    return {
        where.unstrip_protocol(name): int(listed[name]["size"] or 0)
        for name in sorted(names, key=natural_key)
    }


def _sizes(files: list[str]) -> dict[str, int]:
    """Bytes by file, without those that have been removed or renamed meanwhile."""
    sizes = {}
    for file in files:
        try:
            sizes[file] = os.path.getsize(file)
        except OSError as error:
            if os.path.lexists(file):
                raise DataError(f"run: cannot read {file!r}: {error.strerror}") from error
    return sizes


_HIDDEN = (".", "_")


def _walk(folder: str) -> list[str]:
    """All files; of links that lead to one folder, or in a circle, those of the first way."""
    files = [
        os.path.join(parent, name)
        for parent, names in folders_below([folder], _HIDDEN)
        for name in names
        if not name.startswith(_HIDDEN)
    ]
    return sorted(files, key=natural_key)


def _entries(folder: str) -> list[str]:
    with looking(f"files in {folder}"):
        listed = os.listdir(folder)
    names = [name for name in listed if not name.startswith(_HIDDEN)]
    return sorted((os.path.join(folder, name) for name in names), key=natural_key)


def _is_hidden(path: str) -> bool:
    return any(part.startswith(_HIDDEN) for part in path.split("/"))


def _are_shared(key: str, files: list[str], settings: Settings, cluster: Cluster) -> bool:
    """Whether the workers divide the files, or each reads all of its own.

    Without runner.split_file_list they divide the files if all workers see the same ones. Raises
    BadRequest: without it, some see files of others, but not all of them.
    """
    if cluster.num_workers == 1:
        return True
    are_same = all(cluster.client.coordinator.compare_files("\n".join(files)))
    if settings.split_file_list is None and not are_same:
        hashes = {xxhash.xxh64_intdigest(file.encode()) for file in files}
        names = np.array([*hashes], np.uint64)
        of_workers = [one for [one] in gather_arrays(cluster, [names], "compare files").values()]
        counts = np.unique(np.concatenate(of_workers), return_counts=True)[1]
        if (num_common := int((counts > 1).sum())) > 0:
            raise BadRequest(
                f"{key}: expected the same files at all workers, or other ones at each, found"
                f" {len(counts)} of which {num_common} are at several, {len(files)} at worker"
                f" {cluster.worker}: these would be trained on more than once. Let files come all"
                " at once (runner.data_donefile of `trireme stream`); if each worker has files of"
                " its own by these names, say runner.split_file_list=False"
            )
    if settings.split_file_list is None:
        return are_same
    if are_same and not settings.split_file_list and cluster.worker == 0:
        log.warning(
            "%s: each of %d workers reads all of the same %d files, because"
            " runner.split_file_list is False; True divides them",
            key, cluster.num_workers, len(files),
        )  # fmt: skip
    return settings.split_file_list


def _warn_of_ranks(part: DataSettings) -> None:
    """PaddleRec's guide has readers divide what every worker reads; here it is divided already."""
    assert part.reader is not None  # it was loaded
    if named := _RANKS.search(part.reader.read_text(encoding="utf-8", errors="replace")):
        log.warning(
            "%s: %s: workers have divided the data before they read it; if the reader leaves out"
            " examples of other workers, nobody reads them: -o runner.split_file_list=False gives"
            " every reader all files",
            part.reader, named[0],
        )  # fmt: skip


def _text_schema(schema: Schema, settings: Settings) -> Schema:
    """The model's inputs as columns of MultiSlot text, after the names of examples."""
    if schema.format is not None:
        if settings.parse_ins_id or settings.parse_content:
            raise BadRequest(
                "runner.parse_ins_id, parse_content: expected a Recipe with a schema without a"
                f" format, found {schema}"
            )
        return schema
    front: list[Field] = [InsId()] if settings.parse_ins_id else []
    front += [Content()] if settings.parse_content else []
    return multislot([*front, *schema.fields])


def _pipe_command(config: Config, settings: Settings, part: DataSettings) -> str | None:
    command = settings.pipe_command
    if command is None:
        if part.reader is not None:
            raise BadRequest(
                f"runner.pipe_command: expected the command that runs the reader with"
                f" reader_type {settings.reader_type}, found none; or reader_type: DataLoader for"
                f" {part.reader.name}"
            )
        return None
    if command.strip() == "cat":
        return None
    assert config.path is not None
    return reader_command(command, config.path, config.overrides)


def _examples(
    config: Config,
    part: DataSettings,
    files: list[str],
    schema: Schema,
    reader: ReaderOptions,
    *,
    own_files: bool,
) -> ExampleDataset:
    """The examples of class RecDataset of a Python file, which takes (files, config)."""
    if part.reader is None:
        raise BadRequest(
            f"{part.reader_key}: expected a Python file that defines RecDataset, found none"
        )
    if not is_file(part.reader):
        raise BadRequest(
            f"{part.reader_key}: expected a Python file, with or without .py, at"
            f" {part.reader}, found none; -o {part.reader_key}=FILE overrides the file"
        )
    cls = getattr(load_file(part.reader), "RecDataset", None)
    if not callable(cls):
        raise BadRequest(f"{part.reader}: expected a class RecDataset, found none")
    reader_config = ReaderConfig(config, reader.reader_config)
    return ExampleDataset(
        lambda own: cls(own, reader_config),
        files,
        schema=schema,
        batch_size=part.batch_size,
        name=str(part.reader),
        own_files=own_files,
        # A Dataset of torch, whose examples have numbers, reads what it wants of the files.
        files_are_one=reader.files_are_one
        or (hasattr(cls, "__getitem__") and not hasattr(cls, "__iter__")),
    )
