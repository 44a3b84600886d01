"""The example that an export needs, from the words of `save_inference_model`."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from trireme.data.batch import Batch
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest, NotReady
from trireme.fleet.dataset import InMemoryDataset
from trireme.train.loop.scoring import in_mode, outputs_by_name
from trireme.train.loop.worker_batches import Closable


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
        if missing := [name for name in feeds if name not in batch]:
            raise BadRequest(
                f"fleet.save_inference_model: expected feeded_var_names of the columns"
                f" {', '.join(batch.keys())}, found {', '.join(missing)}"
            )
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
