"""Fixtures of tests of models, and of calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.echo import echo
from tests.seeds import SEED
from trireme import fleet
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.rpc import Server


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """An embedded cluster, the default one; torch's random numbers begin with the seed."""
    torch.manual_seed(SEED)
    print(f"SEED={SEED}")
    with embedded() as cluster:
        set_default(cluster)
        yield cluster


@pytest.fixture
def server() -> Iterator[Server]:
    """Answers calls of `echo`."""
    with Server("127.0.0.1:0", {"echo": echo}, name="s") as server:
        yield server


@pytest.fixture
def fleet_job() -> Iterator[None]:
    """A job of Fleet with one worker, begun and ended."""
    with embedded(threads=1) as cluster:
        set_default(cluster)
        fleet.init()
        torch.manual_seed(0)
        yield
        fleet.stop_worker()
