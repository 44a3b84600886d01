"""The bytes of a message: a msgpack map, then one part per array that does not lie in memory which
both ends share (docs/protocol.md).

Packing never copies an array. Unpacking checks everything before it reads an array's bytes, and
copies only arrays that are small or misaligned.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from trireme.errors import BadRequest
from trireme.rpc.limits import Limits

MAGIC = "trireme"
VERSION = 1

HELLO, WELCOME, CALL, REPLY, ERROR = "hello", "welcome", "call", "reply", "error"
PIECE = "piece"
KINDS = (HELLO, WELCOME, CALL, REPLY, ERROR, PIECE)

# The limits in a server's welcome, which clients obey.
CREDIT = (
    *("requests_max", "inflight_bytes_max"),
    *("message_bytes_max", "header_bytes_max", "arrays_max"),
)

NDIM_MAX = 8
DIM_MAX = 1 << 48
NAME_CHARS_MAX = 256
MESSAGE_CHARS_MAX = 4096
ID_MAX = (1 << 63) - 1
TIMEOUT_MS_MAX = 1 << 40

# Smaller arrays are copied out of their frame: ZeroMQ keeps small frames in shared receive buffers
# of 8 KiB, at any alignment, and a view of a few bytes would keep a whole buffer alive.
COPY_BYTES_MAX = 4096

# A CURVE MESSAGE command around a part: its name, a short nonce, a flag byte and the box's tag.
_CURVE_BYTES = 8 + 8 + 1 + 16

# By name, little-endian; anything else, objects and strings above all, is refused.
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Array = NDArray[Any]
Header = dict[str, Any]
Place = int | None
"""Where an array lies in shared memory; None: in a part of the message."""


def pack(header: Header, arrays: Sequence[Array], places: Sequence[Place] = ()) -> list[Any]:
    """The parts of a message: [header bytes, memoryview of each array]. places: of all arrays, if
    some lie in shared memory; they have no part.

    Raises:
        BadRequest: an array is not C-contiguous or has a dtype that the protocol lacks; the body
            has a value that msgpack lacks.
    """
    if arrays:
        header["a"] = [_spec(i, array) for i, array in enumerate(arrays)]
    if places:
        header["s"] = list(places)
        arrays = [array for array, place in zip(arrays, places, strict=True) if place is None]
    try:
        head = msgpack.packb(header)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRequest(f"rpc.pack: body must hold msgpack values only, found: {error}") from error
    bodies = [one.reshape(-1).view(np.uint8).data if one.size else b"" for one in arrays]
    return [head, *bodies]


def unpack(
    parts: Sequence[Any], limits: Limits, shared: NDArray[np.uint8] | None = None
) -> tuple[Header, list[Array]]:
    """The header and the arrays of a received message; `parts` are buffers such as zmq.Frame.
    shared: memory that its sender shares.

    Returns:
        The header, a map whose "t" is one of KINDS, and read-only arrays. A large array is a view
        that keeps its part alive. One in shared memory may change: see `own`.

    Raises:
        BadRequest: the message does not follow docs/protocol.md.
    """
    header = _unpack_header(memoryview(parts[0]), limits)
    specs = header.get("a", [])
    if "s" in header:
        parts = _with_shared(parts, header, specs, shared)
    if type(specs) is not list or len(specs) != len(parts) - 1:
        declared = len(specs) if type(specs) is list else repr(specs)[:80]
        raise BadRequest(
            f"rpc.unpack: header declares {declared} arrays, found {len(parts) - 1} parts"
        )
    places = header.get("s") or [None] * len(specs)
    return header, [_array(i, specs[i], parts[i + 1], places[i]) for i in range(len(specs))]


def places_of(header: Header) -> list[Place]:
    """The places of the arrays of an unpacked message; empty: none lies in shared memory."""
    places: list[Place] = header.get("s", [])
    return places


def own(arrays: Sequence[Array], places: Sequence[Place]) -> list[Array]:
    """Arrays of a message as its receiver may keep and check them: copies of those in shared
    memory, read-only.
    """
    if not places:
        return list(arrays)
    return [
        array if place is None else _read_only(array.copy())
        for array, place in zip(arrays, places, strict=True)
    ]


def shared_bytes(arrays: Sequence[Array], places: Sequence[Place]) -> int:
    """The bytes of those arrays of a message that lie in shared memory."""
    placed = zip(arrays, places, strict=True) if places else ()
    return sum(array.nbytes for array, place in placed if place is not None)


def can_send(array: Array) -> bool:
    """Whether `pack` takes the array."""
    return array.dtype in _NAMES and array.flags.c_contiguous and array.ndim <= NDIM_MAX


def int_field(header: Header, name: str, low: int = 0, high: int = ID_MAX) -> int:
    """An integer of a header, checked to be within [low, high]; BadRequest otherwise."""
    value = header.get(name)
    if type(value) is not int or not low <= value <= high:
        raise _bad_field(header, name, f"an integer in [{low}, {high}]")
    return value


def str_field(header: Header, name: str, chars_max: int = NAME_CHARS_MAX) -> str:
    """A string of a header, at most `chars_max` characters long; BadRequest otherwise."""
    value = header.get(name)
    if type(value) is not str or len(value) > chars_max:
        raise _bad_field(header, name, f"a string of at most {chars_max} characters")
    return value


def map_field(header: Header, name: str) -> dict[str, Any]:
    """A map of a header; BadRequest if it is missing or something else."""
    value = header.get(name)
    if type(value) is not dict:
        raise _bad_field(header, name, "a map")
    return value


def _bad_field(header: Header, name: str, expected: str) -> BadRequest:
    value = repr(header.get(name, "nothing"))[:80]
    return BadRequest(f"rpc.unpack: {header.get('t')} needs {name!r}, {expected}; found {value}")


def wire_bytes(num_bytes: int, is_curve: bool) -> int:
    """Bytes of a part of `num_bytes` on the wire, with ZMTP's framing."""
    if is_curve:
        num_bytes += _CURVE_BYTES
    return num_bytes + (2 if num_bytes <= 255 else 9)


def _spec(i: int, array: Array) -> list[Any]:
    name = _NAMES.get(array.dtype)
    if name is None or not array.flags.c_contiguous:
        raise BadRequest(
            f"rpc.pack: array {i} must be C-contiguous and of dtype {', '.join(DTYPES)}; "
            f"found dtype {array.dtype}, shape {array.shape}, strides {array.strides}"
        )
    if array.ndim > NDIM_MAX:
        raise BadRequest(f"rpc.pack: array {i} may have {NDIM_MAX} dims, found shape {array.shape}")
    return [name, list(array.shape)]


def _unpack_header(head: memoryview, limits: Limits) -> Header:
    if head.nbytes > limits.header_bytes_max:
        raise BadRequest(
            f"rpc.unpack: header may have {limits.header_bytes_max} bytes (header_bytes_max), found"
            f" {head.nbytes}"
        )
    try:
        # max_ext_len=0: no extension types, timestamps included.
        header = msgpack.unpackb(head, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise BadRequest(
            f"rpc.unpack: header must be one msgpack map, found {head.nbytes} bytes: "
            f"{type(error).__name__} {error}"[:300]
        ) from error
    if type(header) is not dict or header.get("t") not in KINDS:
        raise BadRequest(
            f"rpc.unpack: header must be a map whose 't' is one of {', '.join(KINDS)}, "
            f"found {repr(header)[:80]}"
        )
    return header


def _array(i: int, spec: Any, part: Any, place: Place) -> Array:
    dtype, shape = _checked_spec(i, spec)
    buffer = memoryview(part)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes != buffer.nbytes:
        raise BadRequest(
            f"rpc.unpack: array {i} of dtype {dtype} and shape {shape} has {num_bytes} bytes, "
            f"found {buffer.nbytes}"
        )
    if num_bytes == 0:
        array = np.empty(shape, dtype)
    else:
        array = np.frombuffer(buffer, dtype).reshape(shape)
        if place is None and (num_bytes <= COPY_BYTES_MAX or not array.flags.aligned):
            array = array.copy()
    return _read_only(array)


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _with_shared(
    parts: Sequence[Any], header: Header, specs: Any, shared: NDArray[np.uint8] | None
) -> list[Any]:
    """The parts of a message with those in shared memory among them."""
    places = header["s"]
    if shared is None or header["t"] == PIECE:
        raise BadRequest("rpc.unpack: a message has arrays in shared memory, which nobody shares")
    if type(specs) is not list or type(places) is not list or len(places) != len(specs):
        raise BadRequest(f"rpc.unpack: 's' needs a place for each array, found {repr(places)[:80]}")
    rest = iter(parts[1:])
    whole, total = [parts[0]], 0
    for i, (spec, place) in enumerate(zip(specs, places, strict=True)):
        if place is None:
            whole += [part] if (part := next(rest, None)) is not None else []
            continue
        dtype, shape = _checked_spec(i, spec)
        num_bytes = math.prod(shape) * dtype.itemsize
        total += num_bytes  # a few bytes of header could name the same bytes a thousand times
        is_inside = type(place) is int and 0 <= place <= len(shared) - num_bytes
        if not is_inside or total > len(shared):
            raise BadRequest(
                f"rpc.unpack: array {i} of {num_bytes} bytes must lie in {len(shared)} bytes of"
                f" shared memory, {total} with those before, found it at {repr(place)[:80]}"
            )
        whole.append(shared[place : place + num_bytes])
    return [*whole, *rest]


def _checked_spec(i: int, spec: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if type(spec) is not list or [*map(type, spec)] != [str, list]:
        raise BadRequest(f"rpc.unpack: array {i} needs [dtype, shape], found {repr(spec)[:80]}")
    dtype = DTYPES.get(spec[0])
    if dtype is None:
        raise BadRequest(
            f"rpc.unpack: array {i} needs a dtype of {', '.join(DTYPES)}, found {spec[0][:80]!r}"
        )
    shape = spec[1]
    if len(shape) == 1 and type(shape[0]) is int and 0 <= shape[0] <= DIM_MAX:
        return dtype, (shape[0],)  # most arrays
    if len(shape) > NDIM_MAX or not all(type(dim) is int and 0 <= dim <= DIM_MAX for dim in shape):
        raise BadRequest(
            f"rpc.unpack: array {i} needs at most {NDIM_MAX} dims in [0, {DIM_MAX}], "
            f"found {repr(shape)[:80]}"
        )
    if math.prod(max(dim, 1) for dim in shape) > DIM_MAX:  # an empty array's, which has no bytes
        raise BadRequest(f"rpc.unpack: array {i} may have {DIM_MAX} elements, found {shape}")
    return dtype, tuple(shape)
