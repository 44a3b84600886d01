"""Configurations of runs: YAML files, whose keys are written with dots, as `runner.epochs`."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trireme.errors import BadRequest

_REQUIRED: Any = object()
log = logging.getLogger("trireme")

_ENTRIES_MAX = 10_000
"""Keys of a file, those of aliases wherever they stand; an alias may also hold itself."""


class _Loader(yaml.SafeLoader):
    """A loader for which 5e-6 is a number; in YAML 1.1 it is a string, because it has no point.

    twice: the keys that a mapping has more than once, and in which lines.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[tuple[str, int, int]] = []

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    self.twice.append((key.value, lines[key.value], line))
                lines[key.value] = line
        return node


_Loader.yaml_implicit_resolvers = {
    first: list(resolvers) for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


class Config:
    """Values by dotted key. Lists are values; their items have no keys.

    It records the keys that were read: see `unread`.

    path: of the file. overrides: "key=value" each, already applied.
    """

    def __init__(
        self, values: Mapping[str, Any], *, path: Path | None = None, overrides: Sequence[str] = ()
    ) -> None:
        self.path, self.overrides = path, tuple(overrides)
        self._values = _flatten(values, path)
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Config:
        """Read a YAML file and apply overrides "key=value", whose values are YAML.

        Raises:
            BadRequest: not a file, not YAML, an override without "=", or a key that has a value as
                well as keys below it.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(f"Config: cannot read {str(path)!r}: {error}") from error
        values = _parse(text, f"in {path}")
        if not isinstance(values, Mapping):
            raise BadRequest(f"Config: expected keys and values in {path}, found {values!r}")
        runners = values.get("runner")
        if isinstance(runners, list) and all(isinstance(one, dict) for one in runners):
            raise BadRequest(
                f"Config: expected keys below runner in {path}, as in 'runner: {{epochs: 2}}',"
                " found a list of runners, as PaddleRec had before 2.0; docs/paddlerec.md, Files"
                " with several runners, has the keys of runner for those of runners and phases"
            )
        config = cls(values, path=path.resolve(), overrides=overrides)
        counts = Counter(override.partition("=")[0] for override in overrides)
        for key in [key for key, num in counts.items() if num > 1]:
            log.warning("Config: expected each override once, found %r again: the last counts", key)
        for override in overrides:
            key, equals, value = override.partition("=")
            if not equals or not key:
                raise BadRequest(f"Config: expected an override key=value, found {override!r}")
            config._override(_flatten({key: _parse(value, f"as the value of {key}")}, path))
        for section in sorted({key.rpartition(".")[0] for key in config._values}):
            config._check_section(section)
        return config

    def _override(self, values: Mapping[str, Any]) -> None:
        """Values in place of others, also within sections that were empty."""
        for key, value in values.items():
            section = key.rpartition(".")[0]
            while section:
                if self._values.get(section) == {}:
                    del self._values[section]
                section = section.rpartition(".")[0]
            self._values[key] = value

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def has_section(self, prefix: str) -> bool:
        """Whether any key begins with the prefix and a dot. Raises as `section`."""
        self._check_section(prefix)
        return self._has_below(prefix)

    def _has_below(self, prefix: str) -> bool:
        return any(key.startswith(f"{prefix}.") for key in self._values)

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of a key; the default if the key is absent or empty.

        Raises:
            BadRequest: the key is absent and there is no default, it has keys below it, or one
                above it has a value.
        """
        self._read.add(key)
        value = self._values.get(key)
        if value is not None:
            return value
        self._check_section(key.rpartition(".")[0])
        if below := [other for other in self._values if other.startswith(f"{key}.")]:
            raise BadRequest(
                f"Config: expected a value for {key}{self._where}, found keys below it, {below[0]}"
            )
        if default is _REQUIRED:
            raise BadRequest(f"Config: expected a value for {key}{self._where}, found none")
        return default

    @property
    def _where(self) -> str:
        return "" if self.path is None else f" in {self.path}"

    def _check_section(self, prefix: str) -> None:
        """Raises BadRequest: this key, or one above it, has a value; {} is one beside keys below
        it.
        """
        while prefix:
            value = self._values.get(prefix)
            is_empty = value == {} and not self._has_below(prefix)
            if value is not None and not is_empty:
                raise BadRequest(
                    f"Config: expected keys and values below {prefix}{self._where}, as in"
                    f" '{prefix}: {{key: value}}', found {value!r}"
                )
            prefix = prefix.rpartition(".")[0]

    def section(self, prefix: str) -> dict[str, Any]:
        """The values below a prefix: section("runner")["epochs"]; all values for "". Raises
        BadRequest: the prefix, or a key above it, has a value itself.
        """
        self._check_section(prefix)
        start = prefix + "." if prefix else ""
        values = {k[len(start) :]: v for k, v in self._values.items() if k.startswith(start)}
        self._read.update(start + key for key in values)
        return values

    def __getitem__(self, key: str) -> Any:
        """`get` without a default."""
        return self.get(key)

    def known(self) -> list[str]:
        """Keys that were asked for, present or not."""
        return sorted(self._read)

    def unread(self) -> list[str]:
        """Present keys that were never asked for, but for empty sections of those that were."""
        return sorted(
            key
            for key in set(self._values) - self._read
            if self._values[key] != {} or not any(one.startswith(f"{key}.") for one in self._read)
        )


# Also what the constructors of yaml raise: for 2001-99-99, "!!bool x", or brackets in brackets.
_WRONG_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)


def _parse(text: str, where: str) -> Any:
    try:
        loader = _Loader(text)
        values = loader.get_single_data()
    except _WRONG_YAML as error:
        raise BadRequest(f"Config: expected YAML {where}: {error}") from error
    for key, first, second in loader.twice:
        log.warning(
            "Config: expected each key once %s, found %r in lines %d and %d: the last one counts",
            *(where, key, first, second),
        )
    return values


def _flatten(values: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Values by key with dots, in their order; {} of a section without keys. Of a key that is there
    twice, as `a.b` and as `a: {b: }`, the last value, with a warning. Raises BadRequest: too many.
    """
    flat: dict[str, Any] = {}
    ahead = [*values.items()][::-1]
    num_entries = 0
    while ahead:
        key, value = ahead.pop()
        if isinstance(value, Mapping) and value:
            ahead += [(f"{key}.{name}", inner) for name, inner in value.items()][::-1]
        else:
            if str(key) in flat:
                log.warning(
                    "Config: expected each key once in %s, found %r in several spellings, such as"
                    " with dots and in a section: the last one counts",
                    *(path, str(key)),
                )
            flat[str(key)] = value
        if (num_entries := num_entries + 1) > _ENTRIES_MAX:
            raise BadRequest(
                f"Config: expected at most {_ENTRIES_MAX:,} keys in {path}, found more, as"
                f" {str(key)[:80]!r}"
            )
    return flat
