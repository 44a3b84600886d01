"""Load a checkpoint into servers and workers: every worker calls, worker 0 has the servers read."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from trireme.checkpoint.format.manifest import CheckpointManifest, read_manifest
from trireme.checkpoint.worker_side.load import load_checkpoint
from trireme.errors import BadRequest, Corruption, SchemaMismatch, TriremeError
from trireme.storage.storage import open_storage
from trireme.train.checkpointing.checkpoint_location import Location
from trireme.train.checkpointing.random_state import RandomState
from trireme.train.checkpointing.save import parameter_shapes
from trireme.train.checkpointing.worker_state import install_buffers, random_state_of
from trireme.train.first_worker import let_first_worker
from trireme.train.optimizer import DistributedOptimizer

log = logging.getLogger("trireme.train")


Dense = Literal["strict", "match", "skip"]
LoadOne = Callable[[Location], dict[str, Any]]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that this run continues from."""

    path: str
    extra: dict[str, Any]  # the JSON values that `save` got
    num_streams: int  # per pass in the run that saved it
    random: dict[str, Tensor]  # the random numbers of this worker, if it has them


def load(
    optimizer: DistributedOptimizer, location: Location, random: RandomState | None = None
) -> LoadedCheckpoint:
    """Bring servers, model, optimizer and random numbers to the state of a checkpoint, whatever
    number of servers wrote it. Group values (learning rates) are the checkpoint's. The next pass is
    a new one: streams continue where all rows have seen the same pushes, and else start over, so
    that no row takes a new push for one that it has seen. Raises: see Trainer.load.
    """
    loaded = _load_on_servers(optimizer, lambda load_one: load_one(location), resumes=False)
    optimizer.unfinished = ""
    return _load_on_worker(optimizer, loaded, location, random or RandomState())


def load_newest(
    optimizer: DistributedOptimizer,
    candidates: Callable[[], list[Location]],
    storage_options: Mapping[str, Any] | None,
    random: RandomState,
) -> LoadedCheckpoint | None:
    """Load the first of several checkpoints that is whole, and warn of each damaged one; None:
    there are none. Streams continue after what it holds. candidates: called on worker 0; returns
    locations with these storage_options, best first. Raises Corruption: all of them are damaged.
    BadRequest: pushes of this run cannot complete it. Others as `load`.
    """

    def choose(load_one: LoadOne) -> dict[str, Any]:
        damage = None
        locations = candidates()
        for location in locations:
            try:
                return load_one(location)
            except Corruption as error:
                log.warning("resume: passing over the checkpoint %s: %s", location.path, error)
                damage = error
        if damage is not None:
            raise Corruption(
                f"resume: expected a whole checkpoint, found {len(locations)} damaged ones; the"
                f" oldest: {damage}"
            )
        return {}

    if loaded := _load_on_servers(optimizer, choose, resumes=True):
        location = Location(loaded["path"], storage_options)
        newest = _load_on_worker(optimizer, loaded, location, random)
        optimizer.unfinished = "" if _is_level(loaded["extra"]) else newest.path
        return newest
    return None


def load_part(
    optimizer: DistributedOptimizer,
    location: Location,
    dense: Dense,
    tables: Collection[str] | None = None,
) -> list[str]:
    """Begin a new run with weights and optimizer state of a checkpoint, for example of a similar
    model. Group values (learning rates) are this run's, and streams start over.

    Args:
        dense: "strict": all dense parameters and buffers. "match": those of the same name and
            shape. "skip": none.
        tables: names of tables; None: all of the model, with "match" those in the checkpoint.

    Returns:
        Names of tables, parameters and buffers that keep their values.

    Raises:
        BadRequest: no checkpoint there, or an unknown table. Corruption: a damaged file.
        SchemaMismatch: something is missing, or a table or the optimizer differs.
    """
    if dense not in ("strict", "match", "skip"):
        raise BadRequest(f"load: expected dense 'strict', 'match' or 'skip', found {dense!r}")
    own = [table.name for table in optimizer.tables]
    if unknown := set(tables or ()) - set(own):
        raise BadRequest(f"load: expected tables of the model, {own}, found {sorted(unknown)}")
    manifest = read_manifest(open_storage(location.path, location.storage_options))
    wanted = set(own if tables is None else tables)
    if dense == "match":
        wanted &= manifest.tables.keys()
    parameters = _parameters_to_load(optimizer, manifest, location, dense)
    loaded = _load_on_servers(
        optimizer, lambda load_one: load_one(location), wanted, parameters, resumes=False
    )
    optimizer.unfinished = ""
    optimizer.mode.set_num_steps(int(loaded["extra"]["optimizer"]["num_steps"]))
    _restore_features(optimizer, loaded["extra"], wanted)
    kept = [name for name in own if name not in wanted]
    kept += [name for name in parameter_shapes(optimizer) if name not in parameters]
    if dense == "skip":
        kept += [name for name, _ in optimizer.model.named_buffers()]
    else:
        where, match = f"checkpoint {location.path}", dense == "match"
        kept += install_buffers(location.tensors(), optimizer.model, 0, where=where, match=match)
    optimizer.mode.resume()
    optimizer.mode.adopt()
    optimizer.half_loaded = ""
    return kept


def _parameters_to_load(
    optimizer: DistributedOptimizer, manifest: CheckpointManifest, location: Location, dense: Dense
) -> list[str]:
    """Names of dense parameters. Raises SchemaMismatch: with "strict" names or shapes differ."""
    saved = manifest.extra.get("shapes")
    if not isinstance(saved, dict):
        raise Corruption(
            f"checkpoint {location.path}: expected the shapes of its parameters, found none"
        )
    if dense == "skip":
        return []
    own = parameter_shapes(optimizer)
    matching = [name for name, shape in own.items() if saved.get(name) == shape]
    if dense == "strict" and (others := [name for name in own if name not in matching]):
        name = others[0]
        raise SchemaMismatch(
            f"checkpoint {location.path}: expected parameter {name} of shape {own[name]},"
            f" found {saved.get(name)}"
        )
    if dense == "strict" and (unknown := sorted(saved.keys() - own.keys())):
        raise SchemaMismatch(_found_too(location, "parameters", unknown))
    return matching


def _found_too(location: Location, what: str, names: Collection[str]) -> str:
    return (
        f"checkpoint {location.path}: expected the model's {what} alone, found {names} too;"
        ' Trainer.load(..., dense="match") leaves them out'
    )


def _load_on_servers(
    optimizer: DistributedOptimizer,
    choose: Callable[[LoadOne], dict[str, Any]],
    tables: Collection[str] | None = None,
    parameters: Collection[str] | None = None,
    *,
    resumes: bool,
) -> dict[str, Any]:
    """Have the servers load what worker 0 chooses; returns its path and JSON values. tables,
    parameters: names; None: all. resumes: the pass that the checkpoint was taken in goes on.
    """
    try:
        optimizer.check_has_rows()
        optimizer.mode.flush()
    except TriremeError as error:  # what is loaded replaces the step; `Mode.resume` forgets it
        log.warning("load: a step before it has failed: %s", error)
    optimizer.mode.leave_pass()
    cluster = optimizer.cluster
    cluster.client.coordinator.gather({}, [], purpose="load")

    def load_one(location: Location) -> dict[str, Any]:
        def check(manifest: CheckpointManifest) -> None:
            if parameters is None and manifest.blocks:  # servers know elements, not shapes
                _parameters_to_load(optimizer, manifest, location, "strict")
            own = {table.name for table in optimizer.tables}
            if tables is None and (unknown := sorted(manifest.tables.keys() - own)):
                raise SchemaMismatch(_found_too(location, "tables", unknown))
            if resumes:
                _check_pushes(optimizer, manifest, location)

        options = location.storage_options
        # What is loaded in part lies beside rows that have seen other pushes.
        saved = read_manifest(open_storage(location.path, options))
        continues = tables is None and _is_level(saved.extra)
        with location.progress("load") as report:
            manifest = load_checkpoint(
                cluster.client,
                location.path,
                tables=tables,
                parameters=parameters,
                resumes=resumes or continues,
                storage_options=options,
                watch=report,
                check=check,
                begins=lambda: _note_half(optimizer, location.path),
            )
        return {"path": str(location.path), "extra": dict(manifest.extra)}

    def act() -> dict[str, Any]:
        optimizer.mode.publish()  # what is not loaded stays as it is
        return choose(load_one)

    loaded = let_first_worker(cluster, "load", act)
    if loaded:
        _note_half(optimizer, loaded["path"])  # until the worker has loaded too
    return loaded


def _note_half(optimizer: DistributedOptimizer, path: object) -> None:
    optimizer.half_loaded = str(path)


def _is_level(extra: Mapping[str, Any]) -> bool:
    """Whether all rows and blocks have seen the same pushes; unless the checkpoint says, they have.
    extra: its JSON values.
    """
    return bool(extra.get("optimizer", {}).get("is_level", True))


def _check_pushes(
    optimizer: DistributedOptimizer, manifest: CheckpointManifest, location: Location
) -> None:
    """Raises BadRequest: some rows have seen pushes that others lack, and this run's are others."""
    steps = manifest.extra["optimizer"]
    saved, own = steps.get("per_push", 1), optimizer.mode.steps_per_push
    if saved != own and not _is_level(manifest.extra):
        raise BadRequest(
            f"Trainer.resume: expected a strategy whose pushes have {saved} step(s), as that of the"
            f" run that has saved {location.path} while it trained, found {own} step(s): some"
            " rows have seen pushes that others still need. Resume with the strategy of that run;"
            " Trainer.load() takes it with any, and begins the epoch again"
        )


def _load_on_worker(
    optimizer: DistributedOptimizer, loaded: dict[str, Any], location: Location, random: RandomState
) -> LoadedCheckpoint:
    """Bring this worker to the state that the servers have loaded."""
    path, extra, worker = str(loaded["path"]), loaded["extra"], optimizer.cluster.worker
    steps = extra["optimizer"]
    optimizer.load_state_dict(steps)
    _restore_features(optimizer, extra, [table.name for table in optimizer.tables])
    try:
        tensors = location.tensors()
        install_buffers(tensors, optimizer.model, worker, where=f"checkpoint {location.path}")
    except BadRequest as error:
        if not optimizer.cluster.client.script.is_behind:
            raise
        gone = f"a predecessor has loaded checkpoint {location.path}, which is gone since"
        log.warning("load: %s: %s", gone, error)
        tensors = {}
    optimizer.mode.resume(int(steps["before"]))
    optimizer.mode.adopt()
    own = random_state_of(tensors, worker)
    random.restore(own)
    optimizer.half_loaded = ""
    return LoadedCheckpoint(path, extra["user"], int(extra["num_workers"]), own)


def _restore_features(
    optimizer: DistributedOptimizer, extra: Mapping[str, Any], tables: Collection[str]
) -> None:
    """Which features have strings is that of the loaded rows; older checkpoints do not say."""
    saved = extra.get("strings", {})
    for table in optimizer.tables:
        if table.name in tables:
            table.features.restore(saved.get(table.name, {}))
