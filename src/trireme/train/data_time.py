"""The time of the data, by which rows fade and expire."""

from collections.abc import Callable
from typing import Any

import numpy as np

from trireme.errors import BadRequest


class DataTime:
    """Seconds since 1970. source: a number, or a function that returns it for every push; 0: that
    of the dataset that was last trained on and had one, else the data has no time.
    """

    def __init__(self) -> None:
        self.source: float | Callable[[], float] = 0
        self.of_dataset: float = 0

    def seconds(self) -> int:
        """Whole seconds as of now. Raises BadRequest: pushes cannot carry them."""
        return seconds_of(self.source or self.of_dataset)


def seconds_of(source: float | Callable[[], float]) -> int:
    """Whole seconds of a number, or of what a function returns now. Raises BadRequest."""
    time: Any = source() if callable(source) else source
    is_number = isinstance(time, (int, float, np.number)) and not isinstance(time, bool)
    if not is_number or not 0 <= time < 2**32:
        what = f"seconds since 1970, 0 to {2**32 - 1}, as `timestamp()` of a datetime"
        raise BadRequest(f"set_time: expected {what}, found {time!r}")
    return int(time)
