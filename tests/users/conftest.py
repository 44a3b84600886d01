"""Fixtures of the scripts of users."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.programs import Template, template


@pytest.fixture(scope="session")
def programs() -> Iterator[Template]:
    """Starts programs quickly: torch is imported once for all of them."""
    with template() as made:
        yield made
