"""The seed of the random tests: 1, or TRIREME_TEST_SEED; a failure names it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SEED = int(os.environ.get("TRIREME_TEST_SEED", "1"))


@contextmanager
def named_in_failure(where: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Adds the seed, and how far the test got, to whatever goes wrong inside."""
    print(f"seed {SEED}")
    try:
        yield
    except Exception as error:
        raise AssertionError(
            f"{where()}: {error}\nseed {SEED}; repeat with TRIREME_TEST_SEED={SEED}"
        ) from error
