"""Save and load a training run: every worker calls, one acts, all go on together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trireme.cluster import Cluster
from trireme.errors import Corruption, Internal, TriremeError, class_of_code
from trireme.ps.manifest import read_manifest
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
    # Streams have unequal lengths: the job has made as many steps as the longest.
    num_steps = max(body["num_steps"] for body, _ in met)

    def act() -> dict[str, Any]:
        save_checkpoint(
            cluster.client,
            Path(path),
            extra={
                "optimizer": {**optimizer.state_dict(), "num_steps": num_steps},
                "shapes": _shapes(optimizer),
                "user": dict(extra or {}),
            },
            buffers=dict(optimizer.model.named_buffers()),
        )
        return {}

    let_first_worker(cluster, "save", act)


def load(optimizer: DistributedOptimizer, path: str | Path) -> dict[str, Any]:
    """Bring servers, model and optimizer to the state of a checkpoint; returns its `extra`.

    Any number of servers may have written it. Group values (rates) are the checkpoint's.

    Raises:
        BadRequest: no checkpoint there. Corruption: a damaged file. SchemaMismatch: another model.
    """
    loaded = _load(optimizer, Path(path))
    optimizer.load_state_dict(loaded["extra"]["optimizer"])
    load_buffers(Path(path), dict(optimizer.model.named_buffers()))
    optimizer.resume()
    optimizer.refresh()
    extra: dict[str, Any] = loaded["extra"]["user"]
    return extra


def load_matching(optimizer: DistributedOptimizer, path: str | Path) -> list[str]:
    """Begin a new run with the weights and optimizer state of a checkpoint of a similar model.

    Tables are matched by name, dense parameters and buffers by name and shape; what does not match
    keeps its own values. Group values (rates) are this run's, and streams begin anew.

    Returns:
        What has kept its own values: names of tables, parameters and buffers.

    Raises:
        BadRequest: no checkpoint there. Corruption: a damaged file. SchemaMismatch: a table of the
            same name but another schema, or another class of optimizer.
    """
    own = _shapes(optimizer)
    saved = read_manifest(Path(path).absolute())["extra"].get("shapes")
    if saved is None:
        raise Corruption(f"checkpoint {path}: expected the shapes of its parameters, found none")
    matching = [name for name, shape in own.items() if saved.get(name) == shape]
    loaded = _load(optimizer, Path(path), matching)
    optimizer.set_num_steps(int(loaded["extra"]["optimizer"]["num_steps"]))
    kept = [table.name for table in optimizer.tables if table.name not in loaded["tables"]]
    kept += [name for name in own if name not in matching]
    kept += load_buffers(Path(path), dict(optimizer.model.named_buffers()), match=True)
    optimizer.resume()
    optimizer.refresh()
    return kept


def _shapes(optimizer: DistributedOptimizer) -> dict[str, list[int]]:
    of_group = {spec.param for spec in optimizer.replica.dense.specs}
    named = optimizer.model.named_parameters()
    return {name: list(parameter.shape) for name, parameter in named if name in of_group}


def _load(
    optimizer: DistributedOptimizer, path: Path, parameters: list[str] | None = None
) -> dict[str, Any]:
    """The servers load; returns the manifest."""
    optimizer.flush()
    cluster = optimizer.cluster
    cluster.client.gather({}, [], purpose="load")

    def act() -> dict[str, Any]:
        manifest = load_checkpoint(cluster.client, path, parameters=parameters)
        return {"extra": manifest["extra"], "tables": sorted(manifest["tables"])}

    return let_first_worker(cluster, "load", act)


def let_first_worker(
    cluster: Cluster, purpose: str, act: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Worker 0 acts; then all meet. All get what it returned, or raise its error."""
    outcome: dict[str, Any] = {}
    error: BaseException | None = None
    if cluster.worker == 0:
        try:
            outcome = {"returned": act()}
        except Exception as raised:  # noqa: BLE001 raised below, when the others know
            error = raised
            code = raised.code if isinstance(raised, TriremeError) else Internal.code
            outcome = {"code": code, "message": f"{type(raised).__name__}: {raised}"}
    met = cluster.client.gather(outcome, [], purpose=f"end of {purpose}", timeout_s=SAVE_TIMEOUT_S)
    if error is not None:
        raise error
    first: dict[str, Any] = met[0][0]
    if "code" in first:
        raise class_of_code(first["code"])(f"{purpose}: worker 0 failed: {first['message']}")
    returned: dict[str, Any] = first["returned"]
    return returned
