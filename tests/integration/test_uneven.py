"""Workers with unequal data or none: in every mode each batch counts once, no worker hangs, and
metrics cover all examples.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import trireme as tr
from tests.integration import test_sync
from tests.integration.test_predecessor import Model, counts, make_trainer
from tests.jobs import Job
from trireme.job.cluster import Cluster

LENGTHS = (5, 0, 2)  # batches of the workers
BATCH = 4
EPOCHS = 2
SCHEMA = tr.data.Schema([tr.data.Sparse("a"), tr.data.Label()])


class Data:
    """Each worker has data of its own."""

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        assert num_streams == len(LENGTHS)
        num = LENGTHS[index] * BATCH
        keys = np.random.default_rng([3, index, epoch]).integers(0, 40, num)
        columns = {"a": keys, "label": np.ones(num, np.float32)}
        return tr.data.ArrayDataset(columns, schema=SCHEMA, batch_size=BATCH).stream(0, 1)


def expected_counts(*, is_sync: bool) -> dict[int, int]:
    """Updates of each key: one for each batch that it is in, in sync for each step."""
    actual = Counter[int]()
    for epoch in range(EPOCHS):
        streams = [
            [set(batch["a"].values.tolist()) for batch in Data().stream(w, 3, epoch=epoch)]
            for w in range(3)
        ]
        for step in range(max(LENGTHS)):
            sets = [stream[step] for stream in streams if step < len(stream)]
            for keys in [set().union(*sets)] if is_sync else sets:
                actual.update(keys)
    return dict(actual)


@pytest.mark.parametrize("mode", ["sync", "bounded", "async", "geo", "hybrid"])
def test_each_batch_counts_once_whatever_the_lengths_of_the_streams(mode: str) -> None:
    def work(cluster: Cluster) -> tuple[dict[str, float], dict[int, int]]:
        trainer = make_trainer(cluster, Model(), mode)
        trained = trainer.fit(Data(), epochs=EPOCHS)
        cluster.client.coordinator.gather({}, [])
        return trained, counts(cluster)

    with Job(2) as job:
        results = job.run(3, work)
    for trained, actual in results:
        assert trained["examples"] == sum(LENGTHS) * BATCH
        assert trained["loss"] == results[0][0]["loss"]
        assert actual == expected_counts(is_sync=mode == "sync")


def test_sync_with_a_worker_without_data_equals_one_process_on_the_union() -> None:
    """Gradients are weighted by examples, of unlike numbers, and of none."""
    rule, streams = test_sync.RULES["adam"], ([0], [], [1])
    with Job(1) as job:
        results = job.run(
            3, lambda cluster: test_sync.train(cluster, rule, streams[cluster.worker])
        )
    test_sync.assert_same_bits(results)
    _, after = test_sync.plain_torch(rule)
    for part, values in after.items():
        actual = results[0][part]
        np.testing.assert_allclose(actual, values, atol=test_sync.ATOL, rtol=0, err_msg=part)
