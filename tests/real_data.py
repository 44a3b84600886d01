"""Real data for tests, in ../shared/data beside the repository and not part of it."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "shared" / "data"


def real_data(name: str) -> Path:
    """The path of a file there; skips the test where it is absent."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no real data at {path}")
    return path
