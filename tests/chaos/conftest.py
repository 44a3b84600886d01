"""Fixtures of the chaos suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos import lab as labs
from tests.chaos.lab import Lab


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    with labs.lab() as made:
        for kind, why in made.impossible.items():
            print(f"without {kind}: {why}")
        yield made
