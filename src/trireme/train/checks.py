"""What a DistributedOptimizer is given: parameters in groups, tables, blocks; checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trireme.blocks import Blocks
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.protocol.dense_optimizers import needs_whole
from trireme.strategy import Strategy
from trireme.table import Table


def table_group(table: Table) -> dict[str, Any]:
    return {"params": [], "table": table, **table.optimizer.group()}


def check_blocks(
    blocks: Blocks | None, strategy: Strategy, optimizer: torch.optim.Optimizer | None
) -> None:
    if blocks is not None and strategy.mode == "hybrid":
        raise BadRequest(
            "DistributedOptimizer: expected no blocks in mode 'hybrid', whose dense parameters are"
            f" in the workers, found {blocks}"
        )
    if blocks is not None and optimizer is None:
        raise BadRequest(
            f"DistributedOptimizer: expected dense parameters to cut, found none and {blocks}"
        )
    if optimizer is None or not needs_whole(optimizer):
        return
    name = type(optimizer).__name__
    if strategy.mode == "hybrid":
        raise BadRequest(
            f"DistributedOptimizer: {name} needs whole parameters; in mode 'hybrid' servers keep"
            " them in blocks, for checkpoints"
        )
    if blocks is None or blocks.size is not None:
        raise BadRequest(
            f"DistributedOptimizer: {name} needs whole parameters, found {blocks or Blocks()};"
            " give blocks=Blocks(None)"
        )


def check_scales(tables: Iterable[Table], strategy: Strategy, cluster: Cluster) -> None:
    if strategy.mode != "sync" or cluster.num_workers == 1:
        return
    for table in tables:
        if table.optimizer.scale == "fleet" and not table.schema.is_scored:
            raise BadRequest(
                f"DistributedOptimizer: expected scale='loss' for table {table.name!r} in sync with"
                f" {cluster.num_workers} workers, found 'fleet', which counts a key in the batch of"
                " one worker; give the table a ScorePolicy, whose shows servers add up, or use"
                " Strategy('async'), as Fleet does"
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
            raise BadRequest(
                f"DistributedOptimizer: expected all parameters of the model in the optimizer,"
                f" found {name} in no group; freeze it with requires_grad_(False) or add it"
            )
    if group_of:
        raise BadRequest(
            f"DistributedOptimizer: the optimizer holds {len(group_of)} parameters"
            " that are not the model's"
        )
    return named
