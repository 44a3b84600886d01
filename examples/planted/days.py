"""Days of clicks from a service that changes, for streaming runs.

Users with constant preferences see items of 20 categories. Items come and go, so a table that keeps
every key grows for ever. The popularity of categories changes from hour to hour, so a model that
stops learning becomes worse. Text is MultiSlot: show, click, then the features

    2  the user     3  the item     4  its category     5  categories that the user clicked last

    python examples/planted/days.py FOLDER [--start 20190720] [--days 3] [--interval 60]
        [--examples 2000] [--seed 0]

writes FOLDER/DAY/HHMM/part-0 for every interval (in minutes), and data.done beside it.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from trireme.errors import BadRequest, writing

DONE = "data.done"
_MINUTES = 24 * 60
_USERS, _CATEGORIES, _ITEMS, _HISTORY = 500, 20, 400, 3
_CHURN = 0.02  # share of the items that is replaced each hour
_DRIFT = 0.05  # change of a category's popularity in an hour, in standard deviations
_ITEM_KEY, _CATEGORY_KEY = 10**6, 10**5  # keys of users are below


class Service:
    """The changing service; the same seed gives the same days."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = np.random.default_rng(seed)
        self._tastes = rng.normal(size=(_USERS, _CATEGORIES)) * 1.2
        self._favour = rng.normal(size=_CATEGORIES)
        self._items = np.arange(_ITEMS)
        self._appeal = rng.normal(size=_ITEMS) * 0.7
        self._num_born = _ITEMS
        self._history = np.zeros((_USERS, _HISTORY), np.int64)

    def lines(self, num_examples: int) -> list[str]:
        """The text of examples at the present time."""
        rng = self._rng
        users = rng.integers(0, _USERS, num_examples)
        places = rng.integers(0, _ITEMS, num_examples)
        items = self._items[places]
        categories = items % _CATEGORIES
        logits = self._tastes[users, categories] + self._favour[categories] + self._appeal[places]
        clicks = rng.random(num_examples) < 1 / (1 + np.exp(1.0 - logits))
        lines = []
        for user, item, category, click in zip(users, items, categories, clicks, strict=True):
            seen = self._history[user]
            lines.append(_line(int(user), int(item), int(category), bool(click), seen[seen > 0]))
            if click:
                self._history[user] = [category + _CATEGORY_KEY, *seen[:-1]]
        return lines

    def advance(self, hours: float) -> None:
        """Advance the time: new items replace old ones, and categories change in popularity."""
        rng = self._rng
        gone = rng.random(_ITEMS) < 1 - (1 - _CHURN) ** hours
        born = int(gone.sum())
        self._items[gone] = self._num_born + np.arange(born)
        self._appeal[gone] = rng.normal(size=born) * 0.7
        self._num_born += born
        keep = (1 - _DRIFT**2) ** (hours / 2)
        self._favour = keep * self._favour + np.sqrt(1 - keep**2) * rng.normal(size=_CATEGORIES)


def _line(user: int, item: int, category: int, click: bool, seen: NDArray[np.int64]) -> str:
    history = [int(key) for key in seen] or [0]
    keys = " ".join(map(str, history))
    return (
        f"1 1 1 {int(click)} 1 {user + 1} 1 {item + _ITEM_KEY} 1 {category + _CATEGORY_KEY}"
        f" {len(history)} {keys}\n"
    )


def intervals(start: str, days: int, minutes: int) -> Iterator[str]:
    """DAY/HHMM of every interval."""
    first = datetime.datetime.strptime(start, "%Y%m%d")
    for number in range(days * _MINUTES // minutes):
        at = first + datetime.timedelta(minutes=number * minutes)
        yield at.strftime("%Y%m%d/%H%M")


def write_days(
    folder: Path, *, start: str, days: int, minutes: int, num_examples: int, seed: int
) -> Iterator[Path]:
    """Write the intervals in order, with `num_examples` each; yields the folder of each.

    Raises:
        BadRequest: numbers out of range, or a folder that cannot be written.
    """
    if days < 1 or num_examples < 1 or minutes < 1 or _MINUTES % minutes:
        raise BadRequest(
            "planted_days: expected days and examples >= 1, and an interval that divides a day of"
            f" {_MINUTES} minutes, found {days}, {num_examples} and {minutes}"
        )
    service = Service(seed)
    for name in intervals(start, days, minutes):
        into = folder / name
        with writing(f"planted_days: cannot write {into}"):
            into.mkdir(parents=True, exist_ok=True)
            (into / "part-0").write_text("".join(service.lines(num_examples)))
            (into / DONE).touch()
        service.advance(minutes / 60)
        yield into


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python examples/planted/days.py", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start", default="20190720", help="first day, yyyymmdd")
    parser.add_argument("--days", type=int, default=3)
    parser.add_argument("--interval", type=int, default=60, help="minutes of each folder")
    parser.add_argument("--examples", type=int, default=2000, help="examples of each folder")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        written = write_days(
            options.folder,
            start=options.start,
            days=options.days,
            minutes=options.interval,
            num_examples=options.examples,
            seed=options.seed,
        )
        total = options.days * _MINUTES // max(options.interval, 1)
        for _ in track(written, "writing", total=total, console=Console(stderr=True)):
            pass
    except BadRequest as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
