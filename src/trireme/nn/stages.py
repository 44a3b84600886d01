"""A model in stages, each with the label of the kind of device that computes it.

    model = tr.Stages(cpu=Wide(), gpu=Tower(), cpu_2=Head())

The order of the keywords is the order of computing. The first stage gets the batch, each other one
the tensors that the stage before returned, by name; the last returns what a model returns. Only
named tensors cross from stage to stage: what a stage returned is detached there, contiguous and on
the device of the next stage, and gradients of float tensors cross back together. So it makes no
difference whether two stages are in one process, and `loss.backward()` trains all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from trireme.accelerator import HOST
from trireme.errors import BadRequest, check_kind
from trireme.job.cluster import Cluster
from trireme.job.default import default
from trireme.label import is_label, without_number
from trireme.nn.lookup import specs_of

WITH_GRADIENT = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


class Stages(nn.Module):
    """Modules that compute one after the other, each on the device of its label.

    A stage is named by its label, `cpu` or `gpu`, or by its label and a number, as in `cpu_2`.
    Parameters of a stage `gpu` are named `stage_gpu.*`; `model["gpu"]` is its module.

    The stages are put on their devices when a Trainer or a DistributedOptimizer is made, or by the
    first forward pass; outputs come back to the device of the first. Embedding modules are in the
    first stage, which alone gets a batch.

    Raises:
        BadRequest: there is no stage; a name that is not a label; a parameter, a buffer or a table
            in two stages; embedding modules behind the first stage.
    """

    def __init__(self, **stages: nn.Module) -> None:
        super().__init__()
        if not stages:
            raise BadRequest("Stages: expected at least one stage, as in cpu=Model(), found none")
        for name, stage in stages.items():
            if not is_label(name):
                raise BadRequest(f"Stages: expected a label, as in gpu or gpu_2, found {name!r}")
            check_kind("Stages", f"stage {name!r}", stage, nn.Module, "a module")
            self.add_module(f"stage_{name}", stage)
        self.names = tuple(stages)
        self.devices = dict.fromkeys(stages, HOST)
        self._is_placed = False
        self._have_gradients: set[str] = set()  # stages that were checked
        self._check_owners()

    def __getitem__(self, name: str) -> nn.Module:
        """The module of a stage. Raises BadRequest: there is no such stage."""
        if name not in self.names:
            raise BadRequest(
                f"Stages: expected one of the stages {', '.join(self.names)}, found {name!r}"
            )
        return self.get_submodule(f"stage_{name}")

    def items(self) -> Iterator[tuple[str, nn.Module]]:
        """Name and module of each stage, in order."""
        return ((name, self[name]) for name in self.names)

    @property
    def rows_device(self) -> torch.device:
        """Where a batch comes to, as of embedding modules."""
        return self.devices[self.names[0]]

    def place(self, cluster: Cluster) -> None:
        """Put each stage on the device of its label. Raises BadRequest: a label that neither
        this process has a device for nor the job compute workers; a parameter, a buffer or a table
        in two stages.
        """
        self._check_owners()
        for name, stage in self.items():
            self.devices[name] = cluster.device(stage_label(name, cluster))
            stage.to(self.devices[name])
        self._is_placed = True

    def _apply(self, fn: Any, recurse: bool = True) -> Stages:
        """What torch calls to move a module or to change its type: it moves all stages."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, device in self.devices.items():
            self.devices[name] = fn(torch.empty(0, device=device)).device
        return self

    def forward(self, batch: Any) -> Any:
        """Compute all stages. Raises BadRequest: a stage returns anything but tensors by name, asks
        for one that no stage before it returns, or is not trained: no gradient comes to it.
        """
        if not self._is_placed:
            self.place(default())
        return self.returned(self.run(self.names, batch))

    def run(self, names: Sequence[str], values: Any) -> Any:
        """Compute some stages that follow one another. values: for the first of them: the batch, or
        what the stage before returned, as `carried`. Returns what the last of them returns, which
        is checked unless it is that of the model.
        """
        for name in names:
            if name != names[0]:
                values = self.carried(name, values)
            inputs, values = values, self[name](values)
            if name != self.names[-1]:
                check_boundary(name, values)
            if self.training and torch.is_grad_enabled() and name not in self._have_gradients:
                self._check_gradients(name, inputs, values)
                self._have_gradients.add(name)
        return values

    def carried(self, name: str, values: Mapping[str, Tensor]) -> Boundary:
        """What the stage before returned, as stage `name` gets it."""
        crossed = _carry(list(values.values()), self.devices[name])
        return Boundary(name, self.before(name), zip(values, crossed, strict=True))

    def before(self, name: str) -> str:
        """The stage before one that is not the first."""
        return self.names[self.names.index(name) - 1]

    def returned(self, values: Any) -> Any:
        """The outputs of the last stage, on the device of the first, where the batch is."""
        device = self.rows_device
        if device == self.devices[self.names[-1]]:
            return values
        if isinstance(values, Mapping):
            return {name: tensor.to(device) for name, tensor in values.items()}
        return values.to(device)

    # ---- checks ----

    def _check_owners(self) -> None:
        owners: dict[int, tuple[str, str]] = {}
        for name, stage in self.items():
            specs = list(specs_of([stage]))
            held: list[tuple[str, object]] = [
                *((f"parameter {key!r}", one) for key, one in stage.named_parameters()),
                *((f"buffer {key!r}", one) for key, one in stage.named_buffers()),
                *((f"table {s.table.name!r}", s.table.parts[0]) for s in specs),
            ]
            for what, one in held:
                other, other_stage = owners.setdefault(id(one), (what, name))
                if other_stage != name:
                    raise BadRequest(
                        f"Stages: expected each parameter, buffer and table in one stage, found"
                        f" {other} of stage {other_stage!r} in stage {name!r} too, as {what}"
                    )
            if specs and name != self.names[0]:
                raise BadRequest(
                    f"Stages: expected embedding modules in the first stage, {self.names[0]!r},"
                    f" which gets the batch, found table {specs[0].table.name!r} in stage {name!r}"
                )

    def _check_gradients(self, name: str, inputs: Any, outputs: Any) -> None:
        """Raises BadRequest: the stage, or the one before it, has something to train, and no
        gradient comes to it.
        """
        values = outputs.values() if isinstance(outputs, Mapping) else [outputs]
        learned = [t for t in values if isinstance(t, Tensor) and t.requires_grad]
        if not learned and _has_parameters(self[name]):
            raise BadRequest(
                f"Stages: expected an output of stage {name!r} that has a gradient, as the stage"
                f" has parameters to train, found {described(outputs)}"
            )
        entered = [t for t in inputs.values() if t.requires_grad] if name != self.names[0] else []
        if entered and not _lead_to(_nodes(learned), set(_nodes(entered))):
            raise no_gradient(name, self.before(name), inputs)


class Boundary(dict[str, Tensor]):
    """The tensors that a stage gets from the one before, by name."""

    def __init__(self, stage: str, before: str, tensors: Any) -> None:
        super().__init__(tensors)
        self._stage, self._before = stage, before

    def __missing__(self, name: object) -> Tensor:
        raise BadRequest(
            f"Stages: expected stage {self._stage!r} to read what stage {self._before!r} returns,"
            f" {', '.join(self)}, found that it reads {name!r}"
        )


def place_stages(model: nn.Module, cluster: Cluster) -> None:
    """Put the stages within a model on the devices of their labels. Raises as `Stages.place`."""
    for part in model.modules():
        if isinstance(part, Stages):
            part.place(cluster)


def stage_label(name: str, cluster: Cluster) -> str:
    """The label of a stage in this job. Raises BadRequest: the job has compute workers, but none of
    this label, and it is not `cpu`, which then stands for the worker.
    """
    labels = tuple(dict.fromkeys(label for label, _ in cluster.heter))
    label = label_of(name, labels)
    if labels and label not in (*labels, "cpu"):
        raise BadRequest(
            f"Stages: expected compute workers of label {label!r} for stage {name!r}, found those"
            f" of {', '.join(labels)}"
        )
    return label


def label_of(name: str, labels: Sequence[str] = ()) -> str:
    """The label of a stage: its name if that is one of `labels`, else its name without number."""
    return name if name in labels else without_number(name)


def check_boundary(stage: str, values: Any) -> None:
    """Raises BadRequest: what a stage returned cannot be given to the next one."""
    expected = f"Stages: expected stage {stage!r} to return a dict of tensors by name, found"
    if not isinstance(values, Mapping) or not values:
        raise BadRequest(f"{expected} {'none' if values == {} else type(values).__name__}")
    for name, tensor in values.items():
        if not isinstance(name, str) or not name:
            raise BadRequest(f"{expected} the name {name!r}")
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            layout = getattr(tensor, "layout", type(tensor).__name__)
            raise BadRequest(f"{expected} {name!r}: {layout}")
        if tensor.dtype not in (*WITH_GRADIENT, *INTEGERS):
            raise BadRequest(
                f"Stages: expected stage {stage!r} to return tensors of"
                f" {', '.join(str(d) for d in (*WITH_GRADIENT, *INTEGERS))}, found {name!r} of"
                f" {tensor.dtype}"
            )


def no_gradient(stage: str, before: str, inputs: Mapping[str, Tensor]) -> BadRequest:
    """The error of a stage that gives no gradient to the one before."""
    return BadRequest(
        f"Stages: expected an output of stage {stage!r} that depends on what stage {before!r}"
        f" returned, which has something to train, found that no gradient comes back to"
        f" {described(inputs)}"
    )


def described(values: Any) -> str:
    """What a stage returned, for an error."""
    if not isinstance(values, Mapping):
        return _kind(values)
    return ", ".join(f"{name}: {_kind(value)}" for name, value in values.items())


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    dtype = str(value.dtype).removeprefix("torch.")
    return dtype if value.requires_grad else f"{dtype} without gradient"


def _has_parameters(stage: nn.Module) -> bool:
    """Whether the stage has parameters or rows to train."""
    is_any = any(parameter.requires_grad for parameter in stage.parameters())
    return is_any or next(specs_of([stage]), None) is not None


def _carry(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_Crossing.apply(device, *tensors))  # type: ignore[no-untyped-call]
    return [_crossed(tensor, device) for tensor in tensors]


def _crossed(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().contiguous().to(device)


class _Crossing(torch.autograd.Function):
    """All tensors of a boundary, whose gradients come back together: no part of the stage before
    computes backward until the whole stage behind has.
    """

    @staticmethod
    def forward(ctx: Any, device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.devices = [tensor.device for tensor in tensors]
        crossed = tuple(_crossed(tensor, device) for tensor in tensors)
        without = [c for c, t in zip(crossed, tensors, strict=True) if not t.requires_grad]
        ctx.mark_non_differentiable(*without)
        return crossed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        returned = (
            None if grad is None else grad.contiguous().to(device)
            for grad, device in zip(grads, ctx.devices, strict=True)
        )
        return None, *returned


def _nodes(tensors: Sequence[Tensor]) -> list[Any]:
    """Where a backward pass comes to these tensors."""
    return [get_gradient_edge(tensor).node for tensor in tensors]


def _lead_to(roots: Sequence[Any], targets: set[Any]) -> bool:
    """Whether a backward pass from these nodes reaches one of the targets."""
    ahead, seen = list(roots), set(roots)
    while ahead:
        node = ahead.pop()
        if node in targets:
            return True
        following = [other for other, _ in node.next_functions if other is not None]
        ahead += [other for other in following if other not in seen]
        seen.update(following)
    return False
