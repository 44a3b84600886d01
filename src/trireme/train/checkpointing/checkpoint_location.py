"""Where the checkpoints of a training run are: one location, and numbered folders below one."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trireme.checkpoint.format.manifest import MANIFEST, read_manifest
from trireme.checkpoint.worker_side.load import saved_tensors
from trireme.errors import BadRequest, Corruption
from trireme.progress import display
from trireme.storage.storage import open_storage

log = logging.getLogger("trireme.train")

ProgressCallback = Callable[[int, int], None]
"""Takes what is done and the total."""


@dataclass(frozen=True)
class Location:
    """A path, or an fsspec location with the options to open it."""

    path: str | Path
    storage_options: Mapping[str, Any] | None = None
    shows_progress: bool = False  # of saving and loading, on worker 0

    @contextmanager
    def progress(self, verb: str) -> Iterator[ProgressCallback]:
        """Show the progress that servers report to the callback."""
        with display(f"{verb} {self.path}", is_quiet=not self.shows_progress) as shown:

            def report(done: int, total: int) -> None:
                if shown.is_due():
                    shown.show_fraction(done / max(total, 1))

            yield report

    @property
    def where(self) -> str:
        """The subject of messages about it."""
        return f"checkpoint {self.path}"

    def tensors(self) -> dict[str, Tensor]:
        return saved_tensors(self.path, self.storage_options)


class NumberedFolders:
    """The folders 1, 2, 3, ... below a location: one for each checkpoint of a run."""

    def __init__(
        self, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
    ) -> None:
        self._parent = open_storage(path, storage_options)
        self._options = storage_options

    def is_at(
        self, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
    ) -> bool:
        """Whether they are below this location."""
        return open_storage(path, storage_options).name == self._parent.name

    def next(self) -> Location:
        """The location of the next checkpoint: after the newest folder, complete or not."""
        return self._location(1 + max(self._numbers(), default=0))

    def complete(self) -> list[Location]:
        """The folders with a manifest, newest first. Logs a warning for each of the others."""
        locations = []
        for number in sorted(self._numbers(), reverse=True):
            try:
                read_manifest(self._parent.below(str(number)))
            except BadRequest as error:
                log.warning("resume: passing over an incomplete checkpoint: %s", error)
                continue
            except Corruption:
                pass  # loading it reports the damage
            locations.append(self._location(number))
        return locations

    def _numbers(self) -> list[int]:
        if self._parent.size(MANIFEST) is not None:
            raise BadRequest(
                f"checkpoints: expected a folder of them, found one in {self._parent.name}: name"
                " the folder in which it lies, or give it to Trainer.load"
            )
        return [int(name) for name in self._parent.folders() if name.isdecimal()]

    def _location(self, number: int) -> Location:
        return Location(self._parent.below(str(number)).name, self._options)
