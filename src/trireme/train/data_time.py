"""The time of the data, by which rows fade and expire."""

from collections.abc import Callable

from trireme.errors import BadRequest


class DataTime:
    """Seconds since 1970. source: a number, or a function that returns it for every push; 0: the
    data has no time.
    """

    def __init__(self) -> None:
        self.source: float | Callable[[], float] = 0

    def seconds(self) -> int:
        """Whole seconds as of now. Raises BadRequest: pushes cannot carry them."""
        time = self.source() if callable(self.source) else self.source
        if isinstance(time, bool) or not 0 <= time < 2**32:
            raise BadRequest(f"set_time: expected seconds from 0 to {2**32 - 1}, found {time!r}")
        return int(time)
