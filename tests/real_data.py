"""Real data of tests: it lies beside the repository, in ../shared/data, and is no part of it."""

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
