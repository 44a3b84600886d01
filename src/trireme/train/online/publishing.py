"""What a run over passes leaves behind: checkpoints, exports, and done-files that list them."""

import datetime
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.checkpoint.format.manifest import MANIFEST
from trireme.errors import check_counts
from trireme.inference.export import export_model
from trireme.storage.storage import open_storage
from trireme.train.checkpointing.checkpoint_location import NumberedFolders
from trireme.train.checkpointing.checkpoints import CheckpointAtStop
from trireme.train.checkpointing.save import own_folder
from trireme.train.online.donefiles import (
    BASES,
    DELTAS,
    DoneFiles,
    ListedCheckpoint,
    ListedExport,
    PassPoint,
    StopRecord,
)
from trireme.train.online.passes import Pass, next_day
from trireme.train.trainer import Trainer

log = logging.getLogger("trireme")


@dataclass(frozen=True, kw_only=True)
class Publishing:
    """What is written below `path`, and when. Passes are numbered from 1 every day.

    Args:
        path: a folder, local to all processes, or any location that fsspec reaches. A checkpoint is
            PATH/DAY/PASS, a delta PATH/DAY/delta-PASS; after the last pass of a day come
            PATH/NEXT_DAY/base and the checkpoint PATH/NEXT_DAY/0.
        checkpoint_per_pass: passes from one checkpoint to the next.
        save_delta_frequency: passes from one delta for inference to the next.
        save_first_base: write a base before the first pass of a new run.
        keep: checkpoints that stay; None: all.
        dtype: of the exports' rows, see export_model.
    """

    path: str
    checkpoint_per_pass: int = 6
    save_delta_frequency: int = 6
    save_first_base: bool = False
    keep: int | None = None
    dtype: Literal["float32", "float16", "int8"] = "float32"
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keep = {} if self.keep is None else {"keep": self.keep}
        every = {n: getattr(self, n) for n in ("checkpoint_per_pass", "save_delta_frequency")}
        check_counts("Publishing", **every, **keep)


class Publisher:
    """Writes what a `Publishing` asks for; every worker calls the same methods. key: of the base
    that deltas belong to. last_export: folder of the export that the next delta follows. example: a
    batch of the newest data, to export with. can_export: worker 0 has one.
    """

    def __init__(self, trainer: Trainer, settings: Publishing) -> None:
        self._trainer, self._settings = trainer, settings
        self._writes = trainer.cluster.worker == 0
        self.path = settings.path.rstrip("/")
        self.done_files = DoneFiles(settings.path, settings.storage_options)
        self.stops = CheckpointAtStop(f"{self.path}/stopped", settings.storage_options)
        self._stop_folders = NumberedFolders(self.stops.path, self.stops.storage_options)
        self.key = _now()
        self.last_export: str | None = None
        self.example: Any = None
        self.can_export = False

    def own_folder(self) -> AbstractContextManager[None]:
        """Raises, on every worker, why worker 0 or a server could not write there."""
        return own_folder(self._trainer.cluster, self.path, self._settings.storage_options)

    def remove_dropped(self) -> None:
        """Remove the checkpoints before the first listed one: a run was killed that had dropped
        them from the list. Worker 0 does.
        """
        first = min(entry.point for entry in self.done_files.checkpoints())
        options = self._settings.storage_options
        root = open_storage(self.path, options)
        for day in () if self._settings.keep is None else root.folders():
            for number in root.below(day).folders() if day.isdecimal() else ():
                if number.isdecimal() and PassPoint(day, int(number)) < first:
                    remove_folder(f"{self.path}/{day}/{number}", options)

    # Each of these returns the paths that it has written.

    def before_first_pass(self, first: Pass) -> list[str]:
        name, is_wanted = f"{first.day}/base", self._settings.save_first_base
        return self._export(BASES, name, {}) if is_wanted and self._has_example(name) else []

    def after_pass(self, this: Pass, figures: Mapping[str, float]) -> list[str]:
        """A delta and a checkpoint, where the settings want them after this pass."""
        written = []
        name = f"{this.day}/delta-{this.number}"
        if this.number % self._settings.save_delta_frequency == 0 and self._has_example(name):
            if self.last_export is not None:
                written += self._export(DELTAS, name, figures)
            else:
                log.info("stream: no base yet: writing one in place of the delta")
                written += self._export(BASES, f"{this.day}/base-{this.number}", figures)
        # After the export, so that a run that continues from here knows what the next one follows.
        if self.has_checkpoint_after(this):
            written += self._save_checkpoint(this.point, f"{this.day}/{this.number}", "full")
        return written

    def has_checkpoint_after(self, this: Pass) -> bool:
        return this.number % self._settings.checkpoint_per_pass == 0

    def after_day(self, last: Pass, figures: Mapping[str, float]) -> list[str]:
        day, written = next_day(last.day), list[str]()
        if self._has_example(name := f"{day}/base"):
            written = self._export(BASES, name, figures)
        else:
            self.last_export = None  # the next one is a base
        return written + self._save_checkpoint(PassPoint(day, 0), f"{day}/0", "batch")

    def _has_example(self, name: str) -> bool:
        """Whether this export can be written. If not, the next one has its rows."""
        if self._writes and not self.can_export:
            text = "stream: no %s is written: worker 0 has had no data since this run was started"
            log.warning(text, name)
        return self.can_export

    # ---- stops ----

    def save_stop(self, point: PassPoint) -> None:
        """Write a checkpoint between two passes, because all were asked to stop."""
        path = self._stop_folders.next().path
        self._trainer.save(path, storage_options=self.stops.storage_options)
        self.list_stop(point, None, {})

    def list_stop(
        self, point: PassPoint, within: PassPoint | None, evaluated: Mapping[str, float]
    ) -> None:
        """List the newest checkpoint of a stop, and remove earlier ones."""
        if self._writes:
            path = str(self._stop_folders.complete()[0].path)
            record = StopRecord(point, within, self.key, self.last_export, path, evaluated)
            self.done_files.set_stopped(record)
            self._remove_stops(keep=path)

    def _remove_stops(self, *, keep: str) -> None:
        for location in self._stop_folders.complete():
            if location.path != keep:
                remove_folder(str(location.path), self.stops.storage_options or {})

    # ---- checkpoints and exports ----

    def _save_checkpoint(self, point: PassPoint, name: str, mode: str) -> list[str]:
        path, options = self._clear(name), self._settings.storage_options
        self._trainer.save(path, mode=mode, storage_options=options)
        if self._writes:
            entry = ListedCheckpoint(point, self.key, path)
            for old in self.done_files.add_checkpoint(entry, keep=self._settings.keep):
                remove_folder(old, options)
            if self.done_files.stopped() is not None:
                self._remove_stops(keep="")
                self.done_files.set_stopped(None)
        return [path]

    def _export(self, listed_in: str, name: str, figures: Mapping[str, float]) -> list[str]:
        """Export a base, or a delta that follows the last export, and list it."""
        path, dtype = self._clear(name), self._settings.dtype
        follows = self.last_export if listed_in == DELTAS else None
        export_model(self._trainer, path, batch=self.example, follows=follows, dtype=dtype)
        self.last_export = path
        if self._writes:
            # No two have one, whatever the clock does: by its id deltas belong to a base.
            listed = [*self.done_files.exports(BASES), *self.done_files.exports(DELTAS)]
            now = max([_now(), *(export.id + 1 for export in listed)])
            if listed_in == BASES:
                self.key = now
            monitor_data = " ".join(f"{key}:{value:.6g}" for key, value in figures.items())
            self.done_files.add_export(listed_in, ListedExport(now, self.key, path, monitor_data))
        return [path]

    def _clear(self, name: str) -> str:
        """The path of what is written next. Removes what a killed run has left there."""
        path = f"{self.path}/{name}"
        if self._writes and remove_folder(path, self._settings.storage_options):
            log.info("stream: %s was written after the newest checkpoint: it is replaced", path)
        return path


def remove_folder(location: str, options: Mapping[str, Any]) -> bool:
    """Remove a folder, its manifest first; returns whether there was one."""
    storage = open_storage(location, options)
    parent, name = storage.parent()
    if name not in parent.folders():
        return False
    storage.remove(MANIFEST)
    parent.remove(name)
    return True


def _now() -> int:
    """Seconds since 1970, by which Fleet names exports."""
    return int(datetime.datetime.now(datetime.timezone.utc).timestamp())
