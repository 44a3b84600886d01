"""The param groups of a DistributedOptimizer: one per table, and those of the dense parameters.
Checks the latter.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trireme import _core
from trireme.blocks import Blocks
from trireme.dense.optimizers import needs_whole
from trireme.errors import wrong_argument
from trireme.nn.lookup import specs_of
from trireme.optim import values_of_group
from trireme.protocol.columns import merge
from trireme.table import RowClassId, Table
from trireme.worker.gradients import TableGradient
from trireme.worker.lookups import PendingLookups, RowLookup, pushed_gradients

log = logging.getLogger("trireme.train")

_SAVED_AS_EPS = {"beta", "initial_g2sum"}  # of FTRL and FleetAdagrad, which have no eps


def table_group(table: Table) -> dict[str, Any]:
    """The param group of a table."""
    return {"params": [], "table": table, **table.optimizer.group()}


def dense_groups_of(optimizer: object) -> list[dict[str, Any]]:
    """The param groups of torch's optimizer; none for None. Raises BadRequest: it is neither."""
    if optimizer is None:
        return []
    if not isinstance(optimizer, type) and hasattr(optimizer, "param_groups"):
        groups: list[dict[str, Any]] = optimizer.param_groups
        return groups
    name = "Adam"
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        name = optimizer.__name__
    raise wrong_argument(
        "DistributedOptimizer: expected an optimizer of the dense parameters, such as"
        f" torch.optim.{name}(model.parameters()), or None, found {optimizer!r}"[:300]
    )


def values_to_save(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a param group, by the names that checkpoints have for them."""
    values = {name: value for name, value in group.items() if name not in ("params", "table")}
    for name in _SAVED_AS_EPS & values.keys():
        values["eps"] = values.pop(name)  # any other is the dense optimizer's: torch adds it
    return values


def saved_values(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `values_to_save`: the values for this group."""
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in saved.items()}
    for name in _SAVED_AS_EPS & group.keys():
        values[name] = values.pop("eps")
    return values


def row_gradients(
    lookups: PendingLookups,
    groups: Iterable[Mapping[str, Any]],
    num_steps: int,
    pool: _core.Pool,
    *,
    on_host: bool = True,
) -> dict[RowClassId, TableGradient]:
    """Per `Table.class_id` the rows with a gradient; gradients of several lookups are summed.
    groups: of the tables. num_steps: which step this is, for rules that ask. on_host: on the CPU,
    not where the rows are.
    """
    gradients: dict[RowClassId, TableGradient] = {}
    pushed: dict[RowClassId, list[tuple[RowLookup, Tensor]]] = {}
    gradients_of = pushed_gradients(lookups.entries, on_host=on_host)
    for entry, gradients_KD in zip(lookups.entries, gradients_of, strict=True):
        if gradients_KD is not None:
            pushed.setdefault(entry.table.class_id, []).append((entry, gradients_KD))
    for group in groups:
        # Not what torch has added to the group: the dense optimizer's defaults, betas say.
        own = {name: group[name] for name in group["table"].optimizer.group()}
        values = values_of_group(own, num_steps)
        for table in group["table"].parts:
            parts = [
                TableGradient(entry.keys, gradients_KD, values, entry.columns)
                for entry, gradients_KD in pushed.get(table.class_id, ())
            ]
            if parts:
                gradients[table.class_id] = _sum(parts, pool)
    return gradients


def _sum(parts: list[TableGradient], pool: _core.Pool) -> TableGradient:
    if len(parts) == 1:
        return parts[0]
    keys_K, gradients_KD, columns = merge(
        [(part.keys, part.gradients.cpu().numpy(), part.columns, 1.0) for part in parts], pool
    )
    return TableGradient(keys_K, torch.from_numpy(gradients_KD), parts[0].values, columns)


def warn_of_frozen(model: nn.Module, trained: Collection[str]) -> None:
    """Log that a module has all its parameters frozen, and trains rows of these tables."""
    for name, module in model.named_modules():
        are_trained = [parameter.requires_grad for parameter in module.parameters()]
        tables = {spec.table.name for spec in specs_of([module])} & set(trained)
        if are_trained and not any(are_trained) and tables:
            log.warning(
                "%s: all parameters are frozen, and rows of table %s are trained:"
                " requires_grad_(False) does not reach rows; .detach() what their modules return"
                " to freeze them too",
                *(name or type(model).__name__, ", ".join(map(repr, sorted(tables)))),
            )
            return


def check_scales(tables: Iterable[Table], where: str, instead: str) -> None:
    """Raises BadRequest: a table whose gradients have Fleet's scale before several are summed."""
    for table in tables:
        if table.optimizer.scale == "fleet" and not table.schema.is_scored:
            raise wrong_argument(
                f"DistributedOptimizer: expected scale='loss' for table {table.name!r} {where},"
                " found 'fleet', which counts a key in one batch; give the table a ScorePolicy,"
                f" whose shows are added up, or use {instead}"
            )


def check_blocks(blocks: Blocks | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Raises BadRequest: nothing to cut into blocks, or an optimizer that needs it whole."""
    if blocks is not None and optimizer is None:
        raise wrong_argument(
            f"DistributedOptimizer: expected dense parameters to cut, found none and {blocks}"
        )
    if optimizer is None or not needs_whole(optimizer):
        return
    if blocks is None or blocks.size is not None:
        raise wrong_argument(
            f"DistributedOptimizer: {type(optimizer).__name__} needs whole parameters, found"
            f" {blocks or Blocks()}; give blocks=Blocks(None)"
        )


def named_parameters(
    model: nn.Module, groups: Iterable[dict[str, Any]]
) -> dict[str, tuple[torch.Tensor, int]]:
    """The model's trainable parameters with their groups, in the model's order."""
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    named: dict[str, tuple[torch.Tensor, int]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in group_of:
            named[name] = (parameter, group_of.pop(id(parameter)))
        elif parameter.requires_grad:
            raise wrong_argument(
                "DistributedOptimizer: expected all parameters of the model in the optimizer, found"
                f" {name} in no group: make it of model.parameters(), or requires_grad_(False)"
            )
    if group_of:
        raise wrong_argument(
            f"DistributedOptimizer: the optimizer holds {len(group_of)} parameters"
            " that are not the model's; make what they belong to a module of the model"
        )
    return named


class PendingRows(Sequence[Tensor]):
    """The rows of a table that forward passes have looked up since the last step: (K, W) leaves.

    A table's group shows them to torch.amp.GradScaler, which checks the gradients in the groups,
    and then calls `step` with two attributes set, `grad_scale` and `found_inf` (torch's contract
    with optimizers that have `_step_supports_amp_scaling`).
    """

    def __init__(self, table: Table, pending: Callable[[], PendingLookups]) -> None:
        self._parts = {part.class_id for part in table.parts}
        self._pending = pending

    def _rows(self) -> list[Tensor]:
        entries = self._pending().entries
        return [entry.rows for entry in entries if entry.table.class_id in self._parts]

    def __len__(self) -> int:
        return len(self._rows())

    def __getitem__(self, index: Any) -> Any:
        return self._rows()[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._rows())


def unscale(optimizer: torch.optim.Optimizer) -> bool:
    """Divide the gradients by the scale of a GradScaler, if one calls the step. Returns False: the
    scaler found a gradient that is not finite; all gradients are dropped.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and bool(found_inf):
        optimizer.zero_grad()
        return False
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        inverse = scale.double().reciprocal().float()  # as in the scaler's own unscale_
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    tensor.grad.mul_(inverse.to(tensor.grad.device))
    return True
