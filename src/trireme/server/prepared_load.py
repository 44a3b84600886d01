"""A load between its two phases: every server has checked its share of a checkpoint, and the
coordinator has not decided yet, or this server has not loaded it. Before that it is checked alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, ClassVar

from trireme.errors import BadRequest
from trireme.protocol.wire import Array
from trireme.rpc import HeldBytes

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


class CheckedLoad:
    """The load that was checked last, with its rows and the room that it needs, until it takes
    place or is given up. Threads: any.

    held: counts its manifest.
    """

    def __init__(self, held: HeldBytes) -> None:
        self._held, self._lock = held, Lock()
        self._load: tuple[str, Any] | None = None
        self._is_prepared = False

    def keep(self, job: str, load: object, num_bytes: int) -> None:
        """job: the name of its operation. num_bytes: of its manifest. Raises BadRequest: another
        one is prepared.
        """
        with self._lock:
            if self._is_prepared:
                raise BadRequest("load: expected one at a time, found that another is prepared")
            self._load = job, load
            self._held.note(self, num_bytes)

    @property
    def load(self) -> Any:
        """None: there is none."""
        return None if self._load is None else self._load[1]

    def prepare(self, load: object) -> bool:
        """From now on it is not given up. Returns False: it was already, or is not the last."""
        with self._lock:
            self._is_prepared = self._is_prepared or self.load is load
            return self.load is load

    def give_up(self, job: str | None = None) -> None:
        """Free what it holds, unless it is prepared, or of another job."""
        with self._lock:
            if self._load and not self._is_prepared and job in (None, self._load[0]):
                self._free()

    def end(self) -> None:
        """It takes place, or will not."""
        with self._lock:
            self._free()

    def _free(self) -> None:
        self._load, self._is_prepared = None, False
        self._held.free(self)
