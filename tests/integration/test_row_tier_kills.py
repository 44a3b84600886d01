"""A server with rows on SSD, killed at any moment: in pushes, evictions, cleaning, snapshots."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

import numpy as np

from tests.integration.counted_rows import KEYS, CountedRows
from tests.integration.durable_servers import DurableServers
from tests.long import IS_LONG
from tests.programs import Template
from tests.seeds import SEED

NUM_KILLS = 40 if IS_LONG else 6


def test_kills_at_any_moment_lose_and_repeat_nothing(programs: Template, tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    options = ["--memory", "6MiB", "--ssd_dir", ",".join(map(str, folders))]
    with (
        DurableServers(programs, 1, tmp_path, log_bytes=1 << 20, options=options) as servers,
        servers.join(0, 1) as cluster,
    ):
        job, may_end = CountedRows(cluster), Event()
        waits = rng.uniform(0.05, 0.8, NUM_KILLS)

        def kill() -> None:
            try:
                for seconds in waits:
                    Event().wait(seconds)
                    servers.kill(0)
                    servers.start(0)
            finally:
                may_end.set()

        killer = Thread(target=kill)
        killer.start()
        while not may_end.is_set():
            some = rng.choice(KEYS, int(rng.integers(1, 8000)), replace=False)
            job.push(some)
            job.pull(rng.choice(some, min(len(some), 100), replace=False))
        killer.join()
        for some in np.array_split(KEYS, 20):
            job.pull(some)
        [stats] = cluster.client.stats()
        assert servers.num_kills == NUM_KILLS
        assert stats["tables"]["t"]["tier"]["rows"] > 100_000
