"""Seeded mutations of messages: of values by their structure, and of bytes.

A message is valid but for one to three changes, so that it gets past the first check and meets the
ones after it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 15, 16, 255, 4096, 4097, 65_536, 1 << 20),
    *(1 << 31, 1 << 32, (1 << 32) - 1, (1 << 40) - 1, 1 << 48, (1 << 63) - 1, -(1 << 63), 1 << 63),
    *(0.0, -0.0, 0.5, -1.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan")),
    *(
        "",
        "x",
        "x" * 300,
        "a\0b",
        "../../x",
        "/etc/passwd",
        "..",
        ".",
        "a/../../b",
        "\x1f1",
        "t\x1fx",
    ),
    *("file:///etc/passwd", "simplecache::file:///etc/passwd", "memory://x", "http://x/y", "~/x"),
    *(
        b"",
        b"\0" * 8,
        b"\xff" * 8192,
        [],
        {},
        [[]],
        {"": None},
        [None],
        [0] * 20,
        ["x"],
        [1.5, 2.5],
    ),
)
DTYPES = (
    "bool",
    "int8",
    "int32",
    "int64",
    "uint8",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)
ODD_KEYS = (0, 1, (1 << 64) - 1, 1 << 63, (1 << 63) - 1)


@dataclass
class Message:
    """A call: what a client sends, less id and deadline."""

    method: str
    body: dict[str, Any]
    arrays: list[Array]


class Mutator:
    """Draws messages from `known` ones. Two with the same seed draw the same."""

    def __init__(self, known: Sequence[Message], seed: int) -> None:
        self._known = list(known)
        self.random = random.Random(seed)
        # Rare methods would drown among pulls and pushes.
        self._methods: dict[str, list[Message]] = {}
        for message in self._known:
            self._methods.setdefault(message.method, []).append(message)

    def message(self) -> Message:
        """A new one."""
        draw = self.random
        base = draw.choice(self._methods[draw.choice(list(self._methods))])
        message = Message(base.method, copy.deepcopy(base.body), list(base.arrays))
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            kinds = [self._change_body] * 6 + [self._change_arrays] * 3 + [self._change_method]
            draw.choice(kinds)(message)
        return message

    def parts(self, parts: Sequence[bytes]) -> list[bytes]:
        """The parts of a packed message with bytes changed, the header's above all."""
        draw = self.random
        changed = [bytes(part) for part in parts]
        for _ in range(draw.choice((1, 1, 2, 4))):
            at = 0 if draw.random() < 0.8 else draw.randrange(len(changed))
            changed[at] = self._bytes(changed[at])
        if draw.random() < 0.1:
            changed.append(draw.randbytes(draw.choice((0, 1, 8, 100))))
        if draw.random() < 0.1 and len(changed) > 1:
            del changed[draw.randrange(1, len(changed))]
        return changed

    def _bytes(self, data: bytes) -> bytes:
        draw = self.random
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(5)
        if kind == 0 and data:  # flip a bit
            at %= len(data)
            return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        if kind == 1:  # put some in
            return data[:at] + draw.randbytes(draw.choice((1, 2, 4, 9))) + data[at:]
        if kind == 2:  # take some out
            return data[:at] + data[at + draw.choice((1, 2, 4, 9)) :]
        if kind == 3:  # cut
            return data[:at]
        # the first bytes of msgpack's large things
        marks = (b"\xdf\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91")
        return data[:at] + draw.choice(marks) * draw.choice((1, 1, 60)) + data[at + 1 :]

    # ---- bodies ----

    def _change_body(self, message: Message) -> None:
        draw = self.random
        holder = draw.choice(_holders(message.body))
        kind = draw.randrange(8)
        if isinstance(holder, dict):
            keys = list(holder)
            if kind == 0 or not keys:
                holder[draw.choice(("", "x", "lr", "name", "path"))] = self._value()
            elif kind == 1:
                del holder[draw.choice(keys)]
            else:
                key = draw.choice(keys)
                holder[key] = self._changed(holder[key])
        elif kind == 0 or not holder:
            holder.append(self._value())
        elif kind == 1:
            del holder[draw.randrange(len(holder))]
        elif kind == 2:
            holder.append(copy.deepcopy(draw.choice(holder)))
        elif kind == 3:
            draw.shuffle(holder)
        else:
            at = draw.randrange(len(holder))
            holder[at] = self._changed(holder[at])

    def _value(self) -> Any:
        """An odd value, or one from any place of any message."""
        draw = self.random
        if draw.random() < 0.7:
            return copy.deepcopy(draw.choice(ODD_VALUES))
        holder = draw.choice(_holders(draw.choice(self._known).body))
        values = list(holder.values()) if isinstance(holder, dict) else holder
        return copy.deepcopy(draw.choice(values)) if values else {}

    def _changed(self, value: Any) -> Any:
        draw = self.random
        if draw.random() < 0.5:
            return self._value()
        if type(value) is int:
            return value + draw.choice((-1, 1, 2, 64, 4096, -value - 1))
        if type(value) is float:
            return value * draw.choice((-1.0, 1e30, 0.0, float("nan"), float("inf")))
        if isinstance(value, str):
            return draw.choice(
                (value + "x", value[:-1], value * 2, value.upper(), f"../{value}", "")
            )
        if isinstance(value, bytes):
            return self._bytes(value)
        if isinstance(value, bool):
            return not value
        return self._value()

    # ---- arrays ----

    def _change_arrays(self, message: Message) -> None:
        draw, arrays = self.random, message.arrays
        kind = draw.randrange(9)
        if kind == 0 or not arrays:
            arrays.append(np.zeros(draw.choice((0, 1, 5)), draw.choice(DTYPES)))
            return
        at = draw.randrange(len(arrays))
        array = arrays[at]
        if kind == 1:
            del arrays[at]
        elif kind == 2:
            arrays.append(array)
        elif kind == 3:
            draw.shuffle(arrays)
        elif kind == 4:
            with np.errstate(invalid="ignore", over="ignore"):
                arrays[at] = array.astype(draw.choice(DTYPES))
        elif kind == 5:
            arrays[at] = array[: draw.randrange(len(array) + 1)] if array.ndim else array[None]
        elif kind == 6:
            arrays[at] = array.reshape(*draw.choice(((-1,), (1, -1), (-1, 1), (1, 1, -1))))
        else:
            arrays[at] = self._with_odd_values(array)

    def _with_odd_values(self, array: Array) -> Array:
        draw = self.random
        array, most = array.copy(), 60_000.0  # of float16
        flat = array.reshape(-1)
        for _ in range(min(array.size, draw.choice((1, 2, 50)))):
            at = draw.randrange(array.size)
            if array.dtype.kind == "f":
                flat[at] = draw.choice((np.nan, np.inf, -np.inf, -1.0, 0.0, most))
            elif draw.random() < 0.5:
                flat[at] = flat[draw.randrange(array.size)]  # a key twice
            else:
                odd = draw.choice(ODD_KEYS) & ((1 << 8 * array.dtype.itemsize) - 1)
                flat[at] = np.array(odd, np.uint64).astype(array.dtype)
        return array

    def _change_method(self, message: Message) -> None:
        message.method = self.random.choice(list(self._methods))


def _holders(value: Any) -> list[Any]:
    """All maps and lists within a value, itself included."""
    actual = [value] if isinstance(value, dict | list) else []
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            actual += _holders(inner)
    return actual
