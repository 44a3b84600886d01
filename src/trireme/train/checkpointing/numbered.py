"""Checkpoints in numbered folders, one for each save of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from trireme.checkpoint.format.manifest import read_manifest
from trireme.errors import BadRequest, Corruption
from trireme.storage.location import open_storage
from trireme.train.checkpointing.checkpoint import Location

log = logging.getLogger("trireme.train")


class NumberedFolders:
    """The folders 1, 2, 3, ... below a path or a location of fsspec."""

    def __init__(
        self, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
    ) -> None:
        self._place = open_storage(path, storage_options)
        self._options = storage_options

    def next(self) -> Location:
        """Where the next one goes: behind the newest, complete or not."""
        return self._location(1 + max(self._numbers(), default=0))

    def complete(self) -> list[Location]:
        """Those with a manifest, the newest first; others are reported."""
        found = []
        for number in sorted(self._numbers(), reverse=True):
            try:
                read_manifest(self._place.below(str(number)))
            except BadRequest as error:
                log.warning("resume: passing over an incomplete checkpoint: %s", error)
                continue
            except Corruption:
                pass  # whoever loads it says so
            found.append(self._location(number))
        return found

    def _numbers(self) -> list[int]:
        return [int(name) for name in self._place.folders() if name.isdecimal()]

    def _location(self, number: int) -> Location:
        return Location(self._place.below(str(number)).name, self._options)
