"""Where a worker is in its script: the number of its pass, and the names of its meetings.

A worker that is restarted after a kill runs its script from the beginning. Its passes and
meetings have the same numbers and names as those of its predecessor. So it knows what is over, and
the coordinator can give it the answers that the predecessor got.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trireme.protocol.wire import need, need_list


@dataclass(frozen=True)
class DataCut:
    """What a worker knows of the data of a pass, in words; empty: nothing. is_own: it is the
    worker's alone; else all workers divide it.
    """

    text: str = ""
    is_own: bool = False


class Script:
    """Used by the one thread that runs the script.

    Args:
        run: how often all workers have ended their scripts.
        begun: number of the pass with which they ended.
        entered: the last pass that a predecessor has begun since.
        trained: the last pass on a device that has ended, and the steps made until then.
        has_ended: a predecessor has ended the script.
        attended: paths of the meetings in that pass to which a predecessor has come.
    """

    def __init__(
        self,
        *,
        run: int = 0,
        begun: int = 0,
        entered: int = 0,
        trained: tuple[int, int] = (0, 0),
        is_successor: bool = False,
        has_ended: bool = False,
        attended: frozenset[str] = frozenset(),
    ) -> None:
        self.run, self.number = run, begun  # number: of the pass that the worker is in
        self.has_entered = True  # False: a call to enter it has not come to its end
        self.data = DataCut()  # of the next pass
        self._entered, self._has_ended, self._attended = entered, has_ended, attended
        self.trained, self.trained_steps = trained
        self.is_successor = is_successor  # another process has run this script up to some place
        self._path = [f"run {run}"] if run else []
        self._counts = [0]

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> Script:
        """Raises BadRequest."""
        return cls(
            run=need(body, "run", int),
            begun=need(body, "begun", int),
            entered=need(body, "entered", int),
            trained=_trained(body),
            is_successor=need(body, "is_successor", bool),
            has_ended=need(body, "has_ended", bool),
            attended=frozenset(need_list(body, "met", str)),
        )

    # ---- passes ----

    @property
    def is_behind(self) -> bool:
        """Whether a predecessor has done everything up to the next pass."""
        return self._has_ended or self.number < self._entered

    @property
    def is_next_behind(self) -> bool:
        """Whether a predecessor has done the next pass, too."""
        return self._has_ended or self.number + 1 < self._entered

    @property
    def has_begun(self) -> bool:
        """Whether a predecessor has begun the pass that the worker is in, and no later one."""
        return self.is_successor and self.number == self._entered

    def passes_begun(self, num_passes: int) -> bool:
        """Whether a predecessor has begun one of the next passes and is not behind them."""
        is_within = self.number < self._entered <= self.number + num_passes
        return is_within and not self._has_ended

    def begin_next(self) -> int:
        """The number of the next pass; of this one, to be begun again, if it was not entered."""
        self.number, self.has_entered = self.number + self.has_entered, False
        return self.number

    # ---- meetings ----

    @property
    def location(self) -> str:
        """A name for this place in the script, unique in the job."""
        return f"{self.number}:{self._join('')}"

    def next_meeting(self) -> str:
        """The path of the next meeting."""
        self._counts[-1] += 1
        return self._join(str(self._counts[-1]))

    def has_attended_next(self) -> bool:
        """Whether a predecessor has come to the next meeting."""
        path = self._join(str(self._counts[-1] + 1))
        return self.is_behind or (self.number == self._entered and path in self._attended)

    def has_attended_within(self) -> bool:
        """Whether a predecessor has come to any meeting of this section."""
        begin = self._join("")
        return self.number == self._entered and any(p.startswith(begin) for p in self._attended)

    @contextmanager
    def section(self, name: str | None = None) -> Iterator[None]:
        """A part of the script with its own numbers of meetings, so that a successor may attend
        fewer of them, or none if the section is over. name: default its number.
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
            # Also sections within that are still open, as of an iterator that is dropped later.
            del self._path[path:], self._counts[counts:]

    def _join(self, last: str) -> str:
        return "/".join([*self._path, last])


def _trained(body: Mapping[str, Any]) -> tuple[int, int]:
    number, num_steps = [*need_list(body, "trained", int, 2), 0, 0][:2]
    return number, num_steps
