"""Save and load a training run: every worker calls, one acts, all go on together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trireme.ps.saving import SAVE_TIMEOUT_S, load_buffers, load_checkpoint, save_checkpoint
from trireme.train.optimizer import DistributedOptimizer


def save(
    optimizer: DistributedOptimizer, path: str | Path, extra: Mapping[str, Any] | None = None
) -> None:
    """Write tables, dense parameters, optimizer state and module buffers into a new folder.

    Args:
        optimizer: of the model; buffers (BatchNorm and the like) are worker 0's.
        extra: JSON values that `load` gives back.

    Raises:
        BadRequest: the folder exists, or is outside the servers' root.
        Corruption: the folder is not on storage that all processes share.
    """
    optimizer.flush()
    cluster = optimizer.cluster
    mine = {"num_steps": optimizer.num_steps}
    met = cluster.client.gather(mine, [], purpose="save")
    if cluster.worker == 0:
        # Streams have unequal lengths: the job has made as many steps as the longest.
        num_steps = max(body["num_steps"] for body, _ in met)
        save_checkpoint(
            cluster.client,
            Path(path),
            extra={
                "optimizer": {**optimizer.state_dict(), "num_steps": num_steps},
                "user": dict(extra or {}),
            },
            buffers=dict(optimizer.model.named_buffers()),
        )
    cluster.client.gather({}, [], purpose="end of save", timeout_s=SAVE_TIMEOUT_S)


def load(optimizer: DistributedOptimizer, path: str | Path) -> dict[str, Any]:
    """Bring servers, model and optimizer to the state of a checkpoint; returns its `extra`.

    Any number of servers may have written it. Group values (rates) are the checkpoint's.

    Raises:
        BadRequest: no checkpoint there. Corruption: a damaged file. SchemaMismatch: another model.
    """
    optimizer.flush()
    cluster = optimizer.cluster
    cluster.client.gather({}, [], purpose="load")
    loaded: dict[str, Any] = {}
    if cluster.worker == 0:
        loaded = load_checkpoint(cluster.client, Path(path))
    met = cluster.client.gather(loaded, [], purpose="end of load", timeout_s=SAVE_TIMEOUT_S)
    loaded = met[0][0]
    optimizer.load_state_dict(loaded["optimizer"])
    load_buffers(Path(path), dict(optimizer.model.named_buffers()))
    optimizer.resume()
    optimizer.refresh()
    extra: dict[str, Any] = loaded["user"]
    return extra
