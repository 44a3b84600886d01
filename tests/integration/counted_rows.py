"""A table whose rows tell how often they were pushed, many times larger than its small budget."""

from __future__ import annotations

import numpy as np
import torch

import trireme as tr
from trireme import _core
from trireme.job.cluster import Cluster
from trireme.optim import values_of_group
from trireme.worker.gradients import PushHeader, TableGradient

TABLE = tr.Table(
    "t", dim=16, optimizer=tr.optim.SGD(lr=1.0), initializer=tr.initializer.Constant(0.0)
)
KEYS = np.arange(200_000, dtype=np.uint64)


class CountedRows:
    """counts: the pushes of each key that were acknowledged."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.sequence = cluster, 0
        self.counts = np.zeros(len(KEYS), np.float32)
        cluster.client.create_table(TABLE.schema)
        for some in np.array_split(KEYS, 20):
            self.push(some)

    def push(self, keys: np.ndarray) -> None:
        keys = _core.unique(keys, self.cluster.pool)[0]
        ones = -torch.ones(len(keys), 16)
        values = values_of_group(TABLE.optimizer.group(), 1)
        header = PushHeader(self.sequence + 1, 0, [], 1)
        self.cluster.client.push(header, {TABLE.class_id: TableGradient(keys, ones, values)})
        self.sequence += 1
        self.counts[keys.astype(np.int64)] += 1

    def pull(self, keys: np.ndarray) -> None:
        """Assert that their rows are as pushed."""
        keys = _core.unique(keys, self.cluster.pool)[0]
        rows = self.cluster.client.pull({TABLE.class_id: keys}).rows[TABLE.class_id]
        np.testing.assert_array_equal(rows[:, 0], self.counts[keys.astype(np.int64)])
