"""Facts: what a variable or an argument states about this process, with its name."""

from collections.abc import Mapping
from typing import NamedTuple

from trireme.errors import BadRequest


class Fact(NamedTuple):
    """value: text from the environment, or an argument. name: of the variable or argument."""

    value: object
    name: str

    def integer(self, *, low: int) -> int:
        """Raises BadRequest: not an integer of at least `low`."""
        text = str(self.value).strip()
        if not text.isdecimal() or int(text) < low:
            raise BadRequest(
                f"init: expected {self.name} to be an integer >= {low}, found {text!r}"
            )
        return int(text)


Facts = dict[str, Fact]


def as_text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def is_set(env: Mapping[str, str], name: str) -> bool:
    return bool(env.get(name, "").strip())


def stated(env: Mapping[str, str], facts: Mapping[str, str]) -> Facts:
    """The facts of the variables that are set. facts: by name of a variable."""
    return {fact: Fact(env[name], name) for name, fact in facts.items() if is_set(env, name)}
