"""Done-files: lists of what a streaming run has published, in Fleet's layout.

    donefile.txt         checkpoints, a line each: day TAB key TAB path TAB pass TAB 0; pass -1 is
                         the checkpoint after the last pass of the day before
    base_donefile.txt    exports of everything, a JSON object each: id, key, input, monitor_data
    patch_donefile.txt   exports of what has changed since; `key` names their base
    stopped_donefile.txt where a stopped run stands, a JSON object; only until its next checkpoint

A line is added when what it names is complete. A file is replaced as a whole, so a reader never
sees half a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trireme.data.sources import filesystem
from trireme.errors import Corruption, looking, writing
from trireme.storage.atomic_file import replace_file
from trireme.storage.local import make_folder
from trireme.train.checkpointing.fit_progress import figures_from_json, figures_to_json

CHECKPOINTS, BASES, DELTAS = "donefile.txt", "base_donefile.txt", "patch_donefile.txt"
STOPPED = "stopped_donefile.txt"
BATCH_MODEL = -1  # the pass of a checkpoint that a new day begins with
_LINE = re.compile(r"(\d{8})\t(\d+)\t([^\t]+)\t(-?\d+)\t0")


@dataclass(frozen=True, order=True)
class PassPoint:
    """A run stands after pass `number` of `day` (yyyymmdd); 0: before the first of that day."""

    day: str
    number: int


@dataclass(frozen=True)
class ListedCheckpoint:
    """A line of donefile.txt. key: of the base that deltas belong to, a time in seconds."""

    point: PassPoint
    key: int
    path: str


@dataclass(frozen=True)
class ListedExport:
    """A line of the other lists. id: when it was made, in seconds; key: the id of its base."""

    id: int
    key: int
    path: str
    monitor_data: str = ""


@dataclass(frozen=True)
class StopRecord:
    """Where a stopped run stands, for the run that continues."""

    point: PassPoint  # the last finished pass
    within: PassPoint | None  # the next pass, if a part of it has been trained on
    key: int  # of the base that deltas belong to
    exported: str | None  # path of the export that the next delta follows, if there is one
    path: str  # of the checkpoint
    evaluated: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        within = None if self.within is None else [self.within.day, self.within.number]
        return {
            "day": self.point.day,
            "pass": self.point.number,
            "within": within,
            "key": self.key,
            "exported": self.exported,
            "input": self.path,
            "evaluated": figures_to_json(self.evaluated),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> StopRecord:
        """Raises ValueError, KeyError, TypeError, AttributeError: another object."""
        exported, within = body["exported"], body["within"]
        return cls(
            PassPoint(str(body["day"]), int(body["pass"])),
            None if within is None else PassPoint(str(within[0]), int(within[1])),
            int(body["key"]),
            None if exported is None else str(exported),
            str(body["input"]),
            figures_from_json(body["evaluated"]),
        )


class DoneFiles:
    """The done-files of one folder, local or any that fsspec reaches. One process writes them.

    Raises, all methods:
        Corruption: a broken line; names file, line and text.
        BadRequest, ResourceExhausted: a file cannot be read or written.
    """

    def __init__(self, folder: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._folder = folder.rstrip("/")
        self._options = dict(storage_options or {})

    def checkpoints(self) -> list[ListedCheckpoint]:
        """Oldest first."""
        return [self._published(number, line) for number, line in self._lines(CHECKPOINTS)]

    def exports(self, name: str) -> list[ListedExport]:
        """The entries of BASES or DELTAS, oldest first."""
        return [self._exported(name, number, line) for number, line in self._lines(name)]

    def add_checkpoint(self, entry: ListedCheckpoint, *, keep: int | None = None) -> list[str]:
        """Add a line, in place of one of the same path; keep the last `keep`. Returns the paths of
        the others.
        """
        entries = [old for old in self.checkpoints() if old.path != entry.path] + [entry]
        kept = entries if keep is None else entries[-keep:]
        lines = [
            f"{old.point.day}\t{old.key}\t{old.path}\t{old.point.number or BATCH_MODEL}\t0"
            for old in kept
        ]
        self._write(CHECKPOINTS, lines)
        paths = {old.path for old in kept}
        return [old.path for old in entries if old.path not in paths]

    def add_export(self, name: str, entry: ListedExport) -> None:
        """Add a line to BASES or DELTAS, in place of one of the same path."""
        line = {
            "id": str(entry.id),
            "key": str(entry.key),
            "input": entry.path,
            "monitor_data": entry.monitor_data,
        }
        lines = [
            text
            for number, text in self._lines(name)
            if self._exported(name, number, text).path != entry.path
        ]
        self._write(name, [*lines, json.dumps(line, ensure_ascii=False)])

    def stopped(self) -> StopRecord | None:
        """Where the run stands, if it was stopped and has written no checkpoint since."""
        for number, line in self._lines(STOPPED):
            try:
                return StopRecord.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                expected = "JSON with day, pass, within, key, exported, input and evaluated"
                raise self._broken(STOPPED, number, line, expected) from error
        return None

    def set_stopped(self, at: StopRecord | None) -> None:
        """None: the run has written a checkpoint."""
        lines = [] if at is None else [json.dumps(at.to_json(), ensure_ascii=False)]
        if lines or self._lines(STOPPED):
            self._write(STOPPED, lines)

    # ---- lines ----

    def _published(self, number: int, line: str) -> ListedCheckpoint:
        match = _LINE.fullmatch(line)
        if match is None:
            raise self._broken(CHECKPOINTS, number, line, "day, key, path, pass, 0 and tabs")
        day, key, path, last_pass = match.groups()
        point = PassPoint(day, 0 if int(last_pass) == BATCH_MODEL else int(last_pass))
        return ListedCheckpoint(point, int(key), path)

    def _exported(self, name: str, number: int, line: str) -> ListedExport:
        try:
            body = json.loads(line)
            monitor = str(body.get("monitor_data", ""))
            return ListedExport(int(body["id"]), int(body["key"]), str(body["input"]), monitor)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._broken(name, number, line, "JSON with id, key and input") from error

    def _broken(self, name: str, number: int, line: str, expected: str) -> Corruption:
        return Corruption(
            f"DoneFiles: {self._path(name)}:{number}: expected {expected}, found {line!r}"
        )

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _lines(self, name: str) -> Sequence[tuple[int, str]]:
        files, path = filesystem(location := self._path(name), self._options)
        files.invalidate_cache()
        with looking(location):
            content = files.cat_file(path) if files.exists(path) else b""
        try:
            lines = content.decode().split("\n")  # a path may have what str.splitlines cuts at
        except UnicodeDecodeError as error:
            raise Corruption(f"DoneFiles: {location}: expected UTF-8, found {error}") from error
        return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]

    def _write(self, name: str, lines: Sequence[str]) -> None:
        location = self._path(name)
        text = "".join(f"{line}\n" for line in lines).encode()
        with writing(f"DoneFiles: cannot write {location}"):
            if "://" in location:
                files, path = filesystem(location, self._options)
                files.pipe_file(path, text)
            else:
                make_folder(Path(location).absolute().parent)
                replace_file(Path(location), text)
