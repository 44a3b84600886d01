"""Load a checkpoint into servers and workers: every worker calls, worker 0 has the servers read."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from trireme.checkpoint.format.manifest import MATCH, CheckpointManifest, read_manifest
from trireme.checkpoint.worker_side.load import load_checkpoint
from trireme.errors import (
    BadRequest,
    Corruption,
    SchemaMismatch,
    TriremeError,
    check_known,
    class_of_code,
)
from trireme.storage.storage import open_storage
from trireme.train.checkpointing.checkpoint_location import Location
from trireme.train.checkpointing.random_state import RandomState
from trireme.train.checkpointing.save import parameter_shapes
from trireme.train.checkpointing.worker_state import check_buffers, install_buffers, random_state_of
from trireme.train.earlier_models import DENSE
from trireme.train.first_worker import let_first_worker
from trireme.train.optimizer import DistributedOptimizer

log = logging.getLogger("trireme.train")


Dense = Literal["strict", "match", "skip"]
_VALUES = (
    "load: %s goes on with the checkpoint's %s, not with the script's %s; to change them, set"
    " trainer.optimizer.param_groups after the load"
)
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
    _leave_training(optimizer, str(location.path))
    loaded = _load_on_servers(optimizer, lambda load_one: load_one(location), resumes=False)
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

    _leave_training(optimizer)
    if loaded := _load_on_servers(optimizer, choose, resumes=True):
        location = Location(loaded["path"], storage_options)
        newest = _load_on_worker(optimizer, loaded, location, random)
        if not _is_level(loaded["extra"]):
            optimizer.unfinished.set(optimizer.parts, newest.path)
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
            shape, without the state of another optimizer. "skip": none.
        tables: names of tables; None: all of the model, with "match" those in the checkpoint.

    Returns:
        Names of tables, parameters and buffers that keep their values.

    Raises:
        BadRequest: no checkpoint there, or an unknown table. Corruption: a damaged file.
        SchemaMismatch: something is missing, or a table differs; with "strict" the optimizer.
    """
    own = [table.name for table in optimizer.tables]
    check_known("load", "tables of the model", own, tables or ())
    manifest = read_manifest(open_storage(location.path, location.storage_options))
    wanted = set(own if tables is None else tables)
    if dense == "match":
        wanted &= manifest.tables.keys()
    parameters = _parameters_to_load(optimizer, manifest, location, dense)
    if dense == "strict":
        check_buffers(location.tensors(), optimizer.model, location.where)
    chosen = None if dense == "strict" else parameters
    _leave_training(optimizer, str(location.path))
    loaded = _load_on_servers(optimizer, lambda one: one(location), wanted, chosen, resumes=False)
    has_other = manifest.optimizer not in (None, optimizer.dense_class)
    if parameters and has_other and optimizer.cluster.worker == 0:
        log.info("load: %s begins without %s's state", optimizer.dense_class, manifest.optimizer)
    optimizer.mode.set_num_steps(int(loaded["extra"]["optimizer"]["num_steps"]))
    _restore_features(optimizer, loaded["extra"], wanted)
    kept = [name for name in own if name not in wanted]
    kept += [name for name in parameter_shapes(optimizer) if name not in parameters]
    if dense == "skip":
        kept += [name for name, _ in optimizer.model.named_buffers()]
    else:
        match, where = dense == "match", location.where
        kept += install_buffers(location.tensors(), optimizer.model, 0, where=where, match=match)
    optimizer.mode.resume()
    optimizer.mode.adopt()
    _note_whole(optimizer, _parts(wanted, parameters))
    return kept


def _parameters_to_load(
    optimizer: DistributedOptimizer, manifest: CheckpointManifest, location: Location, dense: Dense
) -> Collection[str]:
    """Names of dense parameters. Raises SchemaMismatch: with "strict" names or shapes differ."""
    saved = manifest.extra.get("shapes")
    if not isinstance(saved, dict):
        raise Corruption(f"{location.where}: expected the shapes of its parameters, found none")
    if dense == "skip":
        return ()
    own = parameter_shapes(optimizer)
    matching = {name: shape for name, shape in own.items() if saved.get(name) == shape}
    if dense == "strict" and (others := [name for name in own if name not in matching]):
        name = others[0]
        raise SchemaMismatch(
            f"{location.where}: expected parameter {name} of shape {own[name]}, found"
            f" {saved.get(name)}; {MATCH}"
        )
    if dense == "strict" and (unknown := sorted(saved.keys() - own.keys())):
        raise SchemaMismatch(_found_too(location, "parameters", unknown))
    return matching


def _found_too(location: Location, what: str, names: Collection[str]) -> str:
    return f"{location.where}: expected the model's {what} alone, found {names} too; {MATCH}"


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
    cluster = optimizer.cluster
    own = [table.name for table in optimizer.tables]
    parts = _parts(own if tables is None else tables, parameters)
    half: list[str] = []  # the checkpoint that has begun to replace what the servers have

    def load_one(location: Location) -> dict[str, Any]:
        def check(manifest: CheckpointManifest) -> None:
            if parameters is None and manifest.blocks:  # servers know elements, not shapes
                _parameters_to_load(optimizer, manifest, location, "strict")
            if tables is None and (unknown := sorted(manifest.tables.keys() - set(own))):
                raise SchemaMismatch(_found_too(location, "tables", unknown))
            if tables is None:
                _check_groups(optimizer, manifest, location)
                check_buffers(location.tensors(), optimizer.model, location.where)
            if resumes:
                _check_pushes(optimizer, manifest, location)

        def begin() -> None:
            half[:] = [str(location.path)]
            optimizer.half_loaded.set(parts, half[0])

        # What is loaded in part lies beside rows that have seen other pushes.
        def continues(manifest: CheckpointManifest) -> bool:
            return resumes or (tables is None and _is_level(manifest.extra))

        with location.progress("load") as report:
            manifest = load_checkpoint(
                cluster.client,
                location.path,
                tables=tables,
                parameters=parameters,
                resumes=continues,
                storage_options=location.storage_options,
                watch=report,
                check=check,
                begins=begin,
            )
        return {"path": str(location.path), "extra": dict(manifest.extra)}

    failed: list[TriremeError] = []

    def act() -> dict[str, Any]:
        optimizer.mode.publish()  # what is not loaded stays as it is
        try:
            return choose(load_one)
        except TriremeError as error:
            if not half:
                raise
            failed.append(error)  # the other workers must know, too
            return {"half": half[0], "code": error.code, "message": str(error)}

    loaded = let_first_worker(cluster, "load", act)
    if loaded:  # until the worker has loaded too
        optimizer.half_loaded.set(parts, str(loaded.get("half") or loaded["path"]))
    if "half" in loaded:
        message = f"load: worker 0 failed: {loaded['message']}"
        raise failed[0] if failed else class_of_code(loaded["code"])(message)
    return loaded


def _leave_training(optimizer: DistributedOptimizer, path: str = "") -> None:
    """All workers end what they train, and wait for each other. Raises BadRequest: another worker
    loads another path.
    """
    optimizer.check_newest()  # streams are the newest one's
    try:
        optimizer.mode.flush()
    except TriremeError as error:  # what is loaded replaces the step; `Mode.resume` forgets it
        log.warning("load: a step before it has failed: %s", error)
    optimizer.mode.leave_pass()
    replies = optimizer.cluster.client.coordinator.gather({"path": path}, [], purpose="load")
    if len(paths := {str(reply["path"]) for reply, _ in replies}) > 1:
        raise BadRequest(
            f"load: expected one checkpoint for all workers, found {sorted(paths)}; nothing was"
            " loaded"
        )


def _parts(tables: Collection[str], parameters: Collection[str] | None) -> list[str]:
    """What a load replaces, as `DistributedOptimizer.parts`. parameters: None: all."""
    return [*tables, *([DENSE] if parameters is None or parameters else [])]


def _note_whole(optimizer: DistributedOptimizer, parts: Collection[str]) -> None:
    """All workers have these parts of a checkpoint."""
    optimizer.half_loaded.clear(parts)
    optimizer.unfinished.clear(parts)


def _check_groups(
    optimizer: DistributedOptimizer, manifest: CheckpointManifest, location: Location
) -> None:
    """Raises SchemaMismatch: the dense optimizer had another number of param groups. BadRequest: no
    trainer has saved it.
    """
    if "optimizer" not in manifest.extra:
        raise BadRequest(f"{location.where}: expected one that a trainer has saved, found others")
    num_saved, num_own = (
        len(groups) - num_tables
        for groups, num_tables in (
            (manifest.extra["optimizer"]["param_groups"], len(manifest.tables)),
            (optimizer.param_groups, len(optimizer.tables)),
        )
    )
    if num_saved != num_own:
        raise SchemaMismatch(
            f"{location.where}: expected an optimizer with {num_own} param groups of dense"
            f" parameters, as the model's, found one with {num_saved};"
            ' Trainer.load(..., dense="match") takes the parameters alone'
        )


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
    script = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(steps)
    for group, own in zip(optimizer.param_groups, script, strict=True):
        changed = {name: own[name] for name in own if name != "params" and own[name] != group[name]}
        if changed and worker == 0:
            part = f"table {group['table'].name!r}" if "table" in group else "the dense part"
            log.info(_VALUES, part, {name: group[name] for name in changed}, changed)
    _restore_features(optimizer, extra, [table.name for table in optimizer.tables])
    try:
        tensors = location.tensors()
        install_buffers(tensors, optimizer.model, worker, where=location.where)
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
    _note_whole(optimizer, optimizer.parts)
    return LoadedCheckpoint(path, extra["user"], int(extra["num_workers"]), own)


def _restore_features(
    optimizer: DistributedOptimizer, extra: Mapping[str, Any], tables: Collection[str]
) -> None:
    """Which features have strings is that of the loaded rows; older checkpoints do not say."""
    saved = extra.get("strings", {})
    for table in optimizer.tables:
        if table.name in tables:
            table.features.restore(saved.get(table.name, {}))
