"""What the integration tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.programs import Template, template
from trireme import cluster as clusters
from trireme.cluster import Cluster, embedded


@pytest.fixture(scope="session")
def programs() -> Iterator[Template]:
    """Starts programs quickly: torch is imported once for all of them."""
    with template() as made:
        yield made


@pytest.fixture
def default_cluster() -> Iterator[Cluster]:
    """Embedded tables, which modules find by themselves."""
    with embedded() as cluster:
        clusters.set_default(cluster)
        yield cluster
