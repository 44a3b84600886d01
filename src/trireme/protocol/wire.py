"""Messages as Python values, checked field by field (docs/protocol.md, part 2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trireme.dense.optimizers import GroupValues
from trireme.errors import BadRequest
from trireme.optim import rule_values
from trireme.protocol.clipping import Clip
from trireme.protocol.columns import FORMS, KeyColumns
from trireme.protocol.job_limits import STREAMS_MAX
from trireme.protocol.routing import Floats, Keys

Array = npt.NDArray[Any]
T = TypeVar("T")

POSITION_MAX = 16
SHOWS_MAX = 2.0**115  # of a key in a push: those of all streams sum to less than float32 can hold
REASON_MAX = 200
VERSION_MAX = (1 << 32) - 2
PUSH_KINDS = GRADIENT, DIFFERENCE = ("gradient", "delta")  # "rows" is reserved
MEETING_ARRAYS = ALL, FIRST, SUM = ("all", "first", "sum")
"""all: every worker gets the arrays of all. first: worker 0 alone does. sum: worker 0 alone gets
their sum, added in the order of the workers.
"""


def need(body: Any, field: str, kind: type[T]) -> T:
    """body[field], which must have this type; an int must fit 64 bits. Raises BadRequest."""
    if type(body) is not dict and not isinstance(body, Mapping):  # isinstance alone takes longer
        raise BadRequest(f"message: expected a map with field {field!r}, found {body!r}")
    value: Any = body.get(field)
    if type(value) is kind and (kind is not int or -(2**63) <= body[field] < 2**63):
        return value
    if not isinstance(value, kind) or (kind is int and not _is_int64(value)):
        raise BadRequest(
            f"message: expected field {field!r} of type {kind.__name__}, found {value!r}"
        )
    return value


def need_list(body: Any, field: str, kind: type[T], max_length: int | None = None) -> list[T]:
    """body[field], a list of this type with at most `max_length` entries. Raises BadRequest."""
    values: list[Any] = need(body, field, list)
    is_long = max_length is not None and len(values) > max_length
    if is_long or not all(
        _is_int64(value) if kind is int else isinstance(value, kind) for value in values
    ):
        bound = "" if max_length is None else f" with at most {max_length} entries"
        raise BadRequest(
            f"message: expected field {field!r} as a list of {kind.__name__}{bound},"
            f" found {values!r}"
        )
    return values


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def need_name(body: Any, field: str, length_max: int) -> str:
    """body[field], a text of at most this many characters. Raises BadRequest."""
    name = need(body, field, str)
    if len(name) > length_max:
        raise BadRequest(
            f"message: expected field {field!r} of at most {length_max} characters,"
            f" found {name[:length_max]!r} of {len(name)}"
        )
    return name


def need_time(body: Any) -> int:
    """body["time"], data time in seconds; 0, the default: none. Raises BadRequest."""
    time = need(body, "time", int) if "time" in body else 0
    if not 0 <= time < 2**32:
        raise BadRequest(f"message: expected 0 <= time < 2**32, found {time}")
    return time


def need_version(body: Any, field: str) -> int:
    """body[field], the version of a save; 0: none. Raises BadRequest."""
    version = need(body, field, int)
    if not 0 <= version <= VERSION_MAX:
        raise BadRequest(
            f"message: expected field {field!r} in [0, {VERSION_MAX}], found {version}"
        )
    return version


def need_stop_reason(body: Any) -> str:
    """body["stops"], why a worker asks all to stop; empty, the default: not. Raises BadRequest."""
    reason = need(body, "stops", str) if "stops" in body else ""
    if len(reason) > REASON_MAX or not reason.isprintable():
        raise BadRequest(
            f"message: expected stops of at most {REASON_MAX} printable characters,"
            f" found {reason[:REASON_MAX]!r} of {len(reason)}"
        )
    return reason


class Arrays:
    """The arrays of a message, taken in order and checked for dtype and shape."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._rest: Iterator[Array] = iter(arrays)

    def take(self, what: str, dtype: type | None, shape: tuple[int | None, ...]) -> Array:
        """The next array. dtype None: any. None in `shape`: any length. Raises BadRequest."""
        array = next(self._rest, None)
        fits = array is not None and array.ndim == len(shape) and dtype in (None, array.dtype)
        if (
            array is None
            or not fits
            or any(want not in (None, have) for want, have in zip(shape, array.shape, strict=True))
        ):
            kind = "an array" if dtype is None else np.dtype(dtype).name
            none = "no more arrays" if array is None else f"{array.dtype} of {array.shape}"
            raise BadRequest(f"message: expected {what} as {kind} of shape {shape}, found {none}")
        return array

    def end(self) -> None:
        extra = next(self._rest, None)
        if extra is not None:
            raise BadRequest(f"message: expected no more arrays, found one of shape {extra.shape}")


@dataclass(slots=True)
class TablePush:
    """A push to one row class of a table."""

    table: str
    keys: Keys  # (K,) distinct
    gradients: Floats  # (K, D)
    values: dict[str, float | int]  # of the rule in the step
    columns: KeyColumns = field(default_factory=dict)  # that the table's schema declares
    row_class: int = 0


@dataclass(slots=True)
class BlocksPush:
    """A push to blocks."""

    groups: list[GroupValues]
    gradients: Floats  # flat, over the server's blocks in the map's order
    absent: list[str]  # parameters without a gradient, zeros in `gradients`: torch skips them


# The fields of a push that travel as they are, in this order.
_PLAIN: dict[str, Any] = {
    **dict.fromkeys(("stream", "sequence", "incarnation", "step"), int),
    "staged": bool,
    **dict.fromkeys(("computed_at", "examples"), int),
}


@dataclass(slots=True)
class Push:
    """One stream's update of one step, for one server. Its id is (stream, sequence)."""

    stream: int
    sequence: int
    incarnation: int
    step: int  # of the running pass, in modes where streams advance together; else 0
    staged: bool  # hold it until every member has staged the step (sync); else apply it on arrival
    computed_at: int  # the server's push counter when the weights were pulled; gives the staleness
    examples: int
    position: tuple[int, ...]  # of the stream in the data after this batch
    time: int  # data time in seconds; 0: none
    map_version: int
    tables: list[TablePush]
    blocks: BlocksPush | None
    kind: str = GRADIENT  # GRADIENT: for the rules; DIFFERENCE: to add to the weights
    clip: Clip | None = None  # how servers clip the sum of the step; None: they do not
    stops: str = ""  # why all members stop after the step, if it is staged; empty: they do not

    @property
    def id(self) -> tuple[int, int]:
        return (self.stream, self.sequence)

    @property
    def num_bytes(self) -> int:
        """About what a process needs to hold it: its arrays, and its texts and numbers."""
        num_bytes = 1024 * len(self.tables)
        for part in self.tables:
            num_bytes += part.keys.nbytes + part.gradients.nbytes
            num_bytes += sum(column.nbytes for column in part.columns.values())
        if self.blocks is not None:
            texts = len(repr(self.blocks.groups)) + sum(map(len, self.blocks.absent))
            num_bytes += self.blocks.gradients.nbytes + texts + 64 * len(self.blocks.absent)
        return num_bytes

    def to_wire(self) -> tuple[dict[str, Any], list[Array]]:
        arrays: list[Array] = []
        tables = []
        for part in self.tables:
            columns = list(part.columns)
            named = {"table": part.table, "class": part.row_class}
            tables.append({**named, "values": part.values, "columns": columns})
            arrays += [part.keys, part.gradients, *part.columns.values()]
        if self.blocks is not None:
            arrays.append(self.blocks.gradients)
        body = {
            "kind": self.kind,
            **{name: getattr(self, name) for name in _PLAIN},
            "position": list(self.position),
            "time": self.time,
            "map": self.map_version,
            "export": 0,  # reserved
            "tables": tables,
            "groups": None if self.blocks is None else self.blocks.groups,
            "absent": [] if self.blocks is None else self.blocks.absent,
            "clip": None if self.clip is None else self.clip.to_wire(),
            "stops": self.stops,
        }
        return body, arrays

    @staticmethod
    def from_wire(body: Mapping[str, Any], arrays: Sequence[Array]) -> Push:
        """Raises BadRequest, naming the field."""
        kind = body.get("kind")
        if kind not in PUSH_KINDS or (kind == DIFFERENCE and body.get("staged") is True):
            raise BadRequest(
                f"push: expected a kind among {PUSH_KINDS}, a delta not staged, found {kind!r}"
            )
        need(body, "export", int)  # reserved
        rest = Arrays(arrays)
        tables = [_table_push(part, rest) for part in need(body, "tables", list)]
        blocks = None
        if body.get("groups") is not None:
            gradients = rest.take("gradients of blocks", np.float32, (None,))
            groups = need_list(body, "groups", dict)
            blocks = BlocksPush(groups, gradients, need_list(body, "absent", str))
        rest.end()
        push = Push(
            kind=kind,
            **{name: need(body, name, kind) for name, kind in _PLAIN.items()},
            position=tuple(need_list(body, "position", int, POSITION_MAX)),
            time=need_time(body),
            map_version=need(body, "map", int),
            tables=tables,
            blocks=blocks,
            clip=Clip.from_wire(body.get("clip")),
            stops=need_stop_reason(body),
        )
        if (push.clip is not None or push.stops) and not push.staged:
            raise BadRequest(
                "push: expected clip nil and stops empty of a push that is not staged, found"
                f" {push.clip} and {push.stops!r}"
            )
        if not (0 <= push.stream < STREAMS_MAX and push.sequence >= 1 and push.examples >= 0):
            raise BadRequest(
                f"push: expected 0 <= stream < {STREAMS_MAX}, sequence >= 1, examples >= 0,"
                f" found {push.stream}, {push.sequence}, {push.examples}"
            )
        return push


def _table_push(part: Any, arrays: Arrays) -> TablePush:
    name = need(part, "table", str)
    values = _rule_values(need(part, "values", dict))
    keys = arrays.take(f"keys of {name}", np.uint64, (None,))
    gradients = arrays.take(f"gradients of {name}", np.float32, (len(keys), None))
    names = need_list(part, "columns", str, len(FORMS))
    if len(set(names)) != len(names) or not set(names) <= set(FORMS):
        raise BadRequest(f"push: expected columns among {tuple(FORMS)}, each once, found {names}")
    forms = [(column, *FORMS[column]) for column in names]
    columns = {c: arrays.take(f"{c} of {name}", kind, (len(keys), *s)) for c, kind, s in forms}
    return TablePush(name, keys, gradients, values, columns, need(part, "class", int))


RULE_VALUES = (
    *("lr", "weight_decay", "eps", "beta1", "beta2"),
    *("l1", "l2", "lower", "upper", "step"),
)


def _rule_values(values: Mapping[str, Any]) -> dict[str, float | int]:
    if set(values) != set(RULE_VALUES):
        raise BadRequest(f"push: expected values {RULE_VALUES}, found {sorted(map(str, values))}")
    for name, value in values.items():
        if type(value) not in (int, float) or value != value:
            raise BadRequest(f"push: expected {name} as a number, found {value!r}")
    need(values, "step", int)
    rule_values(values)  # raises here what it would raise when they are used
    return dict(values)
