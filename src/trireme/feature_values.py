"""The features that read a table, and the kind of their values: strings, whose hashes are keys, or
integers, which are keys themselves. The same value in the other form is another row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trireme.errors import BadRequest


class FeatureValues:
    """What a process knows of the features of one table: their names from modules, their kinds from
    the first batch that was trained on, or from a checkpoint.

    Attributes:
        are_strings: feature -> whether its values are strings. A feature of which nobody knows is
            absent.

    Threads: any.
    """

    def __init__(self) -> None:
        self.are_strings: dict[str, bool] = {}
        self._names: dict[str, None] = {}  # a set in the order of the modules
        self._together: list[frozenset[str]] = []  # the features of each module
        self._are_apart = False  # `apart` has named some

    def declare(self, names: Iterable[str]) -> None:
        """A module reads the table by these features."""
        self._names |= dict.fromkeys(names)
        self._together.append(frozenset(names))

    def check_name(self, table: str, feature: str) -> None:
        """Raises BadRequest: modules read the table, and none by this feature."""
        if self._names and feature not in self._names:
            raise BadRequest(
                f"table {table!r}: expected one of the features that read it,"
                f" {', '.join(self._names)}, found {feature!r}"
            )

    def learn(self, feature: str, are_strings: bool | None) -> None:
        """Training takes such values. None: nobody knows what they were."""
        if are_strings is not None:
            self.are_strings.setdefault(feature, are_strings)

    def apart(self, feature: str) -> list[str]:
        """Features of strings, as this one, that no module reads together with it; the first time
        that there are some: a model may have hundreds.
        """
        near = frozenset[str]().union(*(names for names in self._together if feature in names))
        names = [name for name in self._names if self.are_strings.get(name) and name not in near]
        first, self._are_apart = not self._are_apart, self._are_apart or bool(names)
        return names if first else []

    def check(self, reader: str, feature: str, are_strings: bool | None) -> None:
        """Raises BadRequest: training took values of the other kind. reader: begins the message."""
        trained = self.are_strings.get(feature)
        if are_strings is None or trained is None or trained == are_strings:
            return
        raise BadRequest(
            f"{reader}: expected {_kind(trained)} as feature {feature!r}, as in training, found"
            f" {_kind(are_strings)}, which have other keys"
        )

    def restore(self, are_strings: Mapping[str, bool]) -> None:
        """Know what a checkpoint says, and nothing else."""
        self.are_strings = dict(are_strings)


def _kind(are_strings: bool) -> str:
    return "strings" if are_strings else "integers"
