"""The pass that follows: its keys, and the rows that the pass under way does not have, are read in
a thread while that one trains.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trireme.bounded_queue import ReadAhead
from trireme.errors import Unavailable
from trireme.job.cluster import Cluster
from trireme.protocol.routing import Keys
from trireme.table import RowClassId
from trireme.train.pass_data import PassData
from trireme.worker.gradients import KeysByClass
from trireme.worker.whole_rows import ReadRows

log = logging.getLogger("trireme.train")

Stop: TypeAlias = Callable[[], bool]


@dataclass(frozen=True, eq=False)
class RowsAhead:
    """Rows of U distinct keys. lacking: (n,) positions of keys that the pass under way lacks.
    read: their rows.
    """

    keys: Keys
    lacking: npt.NDArray[np.intp]
    read: ReadRows


class NextPass:
    """held: the keys of the pass under way. read: reads rows from the servers."""

    def __init__(
        self,
        cluster: Cluster,
        data: PassData,
        held: KeysByClass,
        read: Callable[[RowClassId, Keys, Stop], ReadRows],
    ) -> None:
        self.data = data
        self._cluster, self._held, self._read = cluster, held, read
        self._stop = threading.Event()
        self._ahead = ReadAhead(
            self._prepare(), depth=1, name="trireme-next-pass", stop=self._stop.set
        )
        cluster.add_running(self.close)

    def _prepare(self) -> Iterator[dict[RowClassId, RowsAhead]]:
        prepared, stop = {}, self._stop.is_set
        for class_id, keys_U in self.data.keys(stop).items():
            held = self._held.get(class_id, keys_U[:0])
            lacking = np.flatnonzero(~np.isin(keys_U, held, assume_unique=True))
            prepared[class_id] = RowsAhead(
                keys_U, lacking, self._read(class_id, keys_U[lacking], stop)
            )
        yield prepared

    def wait(self) -> dict[RowClassId, RowsAhead] | None:
        """What was read, once; None: servers could not be read. Raises the error of the data."""
        try:
            return next(self._ahead)
        except Unavailable as error:
            log.info("pass on a device: its rows were not read ahead: %s", error)
            return None
        finally:
            self.close()

    def close(self) -> None:
        """End the thread after what it reads now."""
        self._cluster.take_back(self.close)
        self._ahead.close()
