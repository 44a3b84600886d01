"""The types of machines that may work, from a YAML file as `trireme place --help` shows it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from trireme.config import Config
from trireme.errors import BadRequest

DEVICES = ("cpu", "gpu")
_LABEL = re.compile(r"[a-z][a-z0-9]*")


@dataclass(frozen=True, kw_only=True)
class MachineType:
    """One type of worker. price: per hour. network: bytes per second. reads: whether it can read
    data. limit: workers that there are; None: any number. label: of compute workers of this type.
    """

    name: str
    cores: int
    price: float
    network: float
    device: str = "cpu"
    reads: bool = False
    limit: int | None = None
    label: str = ""  # the name


CORES_MAX = 1 << 20
NUMBER_MAX = 1e15
"""Of what is measured and paid, so that no product is infinite."""
_NETWORK_MAX = 1e18
_OPTIONAL = ("device", "reads", "limit", "label")


def read_types(path: Path) -> tuple[MachineType, ...]:
    """The types of a file, in its order. Raises BadRequest: a key is missing, unknown, or twice, or
    its value is out of range; no type reads data; two have one label.
    """
    config = Config.load(path)
    _check_keys_once(path)
    values: dict[str, dict[str, Any]] = {}
    for key, value in config.section("").items():
        section, _, rest = key.partition(".")
        name, _, field = rest.partition(".")
        if section != "types" or not field:
            raise BadRequest(f"{path}: expected types.NAME.KEY, found {key}: {value!r}")
        values.setdefault(name, {})[field] = value
    types = tuple(_read_type(path, name, of_type) for name, of_type in values.items())
    _check_as_a_whole(path, types)
    return types


def _check_keys_once(path: Path) -> None:
    """YAML takes the last of several equal keys without a word."""
    seen: set[int] = set()  # an alias is its node again
    pending = [yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)]
    while pending:
        node = pending.pop()
        if not isinstance(node, yaml.MappingNode) or id(node) in seen:
            continue
        seen.add(id(node))
        keys: set[str] = set()
        for key, value in node.value:
            if key.value in keys:
                line = key.start_mark.line + 1
                raise BadRequest(f"{path}:{line}: expected {key.value!r} once, found it again")
            keys.add(key.value)
            pending.append(value)


def _read_type(path: Path, name: str, values: Mapping[str, Any]) -> MachineType:
    known = [field.name for field in fields(MachineType)][1:]
    for key in values:
        if key not in known:
            where = f"{path}: types.{name}"
            raise BadRequest(f"{where}: expected keys out of {', '.join(known)}, found {key}")
    given_values = {
        key: _checked(path, name, key, values.get(key))
        for key in known
        if values.get(key) is not None or key not in _OPTIONAL
    }
    return MachineType(name=name, **{"label": _checked(path, name, "label", name), **given_values})


# Key -> what is expected, and whether a value is that.
_CHECKS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "cores": (
        f"an integer in [1, {CORES_MAX}]",
        lambda value: type(value) is int and 1 <= value <= CORES_MAX,
    ),
    "price": (
        f"a number in [0, {NUMBER_MAX:g}], per hour",
        lambda value: _is_number(value) and 0 <= value <= NUMBER_MAX,
    ),
    "network": (
        f"a number in [1, {_NETWORK_MAX:g}], bytes per second",
        lambda value: _is_number(value) and 1 <= value <= _NETWORK_MAX,
    ),
    "device": (f"one of {', '.join(DEVICES)}", lambda value: value in DEVICES),
    "reads": ("true or false", lambda value: isinstance(value, bool)),
    "limit": ("an integer >= 1", lambda value: type(value) is int and value >= 1),
    "label": (
        "small letters and digits, a letter first",
        lambda value: isinstance(value, str) and _LABEL.fullmatch(value) is not None,
    ),
}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _checked(path: Path, name: str, key: str, value: Any) -> Any:
    expected, is_valid = _CHECKS[key]
    if not is_valid(value):
        shown = "none" if value is None else repr(value)
        raise BadRequest(f"{path}: types.{name}.{key}: expected {expected}, found {shown}")
    return value


def _check_as_a_whole(path: Path, types: Sequence[MachineType]) -> None:
    if not any(kind.reads for kind in types):
        names = ", ".join(kind.name for kind in types) or "no types"
        raise BadRequest(f"{path}: expected a type with reads: true, found {names}")
    labels: dict[str, str] = {}
    for kind in types:
        other = labels.setdefault(kind.label, kind.name)
        if other != kind.name:
            raise BadRequest(
                f"{path}: types.{kind.name}.label: expected a label of its own, found"
                f" {kind.label!r}, as of {other}"
            )


def type_named(types: Sequence[MachineType], name: str, path: Path) -> MachineType:
    """Raises BadRequest: there is no such type; names all."""
    for kind in types:
        if kind.name == name:
            return kind
    names = ", ".join(kind.name for kind in types)
    raise BadRequest(f"place: expected --type to be one of {names} of {path}, found {name!r}")
