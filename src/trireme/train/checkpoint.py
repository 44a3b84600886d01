"""Save and load a training run: every worker calls, one acts, all go on together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trireme.cluster import Cluster
from trireme.errors import Corruption, Internal, TriremeError, class_of_code
from trireme.ps.manifest import read_manifest
from trireme.ps.saving import SAVE_TIMEOUT_S, load_checkpoint, read_tensors, save_checkpoint
from trireme.train.moment import Moment, install_buffers, meet, random_of, stored
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.random_state import RandomState

log = logging.getLogger("trireme.train")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that this run goes on from.

    path: of it. extra: what `save` was given. num_workers: of the run that it is of.
    random: this worker's random numbers, if it has them.
    """

    path: Path
    extra: dict[str, Any]
    num_workers: int
    random: dict[str, Tensor]


def save(
    optimizer: DistributedOptimizer,
    path: str | Path,
    extra: Mapping[str, Any] | None = None,
    *,
    random: RandomState | None = None,
    published: Callable[[], None] = lambda: None,
) -> None:
    """Write tables, dense parameters, optimizer state, module buffers and random numbers of all
    workers into a new folder.

    Args:
        path: worker 0's counts.
        extra: JSON values that `load` gives back; worker 0's count.
        random: knows of more random numbers than the global ones.
        published: worker 0 calls it when the folder is complete.

    Raises:
        BadRequest: the folder exists, or is outside the servers' root.
        Corruption: the folder is not on storage that all processes share.
    """
    optimizer.flush()
    moments = meet(optimizer.cluster, Moment.of(optimizer, random or RandomState()))

    def act() -> dict[str, Any]:
        write(optimizer, Path(path), moments, optimizer.state_dict(), extra or {})
        published()
        return {}

    let_first_worker(optimizer.cluster, "save", act)


def write(
    optimizer: DistributedOptimizer,
    path: Path,
    moments: Sequence[Moment],
    groups: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> None:
    """Worker 0's part of a save, also while all train on.

    Args:
        moments: of the first workers, or of all.
        groups: the optimizer's state_dict.
    """
    # Streams have unequal lengths: the job has made as many steps as the longest.
    num_steps = max(moment.num_steps for moment in moments)
    steps = {"num_steps": num_steps, "before": moments[0].num_steps - moments[0].sequence}
    save_checkpoint(
        optimizer.cluster.client,
        path,
        extra={
            "optimizer": {**groups, **steps},
            "shapes": _shapes(optimizer),
            "num_workers": optimizer.cluster.num_workers,
            "user": dict(extra),
        },
        tensors=stored(moments),
    )


def load(
    optimizer: DistributedOptimizer, path: str | Path, random: RandomState | None = None
) -> Loaded:
    """Bring servers, model, optimizer and random numbers to the state of a checkpoint.

    Any number of servers may have written it. Group values (rates) are the checkpoint's.

    Raises:
        BadRequest: no checkpoint there. Corruption: a damaged file. SchemaMismatch: another model.
    """
    loaded = _on_servers(optimizer, lambda load_one: load_one(Path(path)))
    assert loaded is not None
    return _adopt(optimizer, loaded, random or RandomState())


def load_newest(
    optimizer: DistributedOptimizer, candidates: Callable[[], list[Path]], random: RandomState
) -> Loaded | None:
    """As `load`, of the first of these that is whole; a damaged one is reported and passed over.

    Args:
        candidates: worker 0 asks for them, the best one first.

    Returns:
        None: there are none at all.

    Raises:
        Corruption: all of them are damaged. The others as `load`.
    """

    def choose(load_one: Callable[[Path], dict[str, Any]]) -> dict[str, Any] | None:
        damaged = None
        paths = candidates()
        for path in paths:
            try:
                return load_one(path)
            except Corruption as error:
                log.warning("resume: passing over the checkpoint %s: %s", path, error)
                damaged = error
        if damaged is not None:
            raise Corruption(
                f"resume: expected a whole checkpoint, found {len(paths)} damaged ones; the oldest:"
                f" {damaged}"
            )
        return None

    loaded = _on_servers(optimizer, choose)
    return None if loaded is None else _adopt(optimizer, loaded, random)


def load_matching(optimizer: DistributedOptimizer, path: Path) -> list[str]:
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
    saved = read_manifest(path.absolute())["extra"].get("shapes")
    if saved is None:
        raise Corruption(f"checkpoint {path}: expected the shapes of its parameters, found none")
    matching = [name for name, shape in own.items() if saved.get(name) == shape]
    loaded = _on_servers(optimizer, lambda load_one: load_one(path), matching)
    assert loaded is not None
    optimizer.set_num_steps(int(loaded["extra"]["optimizer"]["num_steps"]))
    kept = [table.name for table in optimizer.tables if table.name not in loaded["tables"]]
    kept += [name for name in own if name not in matching]
    tensors, model = read_tensors(path), optimizer.model
    kept += install_buffers(tensors, model, 0, where=f"checkpoint {path}", match=True)
    optimizer.resume()
    optimizer.refresh()
    return kept


def _shapes(optimizer: DistributedOptimizer) -> dict[str, list[int]]:
    of_group = {spec.param for spec in optimizer.replica.dense.specs}
    named = optimizer.model.named_parameters()
    return {name: list(parameter.shape) for name, parameter in named if name in of_group}


def _on_servers(
    optimizer: DistributedOptimizer,
    choose: Callable[[Callable[[Path], dict[str, Any]]], dict[str, Any] | None],
    parameters: list[str] | None = None,
) -> dict[str, Any] | None:
    """The servers load what worker 0 chooses: `choose` calls what it gets with paths."""
    optimizer.flush()
    cluster = optimizer.cluster
    cluster.client.gather({}, [], purpose="load")

    def load_one(path: Path) -> dict[str, Any]:
        read_tensors(path)  # its checksum, before the servers change
        manifest = load_checkpoint(cluster.client, path, parameters=parameters)
        return {
            "path": str(path),
            "extra": manifest["extra"],
            "tables": sorted(manifest["tables"]),
        }

    return let_first_worker(cluster, "load", lambda: choose(load_one) or {}) or None


def _adopt(optimizer: DistributedOptimizer, loaded: dict[str, Any], random: RandomState) -> Loaded:
    """This worker's side of what the servers have loaded."""
    path, extra, worker = Path(loaded["path"]), loaded["extra"], optimizer.cluster.worker
    steps = extra["optimizer"]
    optimizer.load_state_dict(steps)
    tensors = read_tensors(path)
    install_buffers(tensors, optimizer.model, worker, where=f"checkpoint {path}")
    optimizer.resume()
    if not optimizer.is_sync and optimizer.sequence:  # each worker counts its own
        optimizer.set_num_steps(int(steps["before"]) + optimizer.sequence)
    optimizer.refresh()
    own = random_of(tensors, worker)
    random.restore(own)
    return Loaded(path, extra["user"], int(extra["num_workers"]), own)


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
