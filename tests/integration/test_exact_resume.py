"""Jobs that are killed and go on from their newest checkpoint. In sync they end with the same bytes
as one that was never stopped; in async every batch is applied exactly once.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.integration.resumer import EPOCHS, NUM_BATCHES, Unequal, make_trainer, model_of
from tests.integration.resuming import Jobs, assert_same, complete
from tests.long import pick
from tests.programs import Template
from tests.property.seeds import SEED
from trireme import _core
from trireme.cluster import embedded

EVERY = ("--every_steps", "7")


@pytest.mark.parametrize(
    ("num_workers", "num_servers"),
    pick(short=[(2, 2)], long=[(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]),
)
def test_killed_and_resumed_equals_never_stopped(
    programs: Template, tmp_path: Path, num_workers: int, num_servers: int
) -> None:
    random = Random(f"{SEED} {num_workers} {num_servers}")
    jobs = Jobs(programs, num_workers, num_servers, tmp_path)
    whole = tmp_path / "whole"
    jobs.run(str(whole), *EVERY)
    for number in range(pick(short=1, long=10)):
        killed = tmp_path / f"killed{number}"
        kill_at = random.randint(1, EPOCHS * NUM_BATCHES)
        print(f"seed {SEED}: killed at step {kill_at}")
        jobs.kill_at(kill_at, str(killed), *EVERY)
        jobs.run(str(killed), *EVERY)
        assert_same(complete(killed)[-1], complete(whole)[-1])


@pytest.mark.parametrize(("num_workers", "num_servers"), [(2, 2)])
def test_async_loses_and_repeats_no_batch(
    programs: Template, tmp_path: Path, num_workers: int, num_servers: int
) -> None:
    random = Random(f"{SEED} async")
    jobs = Jobs(programs, num_workers, num_servers, tmp_path)
    arguments = ("--mode", "async", "--rule", "count", "--every_steps", "1")
    for number in range(pick(short=1, long=20)):
        folder = tmp_path / str(number)
        kill_at = random.randint(2, NUM_BATCHES)
        print(f"seed {SEED}: killed at step {kill_at}")
        jobs.kill_at(kill_at, str(folder), *arguments)
        jobs.run(str(folder), *arguments)
        assert counts(complete(folder)[-1]) == expected_counts(num_workers)


def expected_counts(num_workers: int) -> dict[int, int]:
    """How often each key is in a batch."""
    found = Counter[int]()
    for epoch in range(EPOCHS):
        for worker in range(num_workers):
            for batch in Unequal().stream(worker, num_workers, epoch=epoch):
                found.update(set(batch["a"].values.tolist()) | set(batch["b"].values.tolist()))
    return dict(found)


def counts(path: Path) -> dict[int, int]:
    """Updates of each key in a checkpoint of the rule Count."""
    with embedded(threads=1) as cluster:
        trainer = make_trainer("async", model_of("count"), cluster=cluster)
        trainer.load(path)
        keys = _core.unique(np.arange(1000, dtype=np.uint64), cluster.pool)[0]
        rows = cluster.client.pull({"t": keys}).rows["t"]
        assert np.array_equal(rows, rows[:, :1].repeat(rows.shape[1], 1))
        return {
            key: int(count)
            for key, count in zip(keys.tolist(), rows[:, 0].tolist(), strict=True)
            if count
        }
