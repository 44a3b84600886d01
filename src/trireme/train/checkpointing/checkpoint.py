"""Save and load a training run: every worker calls, one acts, all go on together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from trireme.checkpoint.format.manifest import Manifest, read_manifest
from trireme.checkpoint.format.modes import mode_of
from trireme.checkpoint.server_side.hot import check_hot
from trireme.checkpoint.worker_side.calls import SAVE_TIMEOUT_S
from trireme.checkpoint.worker_side.save_load import (
    finish_save,
    load_checkpoint,
    read_tensors,
    save_checkpoint,
)
from trireme.errors import (
    BadRequest,
    Corruption,
    Internal,
    SchemaMismatch,
    TriremeError,
    Unavailable,
    class_of_code,
)
from trireme.job.cluster import Cluster
from trireme.progress import display
from trireme.storage.storage import open_storage
from trireme.train.checkpointing.random_state import RandomState
from trireme.train.checkpointing.worker_state import (
    Moment,
    install_buffers,
    meet,
    random_of,
    stored,
)
from trireme.train.optimizer import DistributedOptimizer

log = logging.getLogger("trireme.train")


Dense = Literal["strict", "match", "skip"]
Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class Location:
    """Where a checkpoint is: a path, or a location with what fsspec needs to reach it.

    shows: worker 0 shows how far a save or load is.
    """

    path: str | Path
    storage_options: Mapping[str, Any] | None = None
    shows: bool = False

    @contextmanager
    def watched(self, what: str) -> Iterator[Watch]:
        """What the progress of the servers is told to."""
        with display(f"{what} {self.path}", is_quiet=not self.shows) as shown:

            def watch(done: int, total: int) -> None:
                if shown.is_due():
                    shown.show_fraction(done / max(total, 1))

            yield watch

    def tensors(self) -> dict[str, Tensor]:
        return read_tensors(self.path, self.storage_options)


@dataclass(frozen=True)
class What:
    """What to save, and how many checkpoints to keep: as of save_checkpoint."""

    mode: str | int = "full"
    hot: float | None = None
    keep: int | None = None

    def check(self) -> None:
        """Raises BadRequest, on every worker and before they meet."""
        check_hot(mode_of(self.mode), self.hot)
        if self.keep is not None and self.keep < 1:
            raise BadRequest(f"save: expected keep >= 1, found {self.keep}")


FULL = What()


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that this run goes on from.

    path: of it. extra: what `save` was given. num_streams: that passes had in the run that it is
    of.
    random: this worker's random numbers, if it has them.
    """

    path: str
    extra: dict[str, Any]
    num_streams: int
    random: dict[str, Tensor]


def save(
    optimizer: DistributedOptimizer,
    location: Location,
    extra: Mapping[str, Any] | None = None,
    what: What = FULL,
    *,
    random: RandomState | None = None,
) -> None:
    """Write tables, dense parameters, optimizer state, module buffers and random numbers of all
    workers into a new folder.

    Args:
        location: worker 0's counts.
        extra: JSON values that `load` gives back; worker 0's count.
        random: knows of more random numbers than the global ones.

    Raises:
        BadRequest: the folder exists, or is outside the servers' root.
        Corruption: the folder is not on storage that all processes share.
    """
    what.check()
    with optimizer.cluster.client.script.section():
        if not optimizer.cluster.client.script.is_behind:  # else a predecessor was there
            _save(optimizer, location, extra or {}, what, random or RandomState())


def _save(
    optimizer: DistributedOptimizer,
    location: Location,
    extra: Mapping[str, Any],
    what: What,
    random: RandomState,
) -> None:
    optimizer.flush()
    moments = meet(optimizer.cluster, Moment.of(optimizer, random))

    def act() -> dict[str, Any]:
        if _is_saved(optimizer, location, what):
            return {}
        groups = optimizer.state_dict()
        optimizer.mode.publish()
        write(optimizer, location, moments, groups, extra, what)
        return {}

    let_first_worker(optimizer.cluster, "save", act)


def _is_saved(optimizer: DistributedOptimizer, location: Location, what: What) -> bool:
    """Whether a predecessor was killed behind its publication; then all that is left is done."""
    client, path, options = optimizer.cluster.client, location.path, location.storage_options
    if not client.script.is_successor:
        return False
    try:
        manifest = read_manifest(open_storage(path, options))
    except BadRequest:  # there is none
        return False
    if manifest.extra.get("saved_by") != _saved_by(optimizer):
        return False
    finish_save(client, path, manifest, keep=what.keep, storage_options=options)
    return True


def _saved_by(optimizer: DistributedOptimizer) -> str:
    """Which save of which job."""
    return f"{optimizer.cluster.client.job} {optimizer.cluster.client.script.here}"


def write(
    optimizer: DistributedOptimizer,
    location: Location,
    moments: Mapping[int, Moment],
    groups: Mapping[str, Any],
    extra: Mapping[str, Any],
    what: What = FULL,
) -> None:
    """Worker 0's part of a save, also while all train on.

    Args:
        moments: of worker 0, or of all.
        groups: the optimizer's state_dict.
    """
    # Streams have unequal lengths: the job has made as many steps as the longest.
    num_steps = max(moment.num_steps for moment in moments.values())
    steps = {"num_steps": num_steps, "before": moments[0].num_steps - moments[0].sequence}
    with location.watched("save") as watch:
        save_checkpoint(
            optimizer.cluster.client,
            location.path,
            extra={
                "optimizer": {**groups, **steps},
                "shapes": _shapes(optimizer),
                "num_workers": optimizer.cluster.streams_per_pass,
                "saved_by": _saved_by(optimizer),
                "user": dict(extra),
            },
            tensors=stored(moments),
            mode=what.mode,
            hot=what.hot,
            time=optimizer.data_time(),
            keep=what.keep,
            storage_options=location.storage_options,
            watch=watch,
        )


def load(
    optimizer: DistributedOptimizer, location: Location, random: RandomState | None = None
) -> Loaded:
    """Bring servers, model, optimizer and random numbers to the state of a checkpoint.

    Any number of servers may have written it. Group values (rates) are the checkpoint's.

    Raises:
        BadRequest: no checkpoint there. Corruption: a damaged file. SchemaMismatch: another model.
    """
    loaded = _on_servers(optimizer, lambda load_one: load_one(location))
    assert loaded is not None
    return _adopt(optimizer, loaded, location, random or RandomState())


def load_newest(
    optimizer: DistributedOptimizer,
    candidates: Callable[[], list[Location]],
    storage_options: Mapping[str, Any] | None,
    random: RandomState,
) -> Loaded | None:
    """As `load`, of the first of these that is whole; a damaged one is reported and passed over.

    Args:
        candidates: worker 0 asks for them, the best one first. storage_options: of all of them.

    Returns:
        None: there are none at all.

    Raises:
        Corruption: all of them are damaged. The others as `load`.
    """

    def choose(load_one: LoadOne) -> dict[str, Any] | None:
        damaged = None
        locations = candidates()
        for location in locations:
            try:
                return load_one(location)
            except Corruption as error:
                log.warning("resume: passing over the checkpoint %s: %s", location.path, error)
                damaged = error
        if damaged is not None:
            raise Corruption(
                f"resume: expected a whole checkpoint, found {len(locations)} damaged ones; the"
                f" oldest: {damaged}"
            )
        return None

    loaded = _on_servers(optimizer, choose)
    if loaded is None:
        return None
    return _adopt(optimizer, loaded, Location(loaded["path"], storage_options), random)


def load_part(
    optimizer: DistributedOptimizer,
    location: Location,
    dense: Dense,
    tables: Collection[str] | None = None,
) -> list[str]:
    """Begin a new run with weights and optimizer state of a checkpoint, of a similar model say.

    What is not taken keeps its own values. Group values (rates) are this run's, and streams begin
    anew.

    Args:
        dense: "strict": all dense parameters and buffers. "match": those of the same name and
            shape. "skip": none.
        tables: these; None: all of the model, and with "match" those that are there.

    Returns:
        What has kept its own values: names of tables, parameters and buffers.

    Raises:
        BadRequest: no checkpoint there, or a table that the model has not. Corruption: a damaged
            file. SchemaMismatch: something that must be there is not, a table of the same name has
            another schema, or another class of optimizer.
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
    parameters = _parameters(optimizer, manifest.extra.get("shapes"), location, dense)
    loaded = _on_servers(optimizer, lambda load_one: load_one(location), wanted, parameters)
    assert loaded is not None
    optimizer.mode.set_num_steps(int(loaded["extra"]["optimizer"]["num_steps"]))
    kept = [name for name in own if name not in wanted]
    kept += [name for name in _shapes(optimizer) if name not in parameters]
    if dense == "skip":
        kept += [name for name, _ in optimizer.model.named_buffers()]
    else:
        where, match = f"checkpoint {location.path}", dense == "match"
        kept += install_buffers(location.tensors(), optimizer.model, 0, where=where, match=match)
    optimizer.mode.resume()
    optimizer.mode.adopt()
    return kept


def _parameters(
    optimizer: DistributedOptimizer, saved: Any, location: Location, dense: Dense
) -> list[str]:
    """Names of the dense parameters to take."""
    if not isinstance(saved, dict):
        raise Corruption(
            f"checkpoint {location.path}: expected the shapes of its parameters, found none"
        )
    own = _shapes(optimizer)
    matching = [name for name, shape in own.items() if saved.get(name) == shape]
    if dense == "skip":
        return []
    if dense == "strict" and len(matching) < len(own):
        name = next(name for name in own if name not in matching)
        raise SchemaMismatch(
            f"checkpoint {location.path}: expected parameter {name} of shape {own[name]},"
            f" found {saved.get(name)}"
        )
    return matching


def _check_shapes(
    optimizer: DistributedOptimizer,
    manifest: Manifest,
    location: Location,
    parameters: Collection[str] | None,
) -> None:
    """Servers see elements alone. Raises SchemaMismatch: a parameter has another shape there."""
    if parameters is None and manifest.blocks:
        _parameters(optimizer, manifest.extra.get("shapes"), location, "strict")


def _shapes(optimizer: DistributedOptimizer) -> dict[str, list[int]]:
    of_group = {spec.param for spec in optimizer.replica.dense.specs}
    named = optimizer.model.named_parameters()
    return {name: list(parameter.shape) for name, parameter in named if name in of_group}


LoadOne = Callable[[Location], dict[str, Any]]


def _on_servers(
    optimizer: DistributedOptimizer,
    choose: Callable[[LoadOne], dict[str, Any] | None],
    tables: Collection[str] | None = None,
    parameters: Collection[str] | None = None,
) -> dict[str, Any] | None:
    """The servers load what worker 0 chooses: `choose` calls what it gets with locations. Without
    tables, all of it, to go on from.
    """
    optimizer.flush()
    cluster = optimizer.cluster
    cluster.client.gather({}, [], purpose="load")

    def load_one(location: Location) -> dict[str, Any]:
        with location.watched("load") as watch:
            manifest = load_checkpoint(
                cluster.client,
                location.path,
                tables=tables,
                parameters=parameters,
                resumes=tables is None,
                storage_options=location.storage_options,
                watch=watch,
                check=lambda manifest: _check_shapes(optimizer, manifest, location, parameters),
            )
        return {"path": str(location.path), "extra": dict(manifest.extra)}

    def act() -> dict[str, Any]:
        optimizer.mode.publish()  # what is not loaded stays as it is
        return choose(load_one) or {}

    return let_first_worker(cluster, "load", act) or None


def _adopt(
    optimizer: DistributedOptimizer,
    loaded: dict[str, Any],
    location: Location,
    random: RandomState,
) -> Loaded:
    """This worker's side of what the servers have loaded."""
    path, extra = str(loaded["path"]), loaded["extra"]
    steps = extra["optimizer"]
    optimizer.load_state_dict(steps)
    tensors = _tensors_of(optimizer, location)
    optimizer.mode.resume()
    if optimizer.mode.pushes_are_steps and optimizer.sequence:
        optimizer.mode.set_num_steps(int(steps["before"]) + optimizer.sequence)
    optimizer.mode.adopt()
    own = random_of(tensors, optimizer.cluster.worker)
    random.restore(own)
    return Loaded(path, extra["user"], int(extra["num_workers"]), own)


def _tensors_of(optimizer: DistributedOptimizer, location: Location) -> dict[str, Tensor]:
    """Those of the checkpoint, the buffers installed in the model."""
    where = f"checkpoint {location.path}"
    try:
        tensors = location.tensors()
    except BadRequest as error:
        if not optimizer.cluster.client.script.is_behind:
            raise
        log.warning("load: a predecessor has loaded %s, which is gone since: %s", where, error)
        return {}
    install_buffers(tensors, optimizer.model, optimizer.cluster.worker, where=where)
    return tensors


def let_first_worker(
    cluster: Cluster, purpose: str, act: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Worker 0 acts; then all meet. All get what it returned, or raise its error. It does not act
    where a predecessor has done it.
    """
    outcome: dict[str, Any] = {}
    error: BaseException | None = None
    if cluster.worker == 0 and not cluster.client.script.has_come():
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
    if "returned" not in first:
        raise Unavailable(
            f"{purpose}: expected what worker 0 had done before it was started again, found that"
            " the coordinator was started again too and does not know; start the job again and load"
            " the newest checkpoint"
        )
    returned: dict[str, Any] = first["returned"]
    return returned
