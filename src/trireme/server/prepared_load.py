"""A load between its two phases: every server has checked its share of a checkpoint, and the
coordinator has not decided yet, or this server has not loaded it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trireme.protocol.wire import Array

LOAD, LOAD_END = "log.load", "log.load_end"


@dataclass(frozen=True)
class PreparedLoad:
    """checkpoint: what a server that has restarted needs to read its share again: the fields of the
    worker's request. So the rows need not be held, or logged, beside those that they replace.
    """

    what: ClassVar = "load"
    end: ClassVar = LOAD_END
    is_whole: ClassVar = True

    id: str
    checkpoint: Mapping[str, Any]

    def records(self) -> Iterator[tuple[str, dict[str, Any], Sequence[Array]]]:
        """What a log keeps of it."""
        yield LOAD, {"id": self.id, "checkpoint": dict(self.checkpoint)}, ()
