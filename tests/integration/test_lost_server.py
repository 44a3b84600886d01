"""A server that dies for good: calls that may take an hour end within the job's timeout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.programs import Template
from trireme.errors import Unavailable
from trireme.interchange.worker_side.dense_blocks import read_blocks


def test_calls_of_an_hour_miss_a_dead_server_within_the_timeout(
    programs: Template, tmp_path: Path
) -> None:
    with (
        DurableServers(programs, 2, tmp_path, durability="none") as servers,
        servers.join(0, 1, timeout_s=2) as cluster,
    ):
        table = tr.Table("ids", dim=2, optimizer=tr.optim.Adagrad(lr=0.5))
        rows = tr.TableView(table, cluster=cluster)
        named = tr.TableView(table, "id", np.arange(20), cluster=cluster)
        assert rows.top("time", 3).values == []
        servers.kill(1)
        for call in (
            lambda: rows.top("time", 3),
            lambda: named.top("time", 3),
            lambda: read_blocks(cluster.client),
        ):
            with pytest.raises(Unavailable, match=r"not reached .*for 2 s"):
                call()
        cluster.abandon()
