"""What multi-task models share: inputs and labels of several tasks, a tower for each, the loss; and
clicks with the conversions after them.

Shapes: B examples, W inputs, E experts of H floats each, T tasks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trireme.data.batch import Batch
from trireme.data.schema import Dense, Label, Schema, Sparse
from trireme.initializer import Uniform
from trireme.metrics import AUC
from trireme.models.columns import tensor_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.inputs import Concatenated, Numbers
from trireme.models.layers import mlp
from trireme.table import Table
from trireme.train.recipe import Recipe


class Experts(nn.Module):
    """relu(linear(x)) of each of E experts: (B, W) -> (B, E, H)."""

    def __init__(self, width: int, num_experts: int, size: int) -> None:
        super().__init__()
        self.weight_EWH = nn.Parameter(torch.randn(num_experts, width, size) / math.sqrt(width))
        self.bias_EH = nn.Parameter(torch.zeros(num_experts, size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.einsum("bw,ewh->beh", x, self.weight_EWH) + self.bias_EH)


class Gate(nn.Module):
    """A mixture of what experts say: the shares are a softmax of a linear map of x, (B, W)."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.shares = mlp([width, num_experts])

    def forward(self, x: Tensor, experts_BEH: Tensor) -> Tensor:
        """(B, H)."""
        shares_BE = torch.softmax(self.shares(x), 1)
        return torch.einsum("be,beh->bh", shares_BE, experts_BEH)


class Towers(nn.Module):
    """An MLP to one logit for each task. layers: widths of the hidden layers."""

    def __init__(self, tasks: Sequence[str], width: int, layers: Sequence[int]) -> None:
        super().__init__()
        self.tasks = tuple(tasks)
        self.towers = nn.ModuleList(mlp([width, *layers, 1]) for _ in tasks)

    def forward(self, inputs_TBW: Sequence[Tensor]) -> dict[str, Tensor]:
        """(B,) logits by task, each of its own inputs."""
        parts = zip(self.tasks, self.towers, inputs_TBW, strict=True)
        return {task: tower(x).squeeze(1) for task, tower, x in parts}


@dataclass(frozen=True)
class LogLosses:
    """The sum of the log losses of the tasks: outputs and labels have their names."""

    tasks: tuple[str, ...]

    def __call__(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        log_loss = nn.functional.binary_cross_entropy_with_logits
        losses = [log_loss(outputs[task], tensor_of(batch, task)) for task in self.tasks]
        return torch.stack(losses).sum()


@dataclass(frozen=True)
class TaskInputs:
    """The inputs of a multi-task model as the configuration has them.

    tasks: a list of label columns, default click, conversion. They come first, then sparse features
    and dense numbers as of the click models.

    With feature_size, as in PaddleRec's census models, the inputs are that many numbers, and two
    labels behind them: income and marital.
    """

    module: Concatenated | Numbers
    tasks: tuple[str, ...]
    schema: Schema

    @classmethod
    def of(cls, hyper: HyperParameters, num_tasks: str) -> "TaskInputs":
        """num_tasks: the key with the number of tasks, if the configuration has it.

        Raises BadRequest: it has another number.
        """
        is_census = hyper.get("feature_size") is not None
        tasks = hyper.names(
            "tasks", ("income", "marital") if is_census else ("click", "conversion")
        )
        hyper.fixed(num_tasks, len(tasks), f"for the tasks {', '.join(tasks)}")
        if not is_census:
            return cls(Concatenated(hyper.table(), **hyper.inputs()), tasks, hyper.schema(*tasks))
        size = hyper.whole("feature_size", 499)
        schema = Schema([Dense("input", size), *map(Label, tasks)])
        return cls(Numbers("input", size), tasks, schema)

    def recipe(self, model: nn.Module, hyper: HyperParameters) -> Recipe:
        """The recipe of a model whose outputs are logits by task; an AUC of each."""
        return hyper.recipe(
            model,
            LogLosses(self.tasks),
            schema=self.schema,
            metrics=[AUC(name=f"auc_{task}", output=task, label=task) for task in self.tasks],
        )


@dataclass(frozen=True)
class ConversionInputs:
    """The table, the inputs (arguments of Concatenated) and the schema of clicks and conversions.

    Without num_field: click, conversion (only where click is 1), and the inputs of the click
    models. With num_field, as in PaddleRec's esmm, there are that many features field_0, field_1,
    ..., in front of the labels, with key 0 as padding, and no dense numbers; rows start within +-1
    (init_range).
    """

    rows: Table
    arguments: dict[str, Any]
    schema: Schema

    @classmethod
    def of(cls, hyper: HyperParameters) -> "ConversionInputs":
        if hyper.get("num_field") is None:
            return cls(hyper.table(), hyper.inputs(), hyper.schema("click", "conversion"))
        fields = tuple(f"field_{i}" for i in range(hyper.whole("num_field", 23)))
        arguments = {"features": fields, "num_dense": 0, "padding_key": 0}
        schema = Schema([*map(Sparse, fields), Label("click"), Label("conversion")])
        return cls(hyper.table(initializer=Uniform(-1.0, 1.0)), arguments, schema)


def logit_of_both(a: Tensor, b: Tensor) -> Tensor:
    """The logit of p = sigmoid(a) * sigmoid(b), computed in logarithms:
    1 / p - 1 = exp(-a) + exp(-b) + exp(-a - b).
    """
    return -torch.logsumexp(torch.stack([-a, -b, -a - b]), 0)


def conversion_metrics() -> list[AUC]:
    """The AUC of clicks, and that of clicks with a conversion."""
    return [
        AUC(name="auc_ctr", output="ctr", label="click"),
        AUC(name="auc_ctcvr", output="ctcvr", label="conversion"),
    ]
