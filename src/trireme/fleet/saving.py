"""What a Fleet script writes and reads: checkpoints, and models for inference."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from trireme import interchange
from trireme.checkpoint.format.manifest import read_manifest
from trireme.checkpoint.format.save_modes import save_mode
from trireme.data.batch import Batch
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest, NotReady, check_known, check_values
from trireme.fleet.calls import job
from trireme.fleet.dataset import InMemoryDataset
from trireme.fleet.executor import Executor
from trireme.fleet.program import Program, names_of
from trireme.inference import Predictor
from trireme.inference.export import Export, export_model
from trireme.storage.storage import open_storage
from trireme.train import DistributedOptimizer
from trireme.train.checkpointing.checkpoint_location import Location
from trireme.train.checkpointing.load import load as load_checkpoint
from trireme.train.checkpointing.save import SaveOptions
from trireme.train.checkpointing.save import save as save_checkpoint
from trireme.train.loop.scoring import in_mode, outputs_by_name
from trireme.train.loop.worker_batches import Closable


def save_persistables(
    executor: Any = None,
    dirname: str = "",
    main_program: Any = None,
    mode: int = 0,
    *,
    format: str = "trireme",
    **options: Any,
) -> None:
    """Write a checkpoint into a new folder; every worker calls it.

    Args:
        executor: None, or a static.Executor.
        main_program: None, or the program of `minimize`.
        mode: 0: full, 1: delta, 2: base, 3: batch, see Trainer.save.
        format: "fleet": what Paddle's Fleet reads; with the options of
            interchange.export_fleet.
    """
    trained = saved("save_persistables", executor, main_program)
    check_folder("fleet.save_persistables", "dirname", dirname)
    if format == "fleet":
        _check_full(mode)
        interchange.export_fleet(trained, dirname, **options)
    elif format != "trireme" or options:
        raise BadRequest(
            "fleet.save_persistables: expected format 'trireme' without options, or 'fleet',"
            f" found {format!r} with {sorted(options)}"
        )
    else:
        save_checkpoint(trained, Location(dirname), options=SaveOptions(mode))


def check_folder(what: str, name: str, folder: Any) -> None:
    """Raises BadRequest: no name of a folder."""
    is_path = isinstance(folder, str | os.PathLike)
    if not is_path or not (text := os.fspath(folder)) or "\0" in str(text):
        raise BadRequest(f"{what}: expected {name}=FOLDER, found {folder or 'none'!r}")


def saved(method: str, executor: Any, program: Any) -> DistributedOptimizer:
    """The optimizer whose state is saved. Raises BadRequest: an executor or program that is
    not one.
    """
    if not (executor is None or isinstance(executor, Executor)):
        raise BadRequest(
            f"fleet.{method}: expected executor=None or static.Executor, found"
            f" {type(executor).__name__}"
        )
    if isinstance(program, Program):
        return program.trainer.optimizer
    if program is not None:
        raise BadRequest(
            f"fleet.{method}: expected main_program=None, found {type(program).__name__}"
        )
    return job.trained()


def save_inference_model(
    executor: Any = None,
    dirname: str = "",
    feeded_var_names: Any = None,
    target_vars: Any = None,
    main_program: Any = None,
    mode: int = 0,
    *,
    batch: Any = None,
    follows: str | None = None,
    dtype: str | None = None,
) -> Export:
    """Write the model for inference into a new folder; every worker calls it.

    Args:
        executor, main_program: as of save_persistables.
        feeded_var_names: the columns that the export reads; None: all of `batch`.
        target_vars: the outputs of the model, all of them, as a check; "output" is that of a
            model which returns a tensor.
        mode: 0 or 2: everything. 1: a delta, what has changed since the export `follows`.
        batch: worker 0's: an example of the batches to predict; default the first one of the
            dataset that was trained on, also after its release_memory().
        dtype: see trireme.inference.export.export_model.
    """
    trained = saved("save_inference_model", executor, main_program)
    check_folder("fleet.save_inference_model", "dirname", dirname)
    if mode not in (0, 1, 2) or (mode == 1) != (follows is not None):
        raise BadRequest(
            "fleet.save_inference_model: expected mode 0 or 2, or 1 (delta) with"
            f" follows=FOLDER, found {mode} with {follows!r}"
        )
    example = None
    try:
        example = example_batch(
            trained.model,
            job.dataset if batch is None else batch,
            feeds=_names("feeded_var_names", feeded_var_names),
            targets=_names("target_vars", target_vars),
            is_dataset=batch is None,
        )
    except NotReady:  # a worker may have no files; worker 0 exports
        if trained.cluster.worker == 0:
            raise
    return export_model(trained, dirname, batch=example, follows=follows, dtype=dtype)


def _names(what: str, values: Any) -> Sequence[str] | None:
    return None if values is None else names_of(what, values)


def save(dirname: str, feed: Sequence[Any] = (), fetch: Sequence[Any] = (), **options: Any) -> None:
    """With feed or fetch save_inference_model, else save_persistables; options: theirs."""
    if feed or fetch:
        save_inference_model(None, dirname, list(feed) or None, list(fetch) or None, **options)
    else:
        save_persistables(None, dirname, **options)


def load_inference_model(path: str, mode: int = 0) -> Predictor:
    """A predictor of what `save_inference_model` wrote; it needs no servers.

    Fleet loads rows into servers; here the predictor's apply() takes the deltas of mode 1.
    """
    check_folder("fleet.load_inference_model", "path", path)
    if mode not in (0, 2):
        raise BadRequest(
            f"fleet.load_inference_model: expected mode 0 or 2, found {mode}; deltas come to a"
            " model that is there, by apply()"
        )
    return Predictor(path)


def load_model(path: str, mode: int = 0, **options: Any) -> None:
    """Load a checkpoint, or what Paddle's Fleet has saved; every worker calls it.

    mode: as it was saved; 0: any.
    options: for Fleet's files, those of interchange.import_fleet.
    """
    check_folder("fleet.load_model", "path", path)
    if interchange.is_fleet(path):
        _check_full(mode)
        interchange.import_fleet(job.trained(), path, **options)
    elif options:
        raise BadRequest(
            f"fleet.load_model: expected a model saved by Fleet, because of the options"
            f" {sorted(options)}, found none in {path}"
        )
    else:
        saved, wanted = read_manifest(open_storage(path, None)).mode, save_mode(mode)
        if mode != 0 and saved != wanted:
            raise BadRequest(
                f"fleet.load_model: expected a checkpoint of mode {mode} ({wanted}),"
                f" found {saved} in {path}"
            )
        load_checkpoint(job.trained(), Location(path))


def _check_full(mode: int) -> None:
    check_values("fleet", mode=(mode == 0, "0 (full) of Fleet's own format", mode))


def example_batch(
    model: nn.Module,
    source: Any,
    *,
    feeds: Sequence[str] | None,
    targets: Sequence[str] | None,
    is_dataset: bool,
) -> Batch:
    """The batch, with the columns `feeds` alone.

    source: a batch, or (is_dataset) the dataset whose first batch it is.

    Raises:
        NotReady: there is no dataset, or it has no batch. BadRequest: no such column; targets that
            are not the outputs of the model.
    """
    batch = _first(source) if is_dataset else as_batch(source)
    if feeds is not None:
        what = "feeded_var_names of the columns"
        check_known("fleet.save_inference_model", what, batch.keys(), feeds)
        batch = as_batch({name: batch[name] for name in feeds})
    if targets is not None:
        _check_targets(model, batch, targets)
    return batch


def _first(dataset: Iterable[Any] | None) -> Batch:
    try:
        batch = _first_or_none(dataset)
    except NotReady as error:  # as of examples in memory that were released
        raise _no_example() from error
    if batch is None:
        raise _no_example()
    return batch


def _no_example() -> NotReady:
    return NotReady(
        "fleet.save_inference_model: expected an example of the batches to predict, found no"
        " dataset that was trained on and still has one; give batch="
    )


def _first_or_none(dataset: Iterable[Any] | None) -> Batch | None:
    if isinstance(dataset, InMemoryDataset):
        return dataset.example()
    batches = iter(() if dataset is None else dataset)
    try:
        for batch in batches:
            return as_batch(batch)
    finally:
        if isinstance(batches, Closable):
            batches.close()
    return None


def _check_targets(model: nn.Module, batch: Batch, targets: Sequence[str]) -> None:
    with torch.no_grad(), in_mode(model, training=False):
        outputs = outputs_by_name(model(batch))
    if set(targets) != set(outputs):
        raise BadRequest(
            f"fleet.save_inference_model: expected target_vars to be the outputs of the model,"
            f" {', '.join(outputs)}, which the export has all, found {', '.join(targets)}"
        )
