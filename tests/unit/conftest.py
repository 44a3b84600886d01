"""Fixtures of tests of models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.seeds import SEED
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """An embedded cluster, the default one; torch's random numbers begin with the seed."""
    torch.manual_seed(SEED)
    print(f"SEED={SEED}")
    with embedded() as cluster:
        set_default(cluster)
        yield cluster
