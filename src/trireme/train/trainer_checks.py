"""What a Trainer refuses before it begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trireme import accelerator
from trireme.errors import check_counts, check_kind, wrong_argument
from trireme.strategy import Strategy
from trireme.train.checkpointing.checkpoints import CheckpointAtStop, Checkpoints
from trireme.train.compute.remote_stages import Remote
from trireme.train.modes import mode_class
from trireme.train.optimizer import DistributedOptimizer, check_parts


def check_made(made: DistributedOptimizer, model: nn.Module, options: Mapping[str, Any]) -> None:
    """Raises BadRequest: an optimizer of another model, or options beside it, not None."""
    if made.model is not model:
        raise wrong_argument(
            "Trainer: expected the DistributedOptimizer of this model, found that of another one,"
            f" a {type(made.model).__name__}"
        )
    settings = [name for name, value in options.items() if value is not None]
    if settings:
        raise wrong_argument(
            "Trainer: expected a DistributedOptimizer alone, which was made with its own"
            f" {', '.join(options)}, found {', '.join(settings)} beside it"
        )


def check_settings(
    model: Any, strategy: Any, blocks: Any, cluster: Any, metrics: Any, loss: Any
) -> None:
    """Raises BadRequest: a name, a class or a single metric in place of the object or the list."""
    check_parts("Trainer", model, strategy, blocks, cluster)
    if isinstance(metrics, str) or not isinstance(metrics, Iterable):
        raise wrong_argument(
            f"Trainer: expected metrics as a list, such as ['auc'], found {metrics!r}"
        )
    if not callable(loss) or isinstance(loss, type):
        example = "a function of outputs and labels, such as torch.nn.BCEWithLogitsLoss()"
        check_kind("Trainer", "loss", loss, (), example)  # of no type that is right
    own = {id(parameter) for parameter in model.parameters()}
    parameters = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    if others := [name for name, p in parameters if p.requires_grad and id(p) not in own]:
        raise wrong_argument(
            f"Trainer: expected the loss without parameters of its own, found {', '.join(others)},"
            " which nothing would train: make the loss a module of the model, or call its"
            " requires_grad_(False)"
        )


def check_autocast(dtype: Any) -> None:
    """Raises BadRequest: anything but bfloat16 or None."""
    if dtype is None or dtype is torch.bfloat16:
        return
    why = "; without autocast=, None, the model computes in float32"
    if dtype is torch.float16:
        why = (
            ", whose gradients vanish unless the loss is scaled: use torch.bfloat16, or a loop of"
            " your own with torch.autocast and torch.amp.GradScaler"
        )
    raise wrong_argument(f"Trainer: expected autocast=torch.bfloat16 or None, found {dtype!r}{why}")


def check_not_in_autocast(what: str) -> None:
    """Raises BadRequest: torch.autocast is around a whole pass over data. It would keep the weights
    of the first step, which it has converted, and not reach other threads and compute workers.
    """
    if accelerator.is_in_autocast():
        raise wrong_argument(
            f"Trainer: expected {what} outside of torch.autocast, found it within one: give"
            " Trainer(autocast=torch.bfloat16), which computes each forward pass under autocast"
        )


def check_checkpoints(checkpoints: Any) -> None:
    """Raises BadRequest: a path in place of Checkpoints."""
    if checkpoints is not None:
        example = "Checkpoints, such as tr.Checkpoints('ckpt', every_s=600)"
        kinds = (Checkpoints, CheckpointAtStop)
        check_kind("Trainer.fit", "checkpoints", checkpoints, kinds, example)


def check_threads(threads: int | None, strategy: Strategy, accumulate: int) -> int | None:
    """Returns the threads, one where a step is of several batches. Raises BadRequest: a number
    that the mode does not train in.
    """
    check_counts("Trainer", accumulate=accumulate)
    if threads is None:
        return 1 if accumulate > 1 else None
    check_counts("Trainer", threads=threads)
    if threads > 1 and (accumulate > 1 or not mode_class(strategy.mode).trains_in_threads):
        where = f"with accumulate={accumulate}" if accumulate > 1 else f"in {strategy.mode}"
        raise wrong_argument(
            f"Trainer: expected threads=1 {where}, found {threads}: steps come one after the other;"
            " use more workers"
        )
    return threads


def check_epochs(dataset: Any, valid: Any, epochs: Any) -> None:
    """Raises BadRequest: no epoch, or data that cannot be read so often."""
    check_counts("Trainer.fit", epochs=epochs)
    for name, data in (("a dataset", dataset), ("valid", valid)):
        if epochs > 1 and isinstance(data, Iterator):
            raise wrong_argument(
                f"Trainer.fit: expected {name} that can be read {epochs} times, found"
                f" {type(data).__name__}, an iterator, which is empty after the first"
            )


def check_pass(
    what: str,
    optimizer: DistributedOptimizer,
    remote: Remote | None,
    threads: int,
    accumulate: int,
) -> None:
    """Raises BadRequest: a trainer that cannot train a pass or a window on its device."""
    if remote is not None:
        raise wrong_argument(
            f"{what}: expected a job without compute workers, found those of label"
            f" {', '.join(remote.labels)}: a pass keeps its rows at the worker's device"
        )
    optimizer.mode.check_device_pass()
    if threads > 1:
        raise wrong_argument(f"{what}: expected threads=1, found {threads}")
    if accumulate > 1 and (num_workers := optimizer.cluster.num_workers) > 1:
        raise wrong_argument(
            f"{what}: expected accumulate=1 in a job of {num_workers} workers, which make each step"
            f" of a pass on devices together, found {accumulate}; take larger batches"
        )


def check_pass_data(dataset: Any, following: Any) -> None:
    """Raises BadRequest: data of a pass that cannot be read as often as it is."""
    for data in (dataset, following):
        if isinstance(data, Iterator):
            raise wrong_argument(
                "begin_pass: expected a dataset that can be read twice, for its keys and for"
                f" training, found {type(data).__name__}, an iterator"
            )
    if following is dataset:
        raise wrong_argument(
            "begin_pass: expected another dataset to follow, found the same, which training reads"
            " meanwhile"
        )
