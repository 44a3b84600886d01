"""The hyper_parameters.* of PaddleRec that the `create` functions of the models share.

| Key | Default | Means |
|---|---|---|
| optimizer.class | Adam | Adam, Adagrad or SGD: for the dense part and for the rows |
| optimizer.learning_rate | 0.001 | of both; optimizer.learning_rate_base_lr is the same |
| adam_d2sum | False | with Adam: the dense part learns by Fleet's trireme.dense.adam_d2sum |
| clip_by_norm | none | gradients of a step are scaled to this global norm at most |
| init_range | the model's | rows start within +- this |
| sparse_inputs_slots | 27 | sparse inputs with the label among them: features "1" to "26" |
| sparse_feature_dim | 9 | floats per row |
| dense_input_dim | 13 | width of the column dense_feature, 0 for none |

table_parameters.*, if present, says how rows learn and expire: trireme.models.table_parameters.
sparse_feature_number, the size of PaddleRec's table, has no counterpart: a table takes any key.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trireme import optim
from trireme.config import Config
from trireme.data.schema import Dense, Field, Label, Schema, Sparse
from trireme.dense.adam_d2sum import AdamD2Sum
from trireme.errors import BadRequest
from trireme.initializer import Uniform
from trireme.metrics import AUC
from trireme.models.table_parameters import table_options
from trireme.policy import ShowClick
from trireme.table import Table
from trireme.train.recipe import Recipe

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], type[optim.Rule]]] = {
    "adagrad": (torch.optim.Adagrad, optim.Adagrad),
    "adam": (torch.optim.Adam, optim.Adam),
    "sgd": (torch.optim.SGD, optim.SGD),
}


class HyperParameters:
    """The hyper_parameters.* of a configuration.

    Args:
        defaults: values of this model for keys that the configuration does not have.
    """

    def __init__(self, config: Config, **defaults: Any) -> None:
        self._config, self._defaults = config, defaults

    def get(self, key: str, default: Any = None) -> Any:
        """The value of hyper_parameters.KEY, else the model's default, else this one."""
        return self._config.get(f"hyper_parameters.{key}", self._defaults.get(key, default))

    def _checked(
        self, key: str, default: Any, expected: str, is_valid: Callable[[Any], bool]
    ) -> Any:
        value = self.get(key, default)
        if not is_valid(value):
            raise BadRequest(f"hyper_parameters.{key}: expected {expected}, found {value!r}")
        return value

    def whole(self, key: str, default: int, *, least: int = 1) -> int:
        """An integer >= `least`. It and the methods below raise BadRequest for anything else."""
        expected = f"an integer >= {least}"
        return int(self._checked(key, default, expected, lambda n: type(n) is int and n >= least))

    def number(self, key: str, default: float) -> float:
        """A number above 0."""

        def is_positive(value: Any) -> bool:
            return type(value) in (int, float) and 0 < value < math.inf

        return float(self._checked(key, default, "a number > 0", is_positive))

    def share(self, key: str, default: float) -> float:
        """A number from 0 to below 1, as of a dropout."""

        def is_share(value: Any) -> bool:
            return type(value) in (int, float) and 0 <= value < 1

        return float(self._checked(key, default, "a number >= 0 and < 1", is_share))

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        return bool(self._checked(key, default, "true or false", lambda v: isinstance(v, bool)))

    def sizes(self, key: str, default: Sequence[int], *, least: int = 0) -> tuple[int, ...]:
        """Widths of layers: a list of at least `least` positive integers."""

        def are_sizes(value: Any) -> bool:
            is_list = isinstance(value, (list, tuple)) and len(value) >= least
            return is_list and all(type(size) is int and size > 0 for size in value)

        expected = "a list of positive integers" + (f", at least {least}" if least else "")
        return tuple(self._checked(key, default, expected, are_sizes))

    def names(self, key: str, default: Sequence[str]) -> tuple[str, ...]:
        """Names of features: a list of at least one string."""

        def are_names(value: Any) -> bool:
            is_list = isinstance(value, (list, tuple)) and len(value) > 0
            return is_list and all(isinstance(name, str) for name in value)

        return tuple(self._checked(key, default, "a list of names", are_names))

    @property
    def learning_rate(self) -> float:
        """Of the dense part and the rows. PaddleRec's files have either of two keys for it."""
        other = self.get("optimizer.learning_rate_base_lr")
        key = "optimizer.learning_rate" if other is None else "optimizer.learning_rate_base_lr"
        return self.number(key, 1e-3)

    @property
    def clip_norm(self) -> float | None:
        return None if self.get("clip_by_norm") is None else self.number("clip_by_norm", 1.0)

    @property
    def dim(self) -> int:
        return self.whole("sparse_feature_dim", 9)

    def features(self) -> tuple[str, ...]:
        """ "1", "2", ...: one less than sparse_inputs_slots, which counts the label."""
        return tuple(str(i) for i in range(1, self.whole("sparse_inputs_slots", 27, least=2)))

    def inputs(self) -> dict[str, Any]:
        """The keyword arguments of the models that name their inputs."""
        return {
            "features": self.features(),
            "num_dense": self.whole("dense_input_dim", 13, least=0),
            "dense": "dense_feature",
        }

    def schema(self, *labels: str) -> Schema:
        """PaddleRec's inputs in their order: labels, sparse features, dense numbers."""
        inputs = self.inputs()
        fields: list[Field] = [*map(Label, labels), *map(Sparse, inputs["features"])]
        if inputs["num_dense"]:
            fields.append(Dense(inputs["dense"], inputs["num_dense"]))
        return Schema(fields)

    def table(
        self,
        name: str = "embedding",
        *,
        dim: int | None = None,
        show_click: ShowClick | None = None,
        **options: Any,
    ) -> Table:
        """A table as table_parameters describes it; what it leaves out is taken from the options
        and the configured optimizer.

        Args:
            dim: floats per key that the model computes with; default sparse_feature_dim.
            show_click: columns that count shows and clicks of examples.
        """
        width = self.dim if dim is None else dim
        _, rule = self._optimizer()
        default: dict[str, Any] = {"dim": width, "optimizer": rule(lr=self.learning_rate)}
        if self.get("init_range") is not None:
            bound = self.number("init_range", 1.0)
            options["initializer"] = Uniform(-bound, bound)
        configured = table_options(self._config, name, width, show_click)
        return Table(name, **{**default, **options, **configured})

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """The configured optimizer of the dense parameters; None if there are none."""
        cls, _ = self._optimizer()
        if self.flag("adam_d2sum", False):
            if cls is not torch.optim.Adam:
                raise BadRequest(
                    "hyper_parameters.adam_d2sum: expected optimizer.class Adam with it, found"
                    f" {self.get('optimizer.class')}"
                )
            cls = AdamD2Sum
        parameters = list(model.parameters())
        if not parameters:
            return None
        return cls(parameters, lr=self.learning_rate)  # type: ignore[call-arg]

    def _optimizer(self) -> tuple[type[torch.optim.Optimizer], type[optim.Rule]]:
        name = str(self.get("optimizer.class", "Adam"))
        if name.lower() not in _OPTIMIZERS:
            raise BadRequest(
                f"hyper_parameters.optimizer.class: expected Adam, Adagrad or SGD, found {name!r}"
            )
        return _OPTIMIZERS[name.lower()]


def click_recipe(
    model: nn.Module,
    hyper: HyperParameters,
    *,
    label: str = "click",
    schema: Schema | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.binary_cross_entropy_with_logits,
) -> Recipe:
    """The recipe of a model with one click logit per example. schema: default `hyper.schema`.
    loss: of logits and labels.
    """
    return Recipe(
        model=model,
        loss=loss,
        optimizer=hyper.optimizer(model),
        label=label,
        schema=hyper.schema(label) if schema is None else schema,
        metrics=[AUC()],
        clip_norm=hyper.clip_norm,
    )
