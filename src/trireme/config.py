"""Configurations of runs: YAML files whose keys are spoken of with dots, as `runner.epochs`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trireme.errors import BadRequest

_REQUIRED: Any = object()


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 5e-6 for a string, because it has no point; here it is a number."""


_Loader.yaml_implicit_resolvers = {
    first: list(resolvers) for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


class Config:
    """Values by dotted key. It remembers which keys were read: see `unread`.

    Lists are values; their items have no keys of their own.

    path: of the file that it was read from. overrides: "key=value" each, already applied.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        path: Path | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        self.path, self.overrides = path, tuple(overrides)
        self._values = dict(_flatten("", values))
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Config:
        """Read a YAML file; each override is "key=value", its value in YAML.

        Raises:
            BadRequest: not a file, not YAML, or an override without "=".
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(f"Config: cannot read {str(path)!r}: {error}") from error
        values = _parse(text, f"in {path}")
        if not isinstance(values, Mapping):
            raise BadRequest(f"Config: expected keys and values in {path}, found {values!r}")
        config = cls(values, path=path.resolve(), overrides=overrides)
        for override in overrides:
            key, equals, value = override.partition("=")
            if not equals or not key:
                raise BadRequest(f"Config: expected an override key=value, found {override!r}")
            config._values[key] = _parse(value, f"as the value of {key}")
        return config

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def has_section(self, prefix: str) -> bool:
        """Whether there are keys below a prefix."""
        return any(key.startswith(f"{prefix}.") for key in self._values)

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of a key; the default where it is absent or empty.

        Raises:
            BadRequest: the key is absent and there is no default.
        """
        self._read.add(key)
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            where = "" if self.path is None else f" in {self.path}"
            raise BadRequest(f"Config: expected a value for {key}{where}, found none")
        return default

    def section(self, prefix: str) -> dict[str, Any]:
        """The keys below a prefix, without it: section("runner")["epochs"]. All of them for ""."""
        start = prefix + "." if prefix else ""
        found = {k[len(start) :]: v for k, v in self._values.items() if k.startswith(start)}
        self._read.update(start + key for key in found)
        return found

    def __getitem__(self, key: str) -> Any:
        """As `get` without a default."""
        return self.get(key)

    def known(self) -> list[str]:
        """Keys that something has asked for, whether they are there or not."""
        return sorted(self._read)

    def unread(self) -> list[str]:
        """Keys that nothing has asked for."""
        return sorted(set(self._values) - self._read)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise BadRequest(f"Config: expected YAML {where}: {error}") from error


def _flatten(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat += _flatten(f"{key}.", value)
        else:
            flat.append((key, value))
    return flat
