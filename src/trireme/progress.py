"""Progress of worker 0: a bar on a terminal, a line every few seconds in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_S = 5.0
REFRESH_S = 0.25
REST = 20
"""Pause between figures, in multiples of the time that they took: some metrics sort all scores."""


class Display:
    """Progress of one activity: the fraction done, the number of examples and figures.

    Threads: one at a time.
    """

    def __init__(self, title: str, progress: Progress | None, *, is_quiet: bool = False) -> None:
        self._title, self._progress, self._is_quiet = title, progress, is_quiet
        self._task = None if progress is None else progress.add_task(title, total=1.0, figures="")
        self._period_s = LINE_S if progress is None else REFRESH_S
        self._started = self._asked = time.monotonic()
        self._due = self._started + self._period_s
        self.num_examples = 0

    def is_due(self) -> bool:
        """Whether the figures are due to be computed and shown. This call is cheap."""
        if self._is_quiet:
            return False
        self._asked = time.monotonic()
        return self._asked >= self._due

    def show(self, fraction: float | None, figures: dict[str, float]) -> None:
        """Show the figures. fraction: 0 to 1; None: unknown."""
        if self._is_quiet:
            return
        now = time.monotonic()
        self._due = now + max(self._period_s, REST * (now - self._asked))
        elapsed_s = max(now - self._started, 1e-9)
        text = " ".join(f"{name} {value:.4f}" for name, value in figures.items())
        text = f"{text} {self.num_examples / elapsed_s:,.0f} examples/s"
        done = "" if fraction is None else f" {100 * fraction:.0f}%"
        self._draw(f"{done}: {self.num_examples:,} examples {text}", fraction, text)

    def show_fraction(self, fraction: float) -> None:
        """Show the progress, 0 to 1, of an activity without examples."""
        if self._is_quiet:
            return
        self._due = time.monotonic() + self._period_s
        self._draw(f" {100 * fraction:.0f}%", fraction, "")

    def _draw(self, line: str, fraction: float | None, figures: str) -> None:
        if self._progress is None or self._task is None:
            _write(f"{self._title}{line}")
            return
        total = None if fraction is None else 1.0
        self._progress.update(self._task, total=total, completed=fraction or 0.0, figures=figures)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._progress is None:
            _write(f"{self._title}: {text}")
        else:
            self._progress.console.print(f"{self._title}: {text}", markup=False, highlight=False)


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextmanager
def display(title: str, *, is_quiet: bool = False) -> Iterator[Display]:
    """Show an activity while the block runs; a quiet one prints only what `say` gets."""
    if is_quiet or not sys.stdout.isatty():
        yield Display(title, None, is_quiet=is_quiet)
        return
    from rich.progress import (  # not needed without a terminal
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, refresh_per_second=4) as progress:
        yield Display(title, progress)
