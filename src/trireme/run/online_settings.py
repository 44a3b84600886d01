"""The keys of streaming runs as typed values: days, passes, what is published when.

Nothing here needs torch, as in settings.py. Keys and defaults are those of PaddleRec's online
trainer; data_timeout_second and checkpoint_keep are ours.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from trireme.config import Config
from trireme.errors import BadRequest

MINUTES_OF_DAY = 24 * 60


@dataclass(frozen=True, kw_only=True)
class OnlineSettings:
    """What `trireme stream` reads beside `Settings`.

    start_day, end_day: yyyymmdd, both included; no end_day: for ever.
    split_interval: minutes of data per folder DAY/HHMM. split_per_pass: folders per pass.
    data_donefile: name of a file that says, in each folder, that its data is complete; "": a folder
        with files is complete.
    """

    start_day: str
    end_day: str | None
    split_interval: int
    split_per_pass: int
    checkpoint_per_pass: int
    save_delta_frequency: int
    save_first_base: bool
    checkpoint_keep: int | None
    data_donefile: str
    poll_s: float
    timeout_s: float
    prefetch: bool
    preload_threads: int | None

    @classmethod
    def read(cls, config: Config) -> OnlineSettings:
        """Raises BadRequest: a value out of range, or intervals that do not fill a day."""
        start = _day(config, "start_day")
        if start is None:
            raise BadRequest("runner.start_day: expected a day as yyyymmdd, found none")
        end = _day(config, "end_day")
        if end is not None and end < start:
            raise BadRequest(f"runner.end_day: expected {start} or later, found {end}")
        interval = _whole(config, "split_interval", 5)
        per_pass = _whole(config, "split_per_pass", 1)
        if MINUTES_OF_DAY % (interval * per_pass):
            raise BadRequest(
                "runner.split_interval: expected passes of split_interval * split_per_pass minutes"
                f" to fill a day of {MINUTES_OF_DAY}, found {interval} * {per_pass}"
            )
        return cls(
            start_day=start,
            end_day=end,
            split_interval=interval,
            split_per_pass=per_pass,
            checkpoint_per_pass=_whole(config, "checkpoint_per_pass", 6),
            save_delta_frequency=_whole(config, "save_delta_frequency", 6),
            save_first_base=_switch(config, "save_first_base"),
            checkpoint_keep=_whole(config, "checkpoint_keep", None),
            data_donefile=_file_name(config, "data_donefile"),
            poll_s=_seconds(config, "data_sleep_second", 10.0),
            timeout_s=_seconds(config, "data_timeout_second", 86400.0),
            prefetch=_switch(config, "prefetch"),
            preload_threads=_whole(config, "preload_thread_num", None),
        )

    @property
    def passes_per_day(self) -> int:
        return MINUTES_OF_DAY // (self.split_interval * self.split_per_pass)

    def splits(self, number: int) -> list[str]:
        """The folders HHMM of a pass, numbered from 1."""
        first = (number - 1) * self.split_per_pass
        minutes = [
            split * self.split_interval for split in range(first, first + self.split_per_pass)
        ]
        return [f"{minute // 60:02d}{minute % 60:02d}" for minute in minutes]

    def begin_s(self, number: int) -> int:
        """Seconds from the begin of the day to that of a pass."""
        return (number - 1) * self.split_per_pass * self.split_interval * 60


def _day(config: Config, key: str) -> str | None:
    found = config.get(f"runner.{key}", None)
    if found is None:
        return None
    try:
        datetime.datetime.strptime(str(found), "%Y%m%d")
    except ValueError as error:
        raise BadRequest(f"runner.{key}: expected a day as yyyymmdd, found {found!r}") from error
    return str(found)


def _whole(config: Config, key: str, default: Any) -> Any:
    found = config.get(f"runner.{key}", default)
    if found is not default and (type(found) is not int or found < 1):
        raise BadRequest(f"runner.{key}: expected an integer >= 1, found {found!r}")
    return found


def _switch(config: Config, key: str) -> bool:
    found = config.get(f"runner.{key}", False)
    if not isinstance(found, bool):
        raise BadRequest(f"runner.{key}: expected True or False, found {found!r}")
    return found


def _seconds(config: Config, key: str, default: float) -> float:
    found = config.get(f"runner.{key}", default)
    if type(found) not in (int, float) or not 0 < found < float("inf"):
        raise BadRequest(f"runner.{key}: expected seconds > 0, found {found!r}")
    return float(found)


def _file_name(config: Config, key: str) -> str:
    found = config.get(f"runner.{key}", "")
    if not isinstance(found, str) or "/" in found:
        raise BadRequest(f"runner.{key}: expected the name of a file, found {found!r}")
    return found
