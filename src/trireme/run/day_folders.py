"""The passes of a stream: days, and folders DAY/HHMM of data."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from trireme.data.sources import filesystem
from trireme.errors import BadRequest
from trireme.run.data import files_below, located
from trireme.run.online_settings import OnlineSettings
from trireme.run.settings import Settings
from trireme.train.online.passes import Pass, next_day, seconds_of_day

log = logging.getLogger("trireme")

OpenFiles = Callable[[list[str]], Iterable[Any] | None]


def passes_of(settings: Settings, online: OnlineSettings, open_files: OpenFiles) -> Iterator[Pass]:
    """Every pass of the configured days, in order.

    Args:
        open_files: makes this worker's dataset from the files of a pass.

    Raises:
        BadRequest: the configuration names no folder of data.
    """
    return _passes(_Folders(settings, online), online, open_files)


def _passes(folders: _Folders, online: OnlineSettings, open_files: OpenFiles) -> Iterator[Pass]:
    def opened(names: list[str]) -> Iterable[Any] | None:
        return open_files(folders.files(names))

    for day in _days(online.start_day, online.end_day):
        for number in range(1, online.passes_per_day + 1):
            names = [f"{day}/{split}" for split in online.splits(number)]
            yield Pass(
                day=day,
                number=number,
                open=partial(opened, names),
                is_ready=partial(folders.are_ready, names),
                time=seconds_of_day(day) + online.begin_s(number),
                ends_day=number == online.passes_per_day,
                where=folders.describe(names),
            )


def _days(start: str, end: str | None) -> Iterator[str]:
    day = start
    while end is None or day <= end:
        yield day
        day = next_day(day)


class _Folders:
    """The folders DAY/HHMM of a stream's data."""

    def __init__(self, settings: Settings, online: OnlineSettings) -> None:
        if len(settings.train.paths) != 1:
            raise BadRequest(
                f"{settings.train.key}: expected one folder of days, found"
                f" {', '.join(settings.train.paths) or 'none'}"
            )
        self._base, self._options = located(settings.train.paths[0].rstrip("/"), settings)
        self._donefile = online.data_donefile

    def are_ready(self, names: list[str]) -> bool:
        return all(self._is_ready(f"{self._base}/{name}") for name in names)

    def describe(self, names: list[str]) -> str:
        """The condition under which folders are ready, for messages."""
        last = f" to {names[-1]}" if len(names) > 1 else ""
        contents = self._donefile or "files"
        return f"{self._base}/{names[0]}{last}, each with {contents}"

    def _is_ready(self, folder: str) -> bool:
        if not self._donefile:
            return bool(files_below(folder, self._options))
        where, path = filesystem(f"{folder}/{self._donefile}", self._options)
        where.invalidate_cache()
        return bool(where.exists(path))

    def files(self, names: list[str]) -> list[str]:
        """Files with data, in the order of the folders."""
        listed = itertools.chain.from_iterable(
            files_below(f"{self._base}/{name}", self._options).items() for name in names
        )
        data = {path: size for path, size in listed if path.rpartition("/")[2] != self._donefile}
        if empty := [path for path, size in data.items() if size == 0]:
            log.info("stream: %d empty files are skipped, %s first", len(empty), empty[0])
        return [path for path, size in data.items() if size]
