"""The settings of `trireme stream`: days, passes, and when to publish.

Keys and defaults are those of PaddleRec's online trainer; data_timeout_second and checkpoint_keep
are ours. Nothing here loads torch: see `runner_keys`.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

from trireme.config import Config
from trireme.errors import BadRequest
from trireme.run.runner_keys import RunnerKeys
from trireme.threads import THREADS_MAX

MINUTES_OF_DAY = 24 * 60


@dataclass(frozen=True, kw_only=True)
class OnlineSettings:
    """The settings of a stream, in addition to `Settings`.

    start_day, end_day: yyyymmdd, both included; no end_day: run for ever.
    split_interval: minutes of data per folder DAY/HHMM. split_per_pass: folders per pass.
    data_donefile: name of the file that marks the data of a folder as complete; "": a folder with
        files is complete.
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
        keys = RunnerKeys(config)
        first, last = _days(keys)
        start, end = _day(keys, "start_day") or first, _day(keys, "end_day") or last
        if start is None:
            raise BadRequest(
                "runner.start_day: expected a day as yyyymmdd, found none;"
                " -o runner.start_day=20190720 says one"
            )
        if end is not None and end < start:
            raise BadRequest(f"runner.end_day: expected {start} or later, found {end}")
        per_pass = keys.integer("split_per_pass", 1)
        interval = keys.integer("split_interval", _minutes(keys, per_pass))
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
            checkpoint_per_pass=keys.integer("checkpoint_per_pass", 6),
            save_delta_frequency=keys.integer("save_delta_frequency", 6),
            save_first_base=keys.switch("save_first_base"),
            checkpoint_keep=keys.optional_integer("checkpoint_keep"),
            data_donefile=keys.file_name("data_donefile"),
            poll_s=keys.seconds("data_sleep_second", 10.0),
            timeout_s=keys.seconds("data_timeout_second", 86400.0),
            prefetch=keys.switch("prefetch"),
            preload_threads=keys.optional_integer("preload_thread_num", high=THREADS_MAX),
        )

    @property
    def passes_per_day(self) -> int:
        return MINUTES_OF_DAY // (self.split_interval * self.split_per_pass)

    def splits(self, number: int) -> list[str]:
        """The folders HHMM of a pass; passes are numbered from 1."""
        first = (number - 1) * self.split_per_pass
        minutes = [
            split * self.split_interval for split in range(first, first + self.split_per_pass)
        ]
        return [f"{minute // 60:02d}{minute % 60:02d}" for minute in minutes]

    def begin_s(self, number: int) -> int:
        """Seconds from the start of the day to the start of a pass."""
        return (number - 1) * self.split_per_pass * self.split_interval * 60


def _day(keys: RunnerKeys, key: str) -> str | None:
    day = keys.get(key)
    if day is None:
        return None
    if not _is_day(str(day)):
        raise BadRequest(
            f"runner.{key}: expected a day as yyyymmdd, found {day!r};"
            f" -o runner.{key}=20190720 overrides the file"
        )
    return str(day)


def _is_day(text: str) -> bool:
    try:
        datetime.datetime.strptime(text, "%Y%m%d")
    except ValueError:
        return False
    return len(text) == 8  # 2019111 is read as one, too


def _days(keys: RunnerKeys) -> tuple[str | None, str | None]:
    """The first and the last of runner.days: "{20190720..20190722}", or days in a row."""
    value = keys.get("days")
    if value is None:
        return None, None
    days = re.findall(r"\d+", str(value))
    wrong = [day for day in days if not _is_day(day)]
    if not days or wrong or days != sorted(days):
        raise BadRequest(
            "runner.days: expected days as {20190720..20190722}, or one after the other, found"
            f" {value!r}; -o runner.start_day=20190720 runner.end_day=20190722 says the same"
        )
    return days[0], days[-1]


def _minutes(keys: RunnerKeys, splits_per_pass: int) -> int:
    """The default of split_interval: 5, or what pass_per_day makes it."""
    passes = keys.optional_integer("pass_per_day")
    if passes is None:
        return 5
    minutes, rest = divmod(MINUTES_OF_DAY, passes * splits_per_pass)
    interval = keys.optional_integer("split_interval")
    if rest or interval not in (None, minutes):
        raise BadRequest(
            f"runner.pass_per_day: expected passes that fill the {MINUTES_OF_DAY} minutes of a"
            f" day, with split_interval * split_per_pass if they are given, found {passes};"
            " -o runner.pass_per_day=24 makes one an hour"
        )
    return minutes
