"""An error as a message: its code, name and text, and its details."""

from typing import Any

from trireme.errors import BadRequest, Internal, TriremeError, class_of_code
from trireme.rpc import frames


def pack_error(request_id: int, error: TriremeError, handled: bool) -> list[Any]:
    """The parts of an error that answers a request. handled: its handler has run."""
    # Not every message is valid UTF-8: file names with surrogates are not.
    message = str(error).encode("utf-8", "backslashreplace").decode()
    header = {
        "t": frames.ERROR,
        "id": request_id,
        "code": error.code,
        "name": error.name,
        "message": message[: frames.MESSAGE_CHARS_MAX],
        "handled": handled,
    }
    if error.details is None:
        return frames.pack(header, ())
    try:
        return frames.pack(header | {"details": error.details}, ())
    except BadRequest as fault:
        return pack_error(request_id, Internal(f"the handler's error: {fault}"), handled)


def error_of(header: frames.Header) -> TriremeError:
    """The error that a message of this header is. Raises BadRequest."""
    error = class_of_code(frames.int_field(header, "code"))(
        frames.str_field(header, "message", frames.MESSAGE_CHARS_MAX)
    )
    if "details" in header:
        error.details = frames.map_field(header, "details")
    return error
