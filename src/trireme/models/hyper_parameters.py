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

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

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

log = logging.getLogger("trireme")

INTEGER_MAX = 2**31 - 1
_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], type[optim.Rule]]] = {
    "adagrad": (torch.optim.Adagrad, optim.Adagrad),
    "adam": (torch.optim.Adam, optim.Adam),
    "sgd": (torch.optim.SGD, optim.SGD),
}
_Option = TypeVar("_Option")


class HyperParameters:
    """The hyper_parameters.* of a configuration.

    Args:
        section: what the keys begin with, where models read others: "runner".
        defaults: values of this model for keys that the configuration does not have.
    """

    def __init__(
        self, config: Config, section: str = "hyper_parameters", /, **defaults: Any
    ) -> None:
        self._config, self._section, self._defaults = config, section, defaults

    def get(self, key: str, default: Any = None) -> Any:
        """The value of SECTION.KEY, else the model's default, else this one."""
        return self._config.get(f"{self._section}.{key}", self._defaults.get(key, default))

    def _checked(
        self, key: str, default: Any, expected: str, is_valid: Callable[[Any], bool]
    ) -> Any:
        value = self.get(key, default)
        if not is_valid(value):
            raise BadRequest(f"{self._section}.{key}: expected {expected}, found {value!r}")
        return value

    def _list(
        self,
        key: str,
        default: Sequence[_Option],
        expected: str,
        is_valid: Callable[[Any], bool],
        least: int = 0,
    ) -> tuple[_Option, ...]:
        def is_list(value: Any) -> bool:
            has_size = isinstance(value, (list, tuple)) and len(value) >= least
            return has_size and all(map(is_valid, value))

        return tuple(self._checked(key, default, expected, is_list))

    def whole(self, key: str, default: int, *, least: int = 1) -> int:
        """An integer >= `least`. It and the methods below raise BadRequest for anything else."""
        expected = f"an integer >= {least}"
        self._checked(key, default, expected, lambda n: type(n) is int and n >= least)
        most = f"an integer <= {INTEGER_MAX}"
        return int(self._checked(key, default, most, lambda n: n <= INTEGER_MAX))

    def number(self, key: str, default: float, *, may_be_zero: bool = False) -> float:
        """A number above 0, or not below it: may_be_zero, where 0 switches a part off."""

        def is_right(value: Any) -> bool:
            is_number = type(value) in (int, float) and 0 <= value < math.inf
            return is_number and (may_be_zero or value > 0)

        expected = f"a number {'>=' if may_be_zero else '>'} 0"
        return float(self._checked(key, default, expected, is_right))

    def share(self, key: str, default: float) -> float:
        """A number from 0 to below 1, as of a dropout."""
        return float(self._checked(key, default, "a number >= 0 and < 1", _is_share))

    def shares(self, key: str, default: Sequence[float]) -> tuple[float, ...]:
        """A list of numbers from 0 to below 1."""
        return self._list(key, default, "a list of numbers >= 0 and < 1", _is_share)

    def numbers(self, key: str, default: Sequence[float]) -> tuple[float, ...]:
        """As many numbers as the default has."""

        def are_numbers(value: Any) -> bool:
            is_list = isinstance(value, (list, tuple)) and len(value) == len(default)
            return is_list and all(type(x) in (int, float) and math.isfinite(x) for x in value)

        return tuple(self._checked(key, default, f"{len(default)} numbers", are_numbers))

    def flag(self, key: str, default: bool) -> bool:
        """true or false, which Python's readers also take as 1 and 0."""

        def is_flag(value: Any) -> bool:
            return type(value) in (bool, int) and value in (0, 1)

        return bool(self._checked(key, default, "true or false", is_flag))

    def sizes(self, key: str, default: Sequence[int], *, least: int = 0) -> tuple[int, ...]:
        """Widths of layers: a list of at least `least` positive integers."""
        expected = "a list of positive integers" + (f", at least {least}" if least else "")
        return self._list(key, default, expected, _is_size, least)

    def counts(self, key: str, default: Sequence[int]) -> tuple[int, ...]:
        """A list of integers >= 0."""
        expected = "a list of integers >= 0"
        return self._list(key, default, expected, lambda n: type(n) is int and n >= 0)

    def pair(self, key: str, default: tuple[int, int]) -> tuple[int, int]:
        """Two sizes."""
        first, second, *more = self.sizes(key, default, least=2)
        if more:
            raise BadRequest(f"{self._section}.{key}: expected two sizes, found {self.get(key)}")
        return first, second

    def fixed(self, key: str, expected: Any, why: str = "") -> None:
        """A key of which one value alone fits. why: what it follows from, such as another key;
        nothing, where the model follows no other value.
        """

        def is_it(actual: Any) -> bool:
            return bool(actual == expected) and isinstance(actual, bool) == isinstance(
                expected, bool
            )

        self._checked(key, expected, f"{expected!r}, {why}" if why else repr(expected), is_it)

    def choice(self, key: str, default: str, options: Mapping[str, _Option]) -> _Option:
        """What one of the names stands for."""

        def is_option(value: Any) -> bool:
            return isinstance(value, str) and value in options

        return options[self._checked(key, default, " or ".join(options), is_option)]

    def names(self, key: str, default: Sequence[str]) -> tuple[str, ...]:
        """Names of features: a list of at least one string."""
        return self._list(key, default, "a list of names", lambda n: isinstance(n, str), least=1)

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
        weight_decay: float = 0.0,
        **options: Any,
    ) -> Table:
        """A table as table_parameters describes it; what it leaves out is taken from the options
        and the configured optimizer.

        Args:
            dim: floats per key that the model computes with; default sparse_feature_dim.
            show_click: columns that count shows and clicks of examples.
            weight_decay: of the configured optimizer.
        """
        width = self.dim if dim is None else dim
        _, rule = self._optimizer()
        optimizer = rule(lr=self.learning_rate, weight_decay=weight_decay)
        default: dict[str, Any] = {"dim": width, "optimizer": optimizer}
        if self.get("init_range") is not None:
            bound = self.number("init_range", 1.0)
            options["initializer"] = Uniform(-bound, bound)
        configured = table_options(self._config, name, width, show_click)
        if "initializer" in configured and f"{self._section}.init_range" in self._config:
            log.warning(
                "%s.init_range: no effect on table %s: initial_range of its table_parameters says"
                " how its rows start",
                *(self._section, name),
            )
        return Table(name, **{**default, **options, **configured})

    def optimizer(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer | None:
        """The configured optimizer of the dense parameters, with these options; None if there are
        none.
        """
        cls, _ = self._optimizer()
        if self.flag("adam_d2sum", False):
            if cls is not torch.optim.Adam:
                raise BadRequest(
                    "hyper_parameters.adam_d2sum: expected optimizer.class Adam with it, found"
                    f" {self.get('optimizer.class')}"
                )
            if options:
                raise BadRequest(
                    "hyper_parameters.adam_d2sum: expected false with a model whose optimizer has"
                    f" {', '.join(options)}, found true"
                )
            cls = AdamD2Sum
        parameters = list(model.parameters())
        if not parameters:
            return None
        return cls(parameters, lr=self.learning_rate, **options)  # type: ignore[call-arg]

    def recipe(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], **rest: Any) -> Recipe:
        """The recipe of a model, with the configured optimizer and clip_by_norm.

        rest: the other arguments of the Recipe; `label` is None without, and an optimizer is used
            in place of the configured one.
        """
        rest = {"label": None, **rest}
        if "optimizer" not in rest:
            rest["optimizer"] = self.optimizer(model)
        return Recipe(model=model, loss=loss, clip_norm=self.clip_norm, **rest)

    def _optimizer(self) -> tuple[type[torch.optim.Optimizer], type[optim.Rule]]:
        name = str(self.get("optimizer.class", "Adam"))
        if name.lower() not in _OPTIMIZERS:
            raise BadRequest(
                f"hyper_parameters.optimizer.class: expected Adam, Adagrad or SGD, found {name!r}"
            )
        return _OPTIMIZERS[name.lower()]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= INTEGER_MAX


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1


def file_of(config: Config, key: str) -> Path:
    """The file that a key names; its path starts at the folder of the configuration.

    Raises BadRequest: no name.
    """
    name = config.get(key, None)
    if not isinstance(name, str):
        raise BadRequest(f"{key}: expected a file, found {name!r}")
    return (Path() if config.path is None else config.path.parent) / name


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
    schema = hyper.schema(label) if schema is None else schema
    return hyper.recipe(model, loss, label=label, schema=schema, metrics=[AUC()])
