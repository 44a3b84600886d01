"""What stands for Fleet's programs and variables: a model with its loss, and what trains it.

    loss = fleet.Loss(model, nn.functional.binary_cross_entropy_with_logits, label="click")
    fleet.distributed_optimizer(torch.optim.Adam(model.parameters()), strategy).minimize(loss)
    program = fleet.static.default_main_program()

Fleet builds a program from the layers that a script calls, and `minimize` adds to it how it is
trained. A torch model is a program already: a `Loss` says what else Fleet reads from the graph, and
`minimize` makes the two a `Program`. Nothing is connected before its trainer is first needed, so a
server runs the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trireme.data.schema import Dense, Field, Label, Show, Sparse
from trireme.errors import BadRequest, NotReady

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trireme.metrics import Metric
    from trireme.nn.modules import TableModule
    from trireme.train import Trainer


@dataclass(frozen=True, eq=False)
class Loss:
    """Fleet's variable of a loss: `minimize` and `fetch_list` take it.

    model: takes a batch.
    function: (outputs, labels) -> scalar, the mean over the examples; as the Trainer's `loss`.
    label: name of the label column; None: function reads the batch.
    metrics: computed while training and evaluating.
    """

    model: nn.Module
    function: Callable[[Any, Any], torch.Tensor]
    label: str | None = "label"
    metrics: Sequence[Metric] = ()
    name: str = field(default="loss", init=False)


@dataclass(frozen=True)
class Variable:
    """An input of the model, as `static.data` declares it; `use_var`, feed and fetch lists take it.

    shape: [None, width] of one example each. dtype: "int64" or "float32".
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    lod_level: int = 0

    def field(self, model: Sequence[Field], features: Iterable[str]) -> Field:
        """The field of MultiSlot text. model, features: see `field_of`. Raises BadRequest: integers
        of which it knows nothing.
        """
        if self.dtype == "float32":
            return Dense(self.name, self.shape[-1] or 1)
        return field_of(self.name, model, features, is_bag=self.lod_level > 0)


NOT_BUILT = (
    "no program is built by calling layers: write the network as a torch.nn.Module, and"
    " minimize(fleet.Loss(model, ...))"
)


class Program:
    """A model to be trained; what `minimize` makes.

    Attributes:
        loss: what is minimized.
        strategy: how it is trained; DistributeTranspiler sets its config here.
        is_test: a copy that evaluates only, made by clone(for_test=True).
    """

    def __new__(cls, *made_of: Any, **_: Any) -> Program:
        if not made_of:  # as scripts of static graphs begin
            raise BadRequest(f"static.Program: {NOT_BUILT}")
        return super().__new__(cls)

    def __init__(
        self,
        loss: Loss,
        strategy: Any,
        make: Callable[[Program], Trainer],
        *,
        is_test: bool = False,
    ) -> None:
        self.loss, self.strategy, self.is_test = loss, strategy, is_test
        self._make = make
        self._trainer: Trainer | None = None
        self._trained: Program = self  # of a copy: the original

    @property
    def has_trainer(self) -> bool:
        return self._trained._trainer is not None

    @property
    def trainer(self) -> Trainer:
        """The Trainer of this program, made at the first use, which joins the job."""
        original = self._trained
        if original._trainer is None:
            original._trainer = original._make(original)
        return original._trainer

    def clone(self, for_test: bool = False) -> Program:
        """The same model; for_test: which is evaluated and not trained."""
        copy = Program(self.loss, self.strategy, self._make, is_test=for_test)
        copy._trained = self._trained
        return copy

    def global_block(self) -> Any:
        raise BadRequest(
            "Program.global_block: a torch model has no blocks of operations; its parts are"
            " model.named_modules(), its parameters model.named_parameters()"
        )


class StartupProgram:
    """What an executor runs first: it joins the job and gives tables and parameters to the servers.
    `main`: the program that it starts; None: that of the last minimize.
    """

    def __init__(self, main: Program | None = None) -> None:
        self.main = main


@dataclass(frozen=True)
class ServerProgram:
    """What serves at an address when an executor runs it; made by DistributeTranspiler."""

    endpoint: str
    serve: Callable[[], None]


class Programs:
    """The default program of this process: that of the last `minimize`."""

    def __init__(self) -> None:
        self.main: Program | None = None

    def required(self, what: str) -> Program:
        if self.main is None:
            raise NotReady(
                f"{what}: expected a program, found none: call"
                " fleet.distributed_optimizer(optimizer, strategy).minimize(fleet.Loss(model, ...))"
                " before"
            )
        return self.main

    def forget(self, *, trained_only: bool = False) -> None:
        """Begin anew. trained_only: keep one whose trainer was not made yet."""
        if self.main is not None and (self.main.has_trainer or not trained_only):
            self.main = None


programs = Programs()


def names_of(what: str, values: Sequence[Any] | None) -> list[str]:
    """The names of variables: strings, or what has a name (Loss, Variable, a metric)."""
    if isinstance(values, str):
        raise BadRequest(f"{what}: expected a list of names, found {values!r}")
    names = [v if isinstance(v, str) else getattr(v, "name", None) for v in values or ()]
    for value, name in zip(values or (), names, strict=True):
        if not isinstance(name, str):
            raise BadRequest(
                f"{what}: expected names, or variables that have one (fleet.Loss, static.data,"
                f" metrics), found {type(value).__name__}"
            )
    return [str(name) for name in names]


def fields_of(variables: Iterable[Any]) -> list[Field]:
    """The fields that `use_var` names: fields of trireme.data, variables of static.data, or names
    of what the program's model reads.
    """
    loss = None if programs.main is None else programs.main.loss
    modules = [] if loss is None else tables_of(loss.model)
    features = {name for module in modules for name in module.features}
    numbers: list[Field] = [] if loss is None or loss.label is None else [Label(loss.label)]
    for module in modules:
        counts = getattr(module.table.policy, "show_click", None)
        if counts is not None:
            shows = [] if counts.show is None else [Show(counts.show)]
            numbers += [Label(counts.click), *shows]
    fields: list[Field] = []
    for variable in variables:
        if isinstance(variable, Variable):
            fields.append(variable.field(numbers, features))
        elif isinstance(variable, str):
            fields.append(field_of(variable, numbers, features))
        else:
            fields.append(variable)
    return fields


def tables_of(model: nn.Module) -> list[TableModule]:
    """The embedding modules within the model."""
    from trireme.nn.modules import TableModule

    return [m for m in model.modules() if isinstance(m, TableModule)]


def field_of(
    name: str, numbers: Sequence[Field], features: Iterable[str], *, is_bag: bool = False
) -> Field:
    """numbers: the fields of the model's label, and of the shows and clicks of its tables."""
    if known := [field for field in numbers if field.name == name]:
        return known[0]
    if is_bag or name in features:
        return Sparse(name)
    raise BadRequest(
        f"use_var: expected {name!r} to be the label, shows or clicks"
        f" ({', '.join(sorted({field.name for field in numbers})) or 'none'}) or a feature"
        f" ({', '.join(sorted(features)) or 'none'}) of the model that minimize() was called for"
        f" before; else write what it is: trireme.data.Label({name!r}), Sparse({name!r}) or"
        f" Dense({name!r}, width)"
    )
