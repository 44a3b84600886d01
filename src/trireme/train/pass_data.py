"""The data of a pass on a device, and the keys that it needs; or how much is known of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from trireme import _core
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.nn import Planner
from trireme.protocol.routing import NO_KEYS, Keys
from trireme.table import RowClassId
from trireme.train.loop.worker_batches import worker_batches

_PENDING_KEYS = 1 << 22
BATCHES_MAX = 1024


@dataclass(frozen=True, eq=False)
class PassData:
    """dataset: as the user gave it. batches: reads this worker's part of it from the beginning."""

    dataset: Iterable[Any]
    batches: Callable[[], Iterable[Any]]
    planner: Planner
    pool: _core.Pool

    @classmethod
    def read_by(
        cls, model: nn.Module, cluster: Cluster, dataset: Iterable[Any], epoch: int
    ) -> PassData:
        """The data as this worker reads it in an epoch."""
        batches = partial(worker_batches, dataset, cluster, epoch)
        return cls(dataset, batches, Planner(model, pool=cluster.pool), cluster.pool)

    def keys(self, stop: Callable[[], bool] = lambda: False) -> dict[RowClassId, Keys]:
        """The distinct keys that the data needs of each row class of the model's tables, in the
        order of their buckets. stop: whether to end early, with those of some batches.
        """
        pending: dict[RowClassId, list[Keys]] = {
            part.class_id: [NO_KEYS] for table in self.planner.tables for part in table.parts
        }
        for source in self.batches():
            for class_id, keys_N in self.planner.keys_of_ids(as_batch(source)).items():
                parts = pending[class_id]
                parts.append(keys_N)
                if sum(map(len, parts[1:])) > max(_PENDING_KEYS, len(parts[0])):
                    pending[class_id] = [_core.distinct(parts, self.pool)]
            if stop():
                break
        return {class_id: _core.distinct(parts, self.pool) for class_id, parts in pending.items()}

    def check_beside_training(self) -> None:
        """Raises BadRequest: reading it in another thread would change what training draws."""
        if isinstance(self.dataset, DataLoader) and self.dataset.generator is None:
            raise BadRequest(
                "begin_pass: expected data to follow that is read without torch's global random"
                " numbers, which training draws from meanwhile, found a DataLoader without a"
                " generator: give it generator=torch.Generator().manual_seed(n)"
            )


@dataclass(frozen=True)
class WindowSize:
    """batches: whose keys are known ahead of the one that is trained on. num_bytes: of rows on the
    device. Raises BadRequest: `batches` is no integer, or out of range.
    """

    batches: int
    num_bytes: int

    def __post_init__(self) -> None:
        is_number = isinstance(self.batches, int) and not isinstance(self.batches, bool)
        if not is_number or not 1 <= self.batches <= BATCHES_MAX:
            raise BadRequest(
                "begin_window: expected batches as an integer in"
                f" [1, {BATCHES_MAX}], found {self.batches!r}"
            )
