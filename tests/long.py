"""How much a test tries: a little in every run, much with TRIREME_TEST_LONG=1 (`make long`)."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")


def pick(*, short: T, long: T) -> T:
    return long if os.environ.get("TRIREME_TEST_LONG") == "1" else short
