"""Keeps the checkpoint of the best epoch."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from trireme.checkpoint.format.manifest import read_manifest
from trireme.errors import BadRequest
from trireme.metrics.metric import Better
from trireme.storage.storage import open_storage
from trireme.train.callbacks.callback import Callback, FitState
from trireme.train.callbacks.monitor import Monitor
from trireme.train.checkpointing.checkpoint_location import Location, NumberedFolders
from trireme.train.checkpointing.fit_progress import FitProgress
from trireme.train.checkpointing.save import SaveOptions, save
from trireme.train.first_worker import let_first_worker

log = logging.getLogger("trireme.train")


class BestCheckpoint(Callback):
    """Saves a full checkpoint after each epoch that is better than all before it, and then removes
    the one before: `trainer.load(best.path)` loads the best.

    A fit that resumes, and a further fit of the same model with the same object, compare with the
    best that the folder holds. Any other fit needs a folder without checkpoints.

    Args:
        folder: for these checkpoints alone, made if absent, on storage that all processes share; or
            a location of fsspec. They are in numbered folders below it.
        monitor, mode, min_delta: as of EarlyStopping.
        storage_options: for fsspec.

    Attributes:
        best: the figure of the checkpoint; None: there is none.
        best_epoch: its epoch, from 1; 0: there is none.
        path: of the checkpoint. Raises BadRequest: there is none, as no epoch has ended.

    Raises:
        BadRequest: an argument out of range; in fit, an unknown figure, a folder with a checkpoint
            of another fit, or of another figure; a mode or a pass that cannot save.
        ResourceExhausted: no room for the new one; the one before is intact.
    """

    on_all_workers = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        monitor: str,
        mode: Better | None = None,
        min_delta: float = 0.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self._options = folder, storage_options
        self._folders = NumberedFolders(folder, storage_options)  # also after a change of folder
        self.monitor = Monitor.of("BestCheckpoint", monitor, mode, min_delta)
        self.best: float | None = None
        self.best_epoch = 0
        self._path: str | None = None

    @property
    def path(self) -> str:
        if self._path is None:
            raise BadRequest(
                f"BestCheckpoint.path: expected a checkpoint below {self.folder}, found none: no"
                " epoch of a fit with this callback has ended"
            )
        return self._path

    def begin_fit(self, fit: FitState) -> None:
        trainer = fit.trainer
        trainer.optimizer.mode.check_between_passes("BestCheckpoint")
        other = fit.checkpoints
        if other is not None and self._folders.is_at(other.path, other.storage_options):
            raise BadRequest(
                f"BestCheckpoint: expected another folder than that of the fit's checkpoints, found"
                f" {self.folder} for both"
            )
        # A model without steps is not the one whose best this object has: a cell that is run again.
        is_trained = fit.step > 0 or trainer.num_epochs > 0
        continues = fit.resumes or (self._path is not None and is_trained)
        kept = let_first_worker(
            trainer.cluster, "a look for the best checkpoint", lambda: self._kept(continues)
        )
        self._path, self.best, self.best_epoch = kept["path"], kept["best"], kept["epoch"]
        if self._path is not None and trainer.cluster.worker == 0:
            log.info(
                "BestCheckpoint: continues from %s: %s %s of epoch %d",
                *(self._path, self.monitor.figure, self.best, self.best_epoch),
            )

    def _kept(self, continues: bool) -> dict[str, Any]:
        """What the folder holds, on worker 0. Raises BadRequest: of another fit."""
        held = self._folders.complete()
        if not held:
            return {"path": None, "best": None, "epoch": 0}
        path = str(held[0].path)
        if not continues:
            raise BadRequest(
                "BestCheckpoint: expected a folder without checkpoints for a new model, found"
                f" {path} of an earlier fit, which a better epoch of this one would remove; choose"
                " another folder, remove it, or continue that fit with resume=True"
            )
        noted = self._note_in(path)
        return {"path": path, "best": noted["value"], "epoch": noted["epoch"]}

    def _note_in(self, path: str) -> dict[str, Any]:
        """What a checkpoint notes of the best. Raises BadRequest: it is not one of these."""
        noted = read_manifest(open_storage(path, self._options)).extra.get("user", {}).get("best")
        own = {"monitor": self.monitor.figure, "mode": self.monitor.mode}
        if noted is None or {name: noted[name] for name in own} != own:
            raise BadRequest(
                f"BestCheckpoint: expected the best {self.monitor.figure} ({self.monitor.mode}) in"
                f" {path}, found {'no such note' if noted is None else noted}; choose another"
                " folder"
            )
        checked: dict[str, Any] = noted
        return checked

    def epoch(self, fit: FitState) -> None:
        value = self.monitor.value("BestCheckpoint", fit)
        if not self.monitor.is_better(value, self.best):
            return
        trainer = fit.trainer
        with trainer.cluster.client.script.section("best"):
            chosen = let_first_worker(trainer.cluster, "the best checkpoint", self._choose)
            location = Location(chosen["path"], self._options, trainer.shows_progress)
            note = {"monitor": self.monitor.figure, "mode": self.monitor.mode}
            extra = {
                **FitProgress(num_epochs=trainer.num_epochs).to_json(),
                "best": {**note, "value": value, "epoch": fit.epoch},
            }
            save(trainer.optimizer, location, extra, SaveOptions(keep=1), random=fit.random)
        self.best, self.best_epoch, self._path = value, fit.epoch, chosen["path"]

    def _choose(self) -> dict[str, Any]:
        """Raises BadRequest: others save there too, whose checkpoints would be removed."""
        for held in self._folders.complete():
            self._note_in(str(held.path))
        return {"path": str(self._folders.next().path)}
