"""What the processes of a job are in the midst of, as their files and output show."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from tests.chaos.job import Job, Place

SNAPSHOT, RECOVERY, SAVE, DELTA, EVICTION = MOMENTS = (
    *("snapshot", "recovery", "save", "delta"),
    "eviction",  # or cleaning: pages of rows are written
)
WRITTEN_S = 0.02
"""A file that was written to this lately is being written."""
DOUBLE = "second kill within a second"


class Moments:
    """Knows those of a job. What a killed process has left counts for nothing later."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last_kill = self._last_kill_s = float("-inf")

    def at(self, place: Place) -> set[str]:
        """Those that a kill of this process would interrupt."""
        return set(self._at(place))

    def note_kill(self) -> None:
        self._last_kill, self._last_kill_s = time.time(), time.monotonic()

    def _at(self, place: Place) -> Iterator[str]:
        if time.monotonic() - self._last_kill_s < 1.0:
            yield DOUBLE
        if place in self._job.servers:
            state = self._job.state_dir(self._job.servers.index(place))
            if self._is_written(state, ".snapshot-*"):
                yield SNAPSHOT
            if self._are_pages_written(self._job.ssd(self._job.servers.index(place))):
                yield EVICTION
            output = place.program.output
            if len(place.programs) > 1 and not re.search(r"^listening on", output, re.MULTILINE):
                yield RECOVERY
        folder = self._job.folder
        if self._is_written(folder, ".last.*.partial", "steps/.*.partial"):
            yield SAVE
        if self._is_written(folder, ".delta-*.partial"):
            yield DELTA

    def _are_pages_written(self, folder: Path) -> bool:
        with suppress(FileNotFoundError):  # the files of a process that has ended are removed
            for segment in folder.glob("*/trireme-rows-*/*/*.rows"):
                written = segment.stat().st_mtime
                if written > max(self._last_kill, time.time() - WRITTEN_S):
                    return True
        return False

    def _is_written(self, folder: Path, *patterns: str) -> bool:
        """Whether there is such a folder that was made since the last kill."""
        for partial in chain.from_iterable(map(folder.glob, patterns)):
            with suppress(FileNotFoundError):  # it is finished, or was removed
                if partial.stat().st_ctime > self._last_kill:
                    return True
        return False
