"""Save a training run: every worker calls, worker 0 has the servers write."""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trireme.checkpoint.format.manifest import read_manifest
from trireme.checkpoint.format.save_modes import check_save, save_mode
from trireme.checkpoint.worker_side.save import check_writable, finish_save, save_checkpoint
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.storage.atomic_folder import owned_folder
from trireme.storage.local import LocalStorage
from trireme.storage.storage import open_storage
from trireme.train.checkpointing.checkpoint_location import Location
from trireme.train.checkpointing.random_state import RandomState
from trireme.train.checkpointing.worker_state import WorkerState, checkpoint_tensors, gather_states
from trireme.train.first_worker import let_first_worker
from trireme.train.optimizer import DistributedOptimizer


@dataclass(frozen=True)
class SaveOptions:
    """What to save, and how many checkpoints to keep; see save_checkpoint."""

    mode: str | int = "full"
    hot: float | None = None
    keep: int | None = None

    def check(self) -> None:
        """Raises BadRequest, on every worker and before they meet."""
        check_save(save_mode(self.mode), self.hot, self.keep)


FULL = SaveOptions()


@contextmanager
def own_folder(
    cluster: Cluster, parent: str | Path, storage_options: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Before hours of training: raises, on every worker, what a save below `parent` would raise
    because worker 0 or a server cannot write there, or does not see what the others write. Within
    it a local folder is this job's alone: two would replace and remove each other's checkpoints.
    """
    storage = open_storage(parent, storage_options)
    with ExitStack() as stack:

        @cache
        def own() -> None:
            if isinstance(storage, LocalStorage) and cluster.worker == 0:
                stack.enter_context(owned_folder(storage.folder))

        def act() -> dict[str, Any]:
            own()
            path = storage.below(f"try-{uuid.uuid4().hex}").name
            check_writable(cluster.client, path, storage_options)
            return {}

        let_first_worker(cluster, f"check of {parent}", act)
        own()  # a predecessor has acted, perhaps
        yield


def save(
    optimizer: DistributedOptimizer,
    location: Location,
    extra: Mapping[str, Any] | None = None,
    options: SaveOptions = FULL,
    *,
    random: RandomState | None = None,
) -> None:
    """Write a new folder with tables, dense parameters, optimizer state, and the module buffers and
    random numbers of all workers.

    location, extra (JSON values that `load` returns): those of worker 0 are used. random: the
    generators to save besides the global ones. Raises BadRequest: the folder exists, or is outside
    the servers' root; within a pass on a device. Corruption: it is not on storage that all
    processes share.
    """
    optimizer.mode.check_between_passes("save")
    options.check()
    script = optimizer.cluster.client.script
    with script.section():
        if script.is_behind:  # a predecessor has saved
            return
        optimizer.check_saves()
        optimizer.flush()
        state = WorkerState.current(optimizer, random or RandomState())
        states = gather_states(optimizer.cluster, state)
        optimizer.refresh()  # in sync, the last step is staged until then

        def act() -> dict[str, Any]:
            if not _finish_predecessors_save(optimizer, location, options):
                groups = optimizer.state_dict()
                optimizer.mode.publish()
                write(optimizer, location, states, groups, extra or {}, options, is_level=True)
            return {}

        let_first_worker(optimizer.cluster, "save", act)


def _finish_predecessors_save(
    optimizer: DistributedOptimizer, location: Location, options: SaveOptions
) -> bool:
    """Whether a predecessor was killed after it had published this checkpoint; then do the rest."""
    client = optimizer.cluster.client
    if not client.script.is_successor:
        return False
    try:
        manifest = read_manifest(open_storage(location.path, location.storage_options))
    except BadRequest:  # there is none
        return False
    if manifest.extra.get("saved_by") != _save_id(optimizer):
        return False
    keep, storage_options = options.keep, location.storage_options
    finish_save(client, location.path, manifest, keep=keep, storage_options=storage_options)
    return True


def _save_id(optimizer: DistributedOptimizer) -> str:
    """Identifies this save among all saves of all jobs."""
    return f"{optimizer.cluster.client.servers.job} {optimizer.cluster.client.script.location}"


def write(
    optimizer: DistributedOptimizer,
    location: Location,
    states: Mapping[int, WorkerState],
    groups: Mapping[str, Any],
    extra: Mapping[str, Any],
    options: SaveOptions = FULL,
    *,
    is_level: bool = False,
) -> None:
    """Worker 0's part of a save; other workers may train meanwhile. states: of all workers, or of
    worker 0 alone. groups: the optimizer's state_dict. is_level: nobody trains meanwhile, so all
    rows and blocks have seen the same pushes.
    """
    # Streams have unequal lengths: the job has made as many steps as the longest.
    num_steps = max(state.num_steps for state in states.values())
    steps = {
        "num_steps": num_steps,
        "before": states[0].num_steps - states[0].sequence,
        "per_push": optimizer.mode.steps_per_push,
        "is_level": is_level,
    }
    with location.progress("save") as report:
        save_checkpoint(
            optimizer.cluster.client,
            location.path,
            extra={
                "optimizer": {**groups, **steps},
                "shapes": parameter_shapes(optimizer),
                "strings": {t.name: t.features.are_strings for t in optimizer.tables},
                "num_workers": optimizer.cluster.streams_per_pass,
                "saved_by": _save_id(optimizer),
                "user": dict(extra),
            },
            tensors=checkpoint_tensors(states),
            mode=options.mode,
            hot=options.hot,
            time=optimizer.data_time.seconds(),
            keep=options.keep,
            storage_options=location.storage_options,
            watch=report,
        )


def parameter_shapes(optimizer: DistributedOptimizer) -> dict[str, list[int]]:
    """The shapes of the dense parameters that the optimizer updates, by name."""
    updated = {spec.param for spec in optimizer.replica.dense.specs}
    named = optimizer.model.named_parameters()
    return {name: list(parameter.shape) for name, parameter in named if name in updated}
