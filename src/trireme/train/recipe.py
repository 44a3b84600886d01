"""A model with all that a trainer needs to know of it: what a model file's `create` returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trireme.data.batch import Batch
from trireme.data.schema import Schema
from trireme.metrics import Metric


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated in place of the model that is trained: other inputs, over the same tables.

    model: made of tables, and modules, of the trained model; returns what the metrics score. The
        batches must have the features of all its modules.
    metrics: as of a Trainer; none, if only the outputs are wanted, for a dump.
    label: the column of the metrics that name none.
    schema: of the inputs, in the order of the files of the evaluation; None: that of the training.
    loss: as of a Recipe; None: only the metrics are computed.
    prepare, files_are_one, reader_config: as of a Recipe.
    """

    model: nn.Module
    metrics: Sequence[Metric | str] = ()
    label: str | None = None
    schema: Schema | None = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    prepare: Callable[[Batch], Batch] | None = None
    files_are_one: bool = False
    reader_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model and how to train it.

    model: takes a batch; returns (B,) or (B, C) outputs, or a dict of such outputs by name.
    loss: (outputs, labels) -> scalar, the mean over the examples. `labels` is the label column, or
        the batch itself where `label` is None.
    optimizer: of the dense parameters; None if the model has none.
    label: name of the label column; None: the loss and the metrics read columns themselves.
    schema: of the model's inputs, in their order; None: any data.
    metrics: as of a Trainer; each names its output and its label if the model has several.
    clip_norm, clip_value: how gradients are clipped, see DistributedOptimizer.
    schedule: makes a scheduler of torch.optim.lr_scheduler of the optimizer that it gets, whose
        param groups are those of `optimizer` and one for each table; it steps after every batch.
    prepare: makes of each batch that was read the one that the model gets, with sampled ids as one
        more column, say. So their rows are looked up like others, pulled ahead and exported.
    evaluation: what `trireme run --infer` evaluates; None: the model itself.
    files_are_one: a class RecDataset makes each example of several files: every worker's gets all
        of them, and of its batches the worker takes every n-th one.
    reader_config: keys of the configuration that a class RecDataset finds with other values here,
        as {"runner.mode": "test"}.
    """

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer | None
    label: str | None = "label"
    schema: Schema | None = None
    metrics: Sequence[Metric | str] = ()
    clip_norm: float | None = None
    clip_value: float | None = None
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    prepare: Callable[[Batch], Batch] | None = None
    evaluation: Evaluation | None = None
    files_are_one: bool = False
    reader_config: Mapping[str, Any] = field(default_factory=dict)

    def begin_schedule(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the schedule, if there is one, change the optimizer of a trainer after each step."""
        if self.schedule is not None:
            scheduler = self.schedule(optimizer)
            optimizer.register_step_post_hook(lambda *_: scheduler.step())
