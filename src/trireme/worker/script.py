"""Where a worker is in its script: the number of its pass, and the names of its meetings.

A worker that starts again after it was killed runs its script from the beginning. What it comes by
has the same number or name as when its predecessor came by; so it can tell what is over, and the
coordinator can give it the answers that the predecessor got.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trireme.protocol.wire import need, need_list


@dataclass(frozen=True)
class Entered:
    """A pass that this worker has begun.

    Attributes:
        is_over: predecessors have made it and gone on; nothing is left to do in it.
        first_step: of it; 0 where streams do not advance together.
        note: what a predecessor that had begun it before has noted; None: there was none.
        end: a predecessor has left it, and contributes to the steps before this one; None: not.
    """

    is_over: bool = False
    first_step: int = 0
    note: tuple[int, ...] | None = None
    end: int | None = None


class Script:
    """Used by one thread, the one that runs the script.

    Attributes:
        number: of the pass that the worker is in.
        is_successor: another process has run this script before, up to some place.
    """

    def __init__(
        self,
        *,
        run: int = 0,
        begun: int = 0,
        entered: int = 0,
        is_successor: bool = False,
        has_ended: bool = False,
        met: frozenset[str] = frozenset(),
    ) -> None:
        """What the coordinator says.

        Args:
            run: how often all workers have ended their scripts. begun: number of the pass that they
                had ended with. entered, met: the last pass that a predecessor has begun since, and
                the paths of the meetings that it has come to there. has_ended: it has come to the
                end of the script.
        """
        self.run, self.number = run, begun
        self._entered, self._has_ended, self._met = entered, has_ended, met
        self.is_successor = is_successor
        self._path = [f"run {run}"] if run else []
        self._counts = [0]

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> Script:
        """Raises BadRequest."""
        return cls(
            run=need(body, "run", int),
            begun=need(body, "begun", int),
            entered=need(body, "entered", int),
            is_successor=need(body, "is_successor", bool),
            has_ended=need(body, "has_ended", bool),
            met=frozenset(need_list(body, "met", str)),
        )

    # ---- passes ----

    @property
    def is_behind(self) -> bool:
        """Whether all that comes up to the next pass has been done by a predecessor."""
        return self._has_ended or self.number < self._entered

    @property
    def is_next_behind(self) -> bool:
        """Whether that goes for the next pass as well."""
        return self._has_ended or self.number + 1 < self._entered

    def passes_begun(self, num_passes: int) -> bool:
        """Whether a predecessor has begun one of the next so many passes and is not behind them."""
        is_within = self.number < self._entered <= self.number + num_passes
        return is_within and not self._has_ended

    # ---- meetings ----

    @property
    def here(self) -> str:
        """A name for what the worker is doing, which no other part of the job has."""
        return f"{self.number}:{self._join('')}"

    def next_meeting(self) -> str:
        """The path of the next meeting."""
        self._counts[-1] += 1
        return self._join(str(self._counts[-1]))

    def has_come(self) -> bool:
        """Whether a predecessor has come to the next meeting already."""
        return self.is_behind or self._is_met(self._join(str(self._counts[-1] + 1)))

    def has_met_within(self) -> bool:
        """Whether a predecessor has come to any meeting of this section."""
        begin = self._join("")
        return self.number == self._entered and any(path.startswith(begin) for path in self._met)

    def _is_met(self, path: str) -> bool:
        return self.number == self._entered and path in self._met

    @contextmanager
    def section(self, name: str | None = None) -> Iterator[None]:
        """A part of the script whose meetings are numbered by themselves, so that it may have
        another number of them, or none where they are over.

        name: default its number.
        """
        if name is None:
            self._counts[-1] += 1
            name = str(self._counts[-1])
        path, counts = len(self._path), len(self._counts)
        self._path.append(name)
        self._counts.append(0)
        try:
            yield
        finally:
            # Also those within that have not been left, as of an iterator that is dropped later.
            del self._path[path:], self._counts[counts:]

    def _join(self, last: str) -> str:
        return "/".join([*self._path, last])
