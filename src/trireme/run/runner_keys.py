"""Typed values of the runner.* keys of a configuration.

Nothing here loads torch, so that `trireme launch -m` finds a wrong configuration before it starts
anything.
"""

from pathlib import Path
from typing import Any

from trireme.config import Config
from trireme.errors import BadRequest

INTEGER_MAX = 2**31 - 1


class RunnerKeys:
    """Typed values of runner.*; an absent or empty key has its default. Relative paths start at the
    folder of the file.

    Methods raise BadRequest for a value of another type or out of range.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.base = Path() if config.path is None else config.path.parent

    def get(self, key: str, default: Any = None) -> Any:
        return self.config.get(f"runner.{key}", default)

    def integer(self, key: str, default: int, *, low: int = 1, high: int = INTEGER_MAX) -> int:
        value = self.optional_integer(key, low=low, high=high)
        return default if value is None else value

    def optional_integer(self, key: str, *, low: int = 1, high: int = INTEGER_MAX) -> int | None:
        value = self.get(key)
        if value is not None and (type(value) is not int or value < low):
            raise _refused(key, f"an integer >= {low}", value, example=low)
        if value is not None and value > high:
            raise _refused(key, f"an integer <= {high}", value, example=high)
        return value

    def seconds(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise _refused(key, "seconds > 0", value, example=10)
        return float(value)

    def switch(self, key: str) -> bool:
        return self.optional_switch(key) or False

    def optional_switch(self, key: str) -> bool | None:
        """True or False, which PaddleRec's files also write as 1 or 0."""
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        if type(value) is not int or value not in (0, 1):
            raise _refused(key, "True or False", value, example=False)
        return value == 1

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not (isinstance(value, str) and "\0" not in value):
            raise _refused(key, "text", value, example="TEXT")
        return value or None

    def names(self, key: str) -> tuple[str, ...]:
        value = self.get(key, ())
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise _refused(key, "a list of names", value, example="[NAME,NAME]")
        return tuple(value)

    def file_name(self, key: str) -> str:
        value = self.get(key, "")
        if not isinstance(value, str) or value in (".", "..") or "/" in value or "\0" in value:
            raise BadRequest(f"runner.{key}: expected the name of a file, found {value!r}")
        return value

    def path(self, key: str) -> str | None:
        """A location of data; one with a scheme stays as it is."""
        value = self.text(key)
        return None if value is None else self._located(value)

    def paths(self, key: str) -> tuple[str, ...]:
        """Locations of data: one, or a list of them; none without the key."""
        value = self.get(key)
        values = value if isinstance(value, list) else [value] if value else []
        if not all(isinstance(one, str) and one and "\0" not in one for one in values):
            raise _refused(key, "a path or a list of paths", value, example="PATH")
        return tuple(map(self._located, values))

    def _located(self, path: str) -> str:
        return path if "://" in path else str(self.base / path)

    def folder(self, key: str) -> Path | None:
        value = self.text(key)
        if value is not None and "://" in value:
            raise BadRequest(
                f"runner.{key}: expected a folder that all servers and worker 0 share,"
                f" found {value!r}"
            )
        return None if value is None else (self.base / value).absolute()

    def script(self, key: str) -> Path | None:
        """A Python file, named with or without its ending."""
        value = self.text(key)
        if value is None:
            return None
        return self.base / (value if value.endswith(".py") else f"{value}.py")


def _refused(key: str, expected: str, value: object, *, example: object) -> BadRequest:
    return BadRequest(
        f"runner.{key}: expected {expected}, found {value!r};"
        f" -o runner.{key}={example} overrides the file"
    )
