"""What one server has applied of each stream: it admits every push once, and in order."""

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trireme.errors import Fenced, NotReady
from trireme.protocol.wire import Push

STALENESS_MAX = 1024


@dataclass
class StreamState:
    """The last push of a stream that was applied: its sequence number, and the position of the
    stream in the data after it. `lock` admits one push of the stream at a time. `is_level`: no
    bucket or block is known to be ahead of the others.
    """

    last: int = 0
    incarnation: int = 0
    position: tuple[int, ...] = ()
    is_level: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def admit(self, push: Push) -> None:
        """Check the order of a push; a newer incarnation takes the stream over. Raises Fenced,
        NotReady.
        """
        if push.incarnation < self.incarnation:
            raise Fenced(
                f"stream {push.stream}: incarnation {self.incarnation} has taken over,"
                f" found a push of incarnation {push.incarnation}"
            )
        self.incarnation = push.incarnation
        if push.sequence > self.last + 1:
            raise NotReady(
                f"stream {push.stream}: expected sequence {self.last + 1} next,"
                f" found {push.sequence}; if the pushes between do not arrive, the server has lost"
                " the end of its log: load the newest checkpoint"
            )


class Streams(defaultdict[int, StreamState]):
    """The streams by number. Needs the server's lock.

    num_pushes: pushes and steps applied since the start.
    pushes_at_load: `num_pushes` at the last load; None: there was none, or rows were imported or
    expired since.
    staleness: number of pushes by how many others were applied between their pull and themselves.
    """

    def __init__(self) -> None:
        super().__init__(StreamState)
        self.num_pushes = 0
        self.pushes_at_load: int | None = None
        self.staleness: Counter[int] = Counter()

    def record(self, pushes: Sequence[Push]) -> list[Push]:
        """Note that these pushes have been applied; returns those that had not been before."""
        new = [push for push in pushes if push.sequence > self[push.stream].last]
        for push in new:
            stream = self[push.stream]
            stream.last, stream.position = push.sequence, push.position
            staleness = self.num_pushes - push.computed_at
            self.staleness[min(max(staleness, 0), STALENESS_MAX)] += 1
        self.num_pushes += bool(new)
        return new

    def applied_ids(self) -> list[tuple[int, int]]:
        """(stream, sequence) of the last push applied of each stream."""
        return [(number, stream.last) for number, stream in self.items() if stream.last]

    def applied(self) -> list[list[Any]]:
        """[stream, last sequence, position after it] of each stream with pushes."""
        return [[number, last, list(self[number].position)] for number, last in self.applied_ids()]

    # ---- loads ----

    def reset(self, streams: Mapping[int, tuple[int, tuple[int, ...]]]) -> None:
        """After a load: set the last sequence and the position of each stream; streams that are not
        named start at the beginning.
        """
        for number in {**streams, **self}:
            stream = self[number]
            stream.last, stream.position = streams.get(number, (0, ()))
            stream.is_level = False

    def note_contents(self, *, are_loaded: bool) -> None:
        """Rows and blocks are now those of a checkpoint, until the next push; or others."""
        self.pushes_at_load = self.num_pushes if are_loaded else None

    @property
    def is_as_loaded(self) -> bool:
        return self.pushes_at_load == self.num_pushes

    # ---- snapshots ----

    def state(self) -> list[list[Any]]:
        """The streams, in msgpack's types."""
        return [[n, s.last, s.incarnation, list(s.position)] for n, s in self.items()]

    def install(self, state: Mapping[str, Any]) -> None:
        """Install the result of `state` and the counts from the state of a log."""
        for number, last, incarnation, position in state["streams"]:
            self[number] = StreamState(last, incarnation, tuple(position))
        self.num_pushes, self.pushes_at_load = state["pushes"], state["pushes_at_load"]
        self.staleness = Counter(dict(state["staleness"]))
